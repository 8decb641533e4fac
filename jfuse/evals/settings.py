"""What an evaluation runs: models, tasks, methods, and how many samples; from flags or a YAML file.

In go command-line words or a mapping; out comes one frozen `Settings`, checked before anything is loaded.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from jfuse.config import checked_ratio
from jfuse.evals.data import shipped
from jfuse.evals.tasks import GENERATED, SHIPPED


@dataclass(frozen=True)
class Task:
    """A source of samples: a task that is made on the spot, one that ships, or a file of your own.

    Attributes:
        name: one of `tasks.GENERATED` or `tasks.SHIPPED`, or any name with `data`.
        data: a file in any format of `evals.readers`.
        length: made tasks: tokens of all chunks together.
        num_chunks: made tasks: how many chunks.
        haystack: made tasks: what surrounds the needles; None takes the task's own.
        first: the first seed of a made task, or the first row of a file.
        chunk_tokens: cut chunks to at most so many tokens; None takes passages as they are and cuts contexts in one
            piece.
        longest: cut prompts of files with more tokens in the middle, as LongBench does; None cuts none.
        example: put a worked example before the question; None does so for questions over passages, and leaves prompts
            of benchmark files as they are published.
        new_tokens: answer greedily with at most so many tokens and score the text; 0 leaves that out.
    """

    name: str
    data: str | None = None
    length: int = 1024
    num_chunks: int = 4
    haystack: str | None = None
    first: int = 0
    chunk_tokens: int | None = None
    longest: int | None = None
    example: bool | None = None
    new_tokens: int = 0

    def __post_init__(self):
        if not self.made and self.path is None:
            known = ", ".join((*GENERATED, *SHIPPED))
            raise ValueError(f"There is no task {self.name!r}; use one of {known}, or give `data`, a file.")
        least = {"length": 1, "num_chunks": 1, "first": 0, "new_tokens": 0}
        least |= {name: 1 for name in ("chunk_tokens", "longest") if getattr(self, name) is not None}
        for name, lowest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise ValueError(f"{name} of task {self.name!r} is {value!r}; use an integer >= {lowest}.")
        if self.path is not None and not self.path.is_file():
            raise FileNotFoundError(f"{self.path}, the data of task {self.name!r}, is no file; check the path.")

    @property
    def made(self) -> bool:
        """Whether samples are made on the spot."""
        return self.data is None and self.name in GENERATED

    @property
    def path(self) -> Path | None:
        """The task's file, if it has one."""
        if self.data is not None:
            return Path(self.data)
        return shipped(f"{self.name}.jsonl") if self.name in SHIPPED else None


@dataclass(frozen=True)
class Entry:
    """A selector at some ratios.

    Attributes:
        selector: as `selectors.parse` reads it, such as "relaxkv:window=32".
        limit: only on so many samples of each task; None takes the run's limit.
    """

    selector: str
    ratios: tuple[float, ...] = (0.3,)
    limit: int | None = None

    def __post_init__(self):
        if not self.ratios:
            raise ValueError(f"{self.selector!r} has no ratios; give at least one.")
        for ratio in self.ratios:
            checked_ratio(ratio, name=f"ratios of {self.selector!r}")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 1):
            raise ValueError(f"limit of {self.selector!r} is {self.limit!r}; use an integer >= 1.")


@dataclass(frozen=True)
class Settings:
    """One evaluation.

    Attributes:
        models: what `load_model` takes.
        limit: samples of each task.
        longest_request: positions of the longest request, which chooses the factors of a longrope model.
        layers: critical layers for the selectors that need them; () takes the model's profile.
        anchor_rule: what chunks are encoded with.
        ttft: also serve every request cache-ready and time it, each method in turn.
        batch: measure so many samples of one bucket in one compiled program, for quality alone; 0 takes each alone.
    """

    models: tuple[str, ...] = ("smollm2-135m",)
    tasks: tuple[Task, ...] = (Task("mq"), Task("mv"), Task("hotpotqa"), Task("squad"))
    methods: tuple[Entry, ...] = (Entry("epic"), Entry("cacheblend"), Entry("prophetkv"), Entry("qcfuse"))
    limit: int = 40
    dtype: str = "auto"
    longest_request: int | None = None
    layers: tuple[int, ...] = ()
    anchor_rule: str = "kvzip"
    ttft: bool = False
    batch: int = 0

    def __post_init__(self):
        for name in ("models", "tasks"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one.")
        if type(self.limit) is not int or self.limit < 1:
            raise ValueError(f"limit is {self.limit!r}; use an integer >= 1.")
        longest = self.longest_request
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ValueError(f"longest_request is {longest!r}; use an integer >= 1.")
        if type(self.batch) is not int or self.batch < 0:
            raise ValueError(f"batch is {self.batch!r}; use an integer >= 0.")
        if self.batch and (self.ttft or any(task.new_tokens for task in self.tasks)):
            raise ValueError(
                f"batch is {self.batch}, but times and greedy answers are those of single requests; "
                "use batch 0, or leave out ttft and new_tokens."
            )
        bases = [PurePath(model).name for model in self.models]
        if len(set(bases)) < len(bases):
            raise ValueError(f"Two models have one name ({', '.join(bases)}); results could not tell them apart.")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"Two tasks have one name ({', '.join(names)}); name them apart, with `data` if need be.")

    @property
    def loading(self) -> dict[str, Any]:
        """What a model is loaded with: options of `load_model`."""
        longest = {} if self.longest_request is None else {"longest_request": self.longest_request}
        return {"dtype": self.dtype, **longest}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the YAML file has them."""
        return dataclasses.asdict(self)


def from_mapping(fields: Mapping[str, Any]) -> Settings:
    """Settings from the content of a YAML file; tasks and methods may be given by name alone.

    >>> from_mapping({"tasks": ["mq"], "methods": [{"selector": "epic", "ratios": [0.1, 0.3]}]}).methods
    (Entry(selector='epic', ratios=(0.1, 0.3), limit=None),)

    Raises:
        ValueError: a field that does not exist, or a value that cannot be used.
    """
    given = dict(_known(fields, Settings, "the settings"))
    if "tasks" in given:
        given["tasks"] = tuple(_build(Task, "name", one) for one in _listed(given["tasks"], "tasks"))
    if "methods" in given:
        given["methods"] = tuple(_build(Entry, "selector", one) for one in _listed(given["methods"], "methods"))
    for name in ("models", "layers"):
        if name in given:
            given[name] = tuple(_listed(given[name], name))
    return Settings(**given)


def read_yaml(path: str | Path) -> Settings:
    """Settings from a YAML file, read without constructing anything but plain values.

    Raises:
        ValueError: no mapping, or what `from_mapping` refuses.
    """
    import yaml

    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}; write a mapping with tasks, methods and so on.")
    return from_mapping(fields)


def _build(kind: type, first: str, given: Any) -> Any:
    fields: dict[str, Any] = (
        {first: given} if isinstance(given, str) else dict(_known(given, kind, f"an entry of {kind.__name__}"))
    )
    if first not in fields:
        raise ValueError(f"{fields} has no {first!r}; every {kind.__name__.lower()} needs one.")
    if "ratios" in fields:
        fields["ratios"] = tuple(_listed(fields["ratios"], "ratios"))
    return kind(**fields)


def _known(fields: Any, kind: type, where: str) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{fields!r:.60} in {where} is no mapping; write name: value.")
    names = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in names:
            raise ValueError(f"{where} has no field {name!r}; use some of {', '.join(names)}.")
    return fields


def _listed(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, str | int | float):
        return [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{name} is {value!r:.60}; give a list.")
    return value
