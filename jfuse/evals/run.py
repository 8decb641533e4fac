"""An evaluation: models x tasks x samples x methods, every row written as soon as it is measured.

Read `evaluate` from top to bottom: plan, then sample by sample (the first of every task, then the second of each),
so that a run that is stopped early has measured all methods on the same samples. `summary` reads what it leaves.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Int
from tqdm.auto import tqdm

from jfuse.anchors import AnchorRule
from jfuse.anchors import by_name as anchor_rule_by_name
from jfuse.evals import workload
from jfuse.evals.data import Sample
from jfuse.evals.manifest import about, without_folders
from jfuse.evals.measure import DEFAULT, Case, Setting
from jfuse.evals.methods import Method, ends, make_methods, needs_layers
from jfuse.evals.programs import release_programs
from jfuse.evals.prompts import Prompt, make_prompt
from jfuse.evals.records import Records, Row
from jfuse.evals.scorers import score
from jfuse.evals.settings import Settings, Task
from jfuse.fingerprint import Fingerprint
from jfuse.models.decoder import Model
from jfuse.models.resolve import load_model
from jfuse.models.tokenizer import Tokenizer
from jfuse.profile import load_profile
from jfuse.report import Compilations
from jfuse.selectors.base import Selector

T = TypeVar("T")
FORMAT = 1
"""Version of what a row means. Raise it whenever equal settings give other numbers."""


class Item(NamedTuple):
    """One sample of one task, with the methods that are still to be measured on it."""

    task: Task
    number: int  # among the task's samples, from 0
    sample: Sample
    prompt: Prompt
    methods: list[Method]


class Plan(NamedTuple):
    """All that one model will be asked, in order."""

    name: str  # of the model, without the folders it lies in
    model: Model
    anchor_rule: AnchorRule
    items: list[Item]
    too_long: list[str]  # samples that the model cannot serve, left out for every method alike
    identity: dict[str, Any]
    planned: dict[str, int]  # samples that each method is to be measured on, by its key

    @property
    def num_rows(self) -> int:
        """Rows that the items ask for."""
        return sum(len(item.methods) for item in self.items)


def evaluate(
    settings: Settings,
    out: str | Path,
    *,
    selectors: Mapping[str, Selector] | None = None,
    load: Callable[..., Model] = load_model,
    command: Sequence[str] = (),
    setting: Setting = DEFAULT,
    progress: bool | None = None,
) -> int:
    """Measures what the folder does not hold yet, and returns how many rows were added.

    Args:
        out: the run's folder; rows that it holds are kept, whatever was measured in other goes.
        selectors: selectors of your own, by the name that `settings.methods` uses.
        load: gives a model for a name and a dtype.
        command: how the run was started, for the manifest.
        progress: show a bar; by default if stderr is a terminal.

    Raises:
        ValueError: settings that cannot be run, or a folder of another run.
    """
    _methods(settings, settings.layers or (0,), selectors)  # before a model is loaded
    added = 0
    for name in settings.models:
        plan = make_plan(settings, name, load(name, dtype=settings.dtype), selectors=selectors, setting=setting)
        more = {"planned": plan.planned, "too_long": plan.too_long}
        with Records(out, plan.identity, about=about(settings, command) | more) as records:
            todo = [item._replace(methods=_missing(plan.name, item, records)) for item in plan.items]
            todo = [item for item in todo if item.methods]
            total = sum(len(item.methods) for item in todo)
            disable = None if progress is None else not progress
            with tqdm(total=total, desc=f"evaluating {plan.name}", unit="run", disable=disable) as bar:
                for item in todo:
                    release_programs()
                    for row, seconds in measure_item(plan, item, setting, ttft=settings.ttft):
                        records.add(row, seconds)
                        bar.set_postfix_str(_score_so_far(row, records), refresh=False)
                        bar.update()
                        added += 1
    return added


def make_plan(
    settings: Settings,
    name: str,
    model: Model,
    *,
    selectors: Mapping[str, Selector] | None = None,
    setting: Setting = DEFAULT,
) -> Plan:
    """Every sample that a model is asked and by which methods, the first of every task before the second of any.

    Raises:
        ValueError: a model without a tokenizer, or a selector that needs critical layers of a model without a profile.
    """
    if model.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, and tasks are texts; load a model with one.")
    name = without_folders(name)
    layers = _layers(settings, model, selectors)
    methods = _methods(settings, layers, selectors)
    rule = anchor_rule_by_name(settings.anchor_rule, model)
    drawn = {task.name: workload.draw(task, model.tokenizer, settings.limit) for task in settings.tasks}
    items, too_long = [], []
    for index in range(settings.limit):
        for task in settings.tasks:
            if index >= len(drawn[task.name]):
                continue
            sample = drawn[task.name][index]
            prompt = make_prompt(sample, model.tokenizer)
            if not _fits(model, prompt, task.new_tokens):
                too_long.append(f"{task.name}/{sample.id}")
                continue
            items.append(Item(task, index, sample, prompt, [method for method, limit in methods if index < limit]))
    identity = {
        "format": FORMAT,
        "tasks": {task.name: workload.identity(task, drawn[task.name][0]) for task in settings.tasks},
        "models": {name: {"fingerprint": Fingerprint.of(model, anchor_rule=rule).digest, "layers": list(layers)}},
        "setting": setting._asdict(),
        "ttft": settings.ttft,
        "platform": jax.default_backend(),
    }
    planned = {method.key: limit for method, limit in methods}
    return Plan(name, model, rule, items, too_long, identity, planned)


def measure_item(plan: Plan, item: Item, setting: Setting, *, ttft: bool = False) -> Iterator[tuple[Row, dict]]:
    """Rows and seconds of one sample, method by method. What all methods share is charged to the first.

    Compilation stands apart, because it is not paid again: the other seconds are without it.
    """
    case, shared, compiling = _timed(
        lambda: Case(plan.model, item.prompt, anchor_rule=plan.anchor_rule, setting=setting)
    )
    for method in item.methods:
        measured, own, compiled = _timed(
            functools.partial(case.measure, method, new_tokens=item.task.new_tokens, ttft=ttft)
        )
        seconds = {"seconds": own, "shared_seconds": shared, "compile_seconds": compiling + compiled}
        seconds |= measured.seconds
        shared = compiling = 0.0
        row: Row = {"model": plan.name, "task": item.task.name, "id": item.sample.id, "index": item.number}
        row |= {"method": method.name, "ratio": method.ratio, **case.shape, **measured.figures}
        if measured.answer is not None:
            text = _text(plan.model.tokenizer, measured.answer)
            row |= {"answer": text, "score": score(item.sample, text)}
        yield row, {name: round(value, 4) for name, value in seconds.items()}


def _timed(run: Callable[[], T]) -> tuple[T, float, float]:
    """The result, the seconds that it took, and those of compilation, which are not among them."""
    began = time.perf_counter()
    with Compilations() as compiled:
        result = run()
    elapsed = time.perf_counter() - began
    return result, max(0.0, elapsed - compiled.seconds), compiled.seconds


def _text(tokenizer: Tokenizer, tokens: Int[np.ndarray, " M"]) -> str:
    return tokenizer.decode(tokens.tolist()).strip()


def _missing(name: str, item: Item, records: Records) -> list[Method]:
    where = (name, item.task.name, item.sample.id)
    return [method for method in item.methods if (*where, method.name, method.ratio) not in records]


def _layers(settings: Settings, model: Model, selectors: Mapping[str, Selector] | None) -> tuple[int, ...]:
    asked = [entry.selector for entry in settings.methods if entry.selector not in (selectors or {})]
    if settings.layers or not any(needs_layers(name) for name in asked):
        return settings.layers
    return load_profile(model).critical_layers()


def _methods(
    settings: Settings, layers: Sequence[int], selectors: Mapping[str, Selector] | None
) -> list[tuple[Method, int]]:
    """Methods in the order given, each with the number of samples it is measured on."""
    found = {method.key: (method, settings.limit) for method in ends()}
    for entry in settings.methods:
        limit = min(settings.limit, entry.limit or settings.limit)
        for method in make_methods([entry.selector], entry.ratios, layers=layers, selectors=selectors):
            if method.key not in found or limit > found[method.key][1]:
                found[method.key] = (method, limit)
    return list(found.values())


def _fits(model: Model, prompt: Prompt, new_tokens: int) -> bool:
    after = max(len(prompt.reference), new_tokens)
    length = len(prompt.prefix) + sum(map(len, prompt.chunks)) + len(prompt.question.tokens) + after
    return length <= model.config.max_positions


def _score_so_far(row: Row, records: Records) -> str:
    """The share of the KL gap that the row's method has closed so far on the row's task."""
    own = reuse = 0.0
    for other in records.rows.values():
        if other["model"] == row["model"] and other["task"] == row["task"]:
            own += other["kl"] if (other["method"], other["ratio"]) == (row["method"], row["ratio"]) else 0.0
            reuse += other["kl"] if other["method"] == "reuse" else 0.0
    closed = f"{1 - own / reuse:.0%} of the KL gap closed" if reuse else "measuring the gap"
    return f"{row['task']} {row['method']} {row['ratio']:g}: {closed}"
