"""Evaluation samples: one type for all tasks, and readers for JSON Lines files.

In go files of questions over passages, of needle prompts, or of plain passages; out come `Sample` and `Passage`
objects. A file is refused at its first malformed line, by name and line number.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from jfuse.evals.rows import Row, items, pairs, read_rows, text, typed

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

    A question row has `question`, `answers` and `chunks`, a list of texts or of `{title, text}`, and may have `id`
    (else the line number), `dataset` (else the file's name) and, where labelled, `gold` (supporting chunks) and
    `spans` (characters of the text of chunk `gold[0]`). A needle row has `id`, `task`, `instruction`, `context`,
    `question`, `answer_prefix`, `answers`, `answer_spans` and perhaps `example`. Both may have `metric` and
    `max_new_tokens`.

    Args:
        limit: read so many rows; all by default.

    Raises:
        ValueError: a malformed line, with the file's name and the line's number.
    """
    path = Path(path)
    return list(itertools.islice(read_rows(path, lambda row, line: [jfuse_sample(row, line, path.stem)]), limit))


def read_passages(path: str | Path, *, limit: int | None = None) -> list[Passage]:
    """Reads a corpus: rows with `text` and, if they have them, `id` (else the line number) and `title`.

    Raises:
        ValueError: a malformed line, with the file's name and the line's number.
    """
    return list(itertools.islice(read_rows(path, lambda row, line: [passage_of(row, line)]), limit))


def passage_of(row: Row, line: int) -> Passage:
    """A passage from a row.

    Raises:
        ValueError: no text.
    """
    passage = Passage(text(row, "id", str(line)), text(row, "title", ""), text(row, "text"))
    if not passage.text.strip():
        raise ValueError("field 'text' is empty; give a passage some text.")
    return passage


def jfuse_sample(row: Row, line: int, name: str) -> Sample:
    """A sample from a row of jfuse's own format.

    Raises:
        ValueError: a field that is missing or wrong.
    """
    if "chunks" in row:
        return _question(row, line, name)
    if "context" in row:
        return _needles(row)
    raise ValueError("it has neither 'chunks' (a question over passages) nor 'context' (a needle prompt).")


def _question(row: Row, line: int, name: str) -> Sample:
    question = text(row, "question")
    if not question.strip():
        raise ValueError("field 'question' is empty; ask something.")
    passages = [
        passage_of({"text": chunk} if isinstance(chunk, str) else chunk, index)
        for index, chunk in enumerate(_chunks(row))
    ]
    gold = items(row, "gold", int) if row.get("gold") is not None else []
    located = pairs(row, "spans") if "spans" in row else []
    if not all(0 <= chunk < len(passages) for chunk in gold):
        raise ValueError(f"field 'gold' is {gold}; use chunk indices from 0 to {len(passages) - 1}.")
    if (located or "answer_start" in row) and not gold:
        raise ValueError("answers are located, but 'gold' does not name the chunk they are in.")
    if "answer_start" in row:
        start, quoted = typed(row, "answer_start", int), text(row, "answer_text")
        if start < 0 or not passages[gold[0]].text.startswith(quoted, start):
            raise ValueError(f"'answer_text' {quoted!r} does not stand at character {start} of chunk {gold[0]}.")
    for start, end in located:
        if not 0 <= start < end <= len(passages[gold[0]].text):
            raise ValueError(f"span [{start}, {end}) is not inside chunk {gold[0]}.")
    head = len(passages[gold[0]].content) - len(passages[gold[0]].text) if gold else 0
    return question_over(
        passages,
        id=text(row, "id", str(line)),
        task=text(row, "dataset", name),
        question=question,
        answers=tuple(items(row, "answers", str)),
        spans=tuple(Span(gold[0], head + start, head + end) for start, end in located),
        gold=tuple(gold),
        **_optional(row),
    )


def question_over(passages: Iterable[Passage], *, question: str, **fields) -> Sample:
    """A question over passages, in the words of LongBench's multi-document tasks; `fields` are those of `Sample`."""
    return Sample(
        instruction=QA_INSTRUCTION,
        example="",
        chunks=tuple(passage.content for passage in passages),
        question=f"Question: {question}",
        answer_prefix="Answer:",
        **fields,
    )


def _chunks(row: Row) -> list[str] | list[Row]:
    given = typed(row, "chunks", list)
    return items(row, "chunks", str if given and isinstance(given[0], str) else dict)


def _needles(row: Row) -> Sample:
    return Sample(
        id=text(row, "id"),
        task=text(row, "task"),
        instruction=text(row, "instruction"),
        example=text(row, "example", ""),
        chunks=(text(row, "context"),),
        question=text(row, "question"),
        answer_prefix=text(row, "answer_prefix"),
        answers=tuple(items(row, "answers", str)),
        spans=tuple(Span(0, start, end) for start, end in pairs(row, "answer_spans")),
        gold=(0,),
        scoring="all",
        **_optional(row),
    )


def _optional(row: Row) -> Row:
    """What a row may say about its scoring."""
    kinds = {"metric": str, "max_new_tokens": int}
    return {name: typed(row, name, kind) for name, kind in kinds.items() if name in row}
