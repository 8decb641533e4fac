"""Evaluation samples: one type for all tasks, and readers for JSON Lines files.

In go files of questions over passages, of needle prompts, or of plain passages; out come `Sample` and `Passage`
objects. A file is refused at its first malformed line, by name and line number.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

QA_INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)

MetricName = Literal[
    "f1",
    "f1_first_line",
    "f1_zh",
    "f1_first_answer",
    "f1_zh_first_answer",
    "match_all",
    "match_part",
    "keyword_f1",
    "keyword_f1_zh",
    "retrieval",
    "count",
    "classification_first_line",
    "rouge_l",
    "rouge_l_first_line",
    "rouge_l_zh",
    "rouge_l_zh_keywords",
]
"""Rules of `jfuse.evals.scorers`."""


class Joints(NamedTuple):
    """What stands between the parts of a prompt."""

    prefix: str = "\n\n"  # after the prefix
    chunk: str = "\n\n"  # after each chunk
    cue: str = " "  # between question and answer prefix


class Span(NamedTuple):
    """Characters `[start, end)` of chunk `chunk` that hold (part of) an answer."""

    chunk: int
    start: int
    end: int


@dataclass(frozen=True)
class Passage:
    """A text of a corpus."""

    id: str
    title: str
    text: str

    @property
    def content(self) -> str:
        """Title and text, as a chunk shows them."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True)
class Sample:
    """One question over several chunks.

    The prompt is `prefix`, the chunks, `query`. With `scoring` "all", every answer is wanted (needles: the share found
    counts); with "any", the answers are alternatives (questions: the best match counts).
    """

    id: str
    task: str
    instruction: str
    example: str  # a worked example that stands before the instruction; mostly empty
    chunks: tuple[str, ...]
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    spans: tuple[Span, ...] = ()  # where the answers stand; empty if unlabelled
    gold: tuple[int, ...] = ()  # chunks that support the answer; empty if unlabelled
    scoring: Literal["all", "any"] = "any"
    metric: str | None = None  # another rule than that which follows from `scoring`
    lead: str = ""  # stands between the chunks and the question, and is not the question proper
    joints: Joints = Joints()
    max_new_tokens: int = 32
    keywords: str = ""  # of the answer, for rules that want them
    classes: tuple[str, ...] = ()  # that a classification chooses from

    def __post_init__(self):
        if self.rule not in get_args(MetricName):
            raise ValueError(f"metric is {self.metric!r}; use one of {', '.join(get_args(MetricName))}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; use an integer >= 1.")
        for name in ("id", "question"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} is empty; a sample needs one.")
        for name in ("chunks", "answers"):
            if not getattr(self, name) or not all(text.strip() for text in getattr(self, name)):
                raise ValueError(f"{name} is empty or holds an empty text; give at least one text.")
        for chunk in (*self.gold, *(span.chunk for span in self.spans)):
            if not 0 <= chunk < len(self.chunks):
                raise ValueError(f"chunk {chunk} is named as evidence, but there are chunks 0..{len(self.chunks) - 1}.")
        for span in self.spans:
            if not 0 <= span.start < span.end <= len(self.chunks[span.chunk]):
                length = len(self.chunks[span.chunk])
                raise ValueError(f"{span} is not inside its chunk; use 0 <= start < end <= {length} characters.")

    @property
    def rule(self) -> str:
        """How predictions are scored: `metric`, or what follows from `scoring`."""
        return self.metric or ("match_all" if self.scoring == "all" else "f1")

    @property
    def prefix(self) -> str:
        """What stands before the chunks."""
        return self.example + self.instruction

    @property
    def query(self) -> str:
        """What stands after the chunks."""
        return f"{self.lead}{self.question}{self.cue}"

    @property
    def cue(self) -> str:
        """What stands after the question, the space between them included."""
        return self.joints.cue + self.answer_prefix if self.answer_prefix else ""

    @property
    def text(self) -> str:
        """The whole prompt as one text."""
        chunks = "".join(chunk + self.joints.chunk for chunk in self.chunks)
        return f"{self.prefix}{self.joints.prefix}{chunks}{self.query}"

    @property
    def reference(self) -> str:
        """The answer as one text, for likelihoods: all answers, or the first alternative."""
        return ", ".join(self.answers) if self.scoring == "all" else self.answers[0]


def shipped(name: str) -> Path:
    """Path of a data file that comes with jfuse, in the installed package or in a clone's `examples/data`."""
    package = Path(__file__).parents[1]
    folders = (package / "data" / "examples", package.parent / "examples" / "data")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{name} is in neither {folders[0]} nor {folders[1]}; reinstall jfuse or clone it again.")


def read_samples(path: str | Path, *, limit: int | None = None) -> list[Sample]:
    """Reads questions over passages (field `chunks`) or needle prompts (field `context`, which becomes one chunk).

    A question row has `id`, `dataset`, `question`, `answers`, `chunks` (a list of `{title, text}`) and, where labelled,
    `gold` (supporting chunks) and `spans` (characters of the text of chunk `gold[0]`). A needle row has `id`, `task`,
    `instruction`, `example`, `context`, `question`, `answer_prefix`, `answers` and `answer_spans`.

    Args:
        limit: read so many rows; all by default.

    Raises:
        ValueError: a malformed line, with the file's name and the line's number.
    """
    return list(itertools.islice(_rows(Path(path), _sample), limit))


def read_passages(path: str | Path, *, limit: int | None = None) -> list[Passage]:
    """Reads a corpus: rows with `text` and, if they have them, `id` (else the line number) and `title`.

    Raises:
        ValueError: a malformed line, with the file's name and the line's number.
    """
    return list(itertools.islice(_rows(Path(path), _passage), limit))


def _rows(path: Path, build: Callable[[dict[str, Any], int], Any]) -> Iterator[Any]:
    seen: dict[str, int] = {}
    with path.open("rb") as file:  # bytes: lines end at a line feed only, and a bad byte is found on its line
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"), parse_constant=_refuse_constant)
                if not isinstance(row, dict):
                    raise ValueError(f"a JSON object is expected, not {type(row).__name__}.")
                item = build(row, line)
                if item.id in seen:
                    raise ValueError(f"id {item.id!r} is already that of line {seen[item.id]}; ids must differ.")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {line}: {error}") from error
            seen[item.id] = line
            yield item


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON.")


def _sample(row: dict[str, Any], line: int) -> Sample:
    if "chunks" in row:
        return _question(row)
    if "context" in row:
        return _needles(row)
    raise ValueError("it has neither 'chunks' (a question over passages) nor 'context' (a needle prompt).")


def _passage(row: dict[str, Any], line: int) -> Passage:
    passage = Passage(_text(row, "id", str(line)), _text(row, "title", ""), _text(row, "text"))
    if not passage.text.strip():
        raise ValueError("field 'text' is empty; give a passage some text.")
    return passage


def _question(row: dict[str, Any]) -> Sample:
    question = _text(row, "question")
    if not question.strip():
        raise ValueError("field 'question' is empty; ask something.")
    passages = [_passage(chunk, index) for index, chunk in enumerate(_list(row, "chunks", dict))]
    gold = _list(row, "gold", int) if row.get("gold") is not None else []
    pairs = _pairs(row, "spans") if "spans" in row else []
    if not all(0 <= chunk < len(passages) for chunk in gold):
        raise ValueError(f"field 'gold' is {gold}; use chunk indices from 0 to {len(passages) - 1}.")
    if (pairs or "answer_start" in row) and not gold:
        raise ValueError("answers are located, but 'gold' does not name the chunk they are in.")
    if "answer_start" in row:
        start, quoted = _typed(row, "answer_start", int), _text(row, "answer_text")
        if start < 0 or not passages[gold[0]].text.startswith(quoted, start):
            raise ValueError(f"'answer_text' {quoted!r} does not stand at character {start} of chunk {gold[0]}.")
    for start, end in pairs:
        if not 0 <= start < end <= len(passages[gold[0]].text):
            raise ValueError(f"span [{start}, {end}) is not inside chunk {gold[0]}.")
    head = len(passages[gold[0]].content) - len(passages[gold[0]].text) if gold else 0
    return Sample(
        id=_text(row, "id"),
        task=_text(row, "dataset"),
        instruction=QA_INSTRUCTION,
        example="",
        chunks=tuple(passage.content for passage in passages),
        question=f"Question: {question}",
        answer_prefix="Answer:",
        answers=tuple(_list(row, "answers", str)),
        spans=tuple(Span(gold[0], head + start, head + end) for start, end in pairs),
        gold=tuple(gold),
        scoring="any",
    )


def _needles(row: dict[str, Any]) -> Sample:
    return Sample(
        id=_text(row, "id"),
        task=_text(row, "task"),
        instruction=_text(row, "instruction"),
        example=_text(row, "example", ""),
        chunks=(_text(row, "context"),),
        question=_text(row, "question"),
        answer_prefix=_text(row, "answer_prefix"),
        answers=tuple(_list(row, "answers", str)),
        spans=tuple(Span(0, start, end) for start, end in _pairs(row, "answer_spans")),
        gold=(0,),
        scoring="all",
    )


def _typed(row: dict[str, Any], name: str, kind: type) -> Any:
    if name not in row:
        raise ValueError(f"field {name!r} is missing.")
    value = row[name]
    if type(value) is not kind:
        raise ValueError(f"field {name!r} is {value!r:.60}, of type {type(value).__name__}; use {kind.__name__}.")
    return value


def _text(row: dict[str, Any], name: str, default: str | None = None) -> str:
    if name not in row and default is not None:
        return default
    return _unicode(_typed(row, name, str), name)


def _unicode(text: str, name: str) -> str:
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"field {name!r} holds half a surrogate pair, which no tokenizer can read.")
    return text


def _list(row: dict[str, Any], name: str, kind: type) -> list[Any]:
    values = _typed(row, name, list)
    for value in values:
        if type(value) is not kind:
            raise ValueError(f"field {name!r} holds {value!r:.60}; use a list of {kind.__name__}.")
        if kind is str:
            _unicode(value, name)
    return values


def _pairs(row: dict[str, Any], name: str) -> list[list[int]]:
    pairs = _list(row, name, list)
    for pair in pairs:
        if len(pair) != 2 or any(type(value) is not int for value in pair):
            raise ValueError(f"field {name!r} holds {pair!r:.60}; use pairs [start, end] of integers.")
    return pairs
