"""Questions whose answers are located in a passage: SQuAD, NewsQA, Natural Questions, and all of them as MRQA files.

In go files in the data sets' own formats; out come samples with the answer spans that layer profiles need (QCFuse
section 3.3). Beside the passage stand others of the same file that hold none of the answers, as retrieval would bring.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jfuse.evals.data import Passage, Sample, Span, question_over
from jfuse.evals.rows import Row, items, pairs, read_document, read_rows, text, typed


class Located(NamedTuple):
    """A question about a passage, and the characters `[start, end)` of the passage's text that answer it."""

    id: str
    question: str
    answers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]


class Asked(NamedTuple):
    """A passage and the questions about it that it answers."""

    id: str
    passage: Passage
    questions: list[Located]


def read_located(
    path: str | Path, kind: str, *, limit: int | None = None, num_chunks: int = 8, seed: int = 0
) -> list[Sample]:
    """Reads a file of located answers and sets `num_chunks - 1` other passages beside each.

    Unanswerable questions are left out. The same seed gives the same passages in the same order.

    Args:
        kind: one of `LINES` (a question a line) or `DOCUMENTS` (one JSON value).

    Raises:
        ValueError: a malformed file, or too few passages that hold no answer.
    """
    path = Path(path)
    found = list(read_rows(path, LINES[kind])) if kind in LINES else _read_document(path, DOCUMENTS[kind])
    passages = list({asked.passage: None for asked in found})
    questions = [(asked.passage, located) for asked in found for located in asked.questions]
    return [_among(located, gold, passages, path, (num_chunks, seed)) for gold, located in questions[:limit]]


def _read_document(path: Path, build: Callable[[Any], Iterable[Asked]]) -> list[Asked]:
    document = read_document(path)
    try:
        return list(build(document))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _among(located: Located, passage: Passage, passages: list[Passage], path: Path, drawn: tuple[int, int]) -> Sample:
    num_chunks, seed = drawn
    rng = random.Random(f"jfuse passages {seed} {located.id}")
    answers = [answer.lower() for answer in located.answers]
    others: list[Passage] = []
    for other in rng.sample(passages, len(passages)):
        if len(others) == num_chunks - 1:
            break
        # Passages of the same article say too much about the question.
        strange = other.title != passage.title if passage.title else other != passage
        if strange and not any(answer in other.content.lower() for answer in answers):
            others.append(other)
    if len(others) < num_chunks - 1:
        raise ValueError(
            f"{path}: question {located.id} has {len(others)} other passages without an answer, and num_chunks is "
            f"{num_chunks}; lower it, or give a larger file."
        )
    gold = rng.randrange(num_chunks)
    head = len(passage.content) - len(passage.text)
    return question_over(
        [*others[:gold], passage, *others[gold:]],
        id=located.id,
        task=path.name.split(".")[0],
        question=located.question,
        answers=located.answers,
        spans=tuple(Span(gold, head + start, head + end) for start, end in located.spans),
        gold=(gold,),
    )


def _squad(document: Any) -> Iterator[Asked]:
    """SQuAD 1.1 and 2.0: `data`, `paragraphs`, `qas`."""
    for article in items(document, "data", dict):
        title = text(article, "title", "").replace("_", " ")
        for paragraph in items(article, "paragraphs", dict):
            passage, questions = Passage("", title, text(paragraph, "context")), []
            for asked in items(paragraph, "qas", dict):
                id, spans = text(asked, "id"), []
                for answer in items(asked, "answers", dict):
                    start, quoted = typed(answer, "answer_start", int), text(answer, "text")
                    if not passage.text.startswith(quoted, start):
                        raise ValueError(f"question {id}: {quoted!r:.60} does not stand at character {start}.")
                    spans.append((start, start + len(quoted)))
                if spans:
                    questions.append(_located(id, text(asked, "question"), passage, spans))
            yield Asked("", passage, questions)


def _newsqa(document: Any) -> Iterator[Asked]:
    """NewsQA's combined file: stories with questions, and the characters that readers agreed on."""
    for story in items(document, "data", dict):
        passage, questions = Passage("", "", text(story, "text")), []
        for index, asked in enumerate(items(story, "questions", dict)):
            agreed = asked.get("consensus", {})
            if "s" not in agreed:
                continue  # a bad question, or one without an answer
            start = typed(agreed, "s", int)
            # NewsQA's spans take the white space behind them along.
            end = start + len(passage.text[start : typed(agreed, "e", int)].rstrip())
            id = f"{text(story, 'storyId', 'story').split('/')[-1]}-{index}"
            questions.append(_located(id, text(asked, "q"), passage, [(start, end)]))
        yield Asked("", passage, questions)


def _nq(row: Row, line: int) -> list[Asked]:
    """Natural Questions, simplified: the long answer is the passage, the short ones are located in it."""
    words = text(row, "document_text").split(" ")
    for annotation in items(row, "annotations", dict):
        long, short = typed(annotation, "long_answer", dict), items(annotation, "short_answers", dict)
        if not short or long.get("start_token", -1) < 0:
            continue
        kept = [i for i in range(long["start_token"], long["end_token"]) if not re.fullmatch(r"</?\w+>", words[i])]
        starts, at = {}, 0
        for i in kept:
            starts[i] = at
            at += len(words[i]) + 1
        passage, spans = Passage("", "", " ".join(words[i] for i in kept)), []
        for answer in short:
            inside = [i for i in range(answer["start_token"], answer["end_token"]) if i in starts]
            if inside:
                spans.append((starts[inside[0]], starts[inside[-1]] + len(words[inside[-1]])))
        id = str(row.get("example_id", line))
        return [Asked(id, passage, [_located(id, text(row, "question_text"), passage, spans)] if spans else [])]
    return []


def _mrqa(row: Row, line: int) -> list[Asked]:
    """MRQA 2019, in which SQuAD, NewsQA and Natural Questions come alike. Its spans name the last character."""
    if "header" in row:
        return []
    passage, questions = Passage("", "", text(row, "context")), []
    for asked in items(row, "qas", dict):
        spans = [
            (start, last + 1)
            for answer in items(asked, "detected_answers", dict)
            for start, last in pairs(answer, "char_spans")
        ]
        answers = tuple(items(asked, "answers", str))
        if spans:
            questions.append(_located(text(asked, "qid"), text(asked, "question"), passage, spans, answers))
    return [Asked(str(line), passage, questions)]


def _located(
    id: str, question: str, passage: Passage, spans: Iterable[tuple[int, int]], answers: tuple[str, ...] = ()
) -> Located:
    spans = tuple(dict.fromkeys(spans))  # annotators agree more often than not
    for start, end in spans:
        if not 0 <= start < end <= len(passage.text):
            raise ValueError(f"question {id}: span [{start}, {end}) is not inside its passage.")
    quoted = tuple(dict.fromkeys(passage.text[start:end] for start, end in spans))
    return Located(id, question, answers or quoted, spans)


DOCUMENTS = {"squad": _squad, "newsqa": _newsqa}
LINES = {"nq": _nq, "mrqa": _mrqa}
