"""Records of a question with retrieved passages: CacheBlend's inputs, and DPR's format.

In go records with `question`, `answers` and `ctxs`, a list of `{title, text}`; out come samples. A passage that is
marked as the one with the answer (`isgold`) is gold.
"""

import itertools
from pathlib import Path

from jfuse.evals.data import Sample, passage_of, question_over
from jfuse.evals.rows import Row, items, read_document, read_rows, text


def read_retrieved(path: str | Path, *, limit: int | None = None) -> list[Sample]:
    """Reads a JSON list of records, or JSON Lines.

    Raises:
        ValueError: a malformed record, with the file's name and its number in the list or its line.
    """
    path = Path(path)
    if ".jsonl" in path.suffixes:
        return list(itertools.islice(read_rows(path, lambda row, line: [_sample(row, line, path)]), limit))
    records = read_document(path)
    if not isinstance(records, list):
        raise ValueError(f"{path}: a list of records is expected, not {type(records).__name__}.")
    return [_numbered(record, number, path) for number, record in enumerate(records[:limit], start=1)]


def _numbered(record: Row, number: int, path: Path) -> Sample:
    try:
        return _sample(record, number, path)
    except ValueError as error:
        raise ValueError(f"{path}, record {number}: {error}") from error


def _sample(row: Row, number: int, path: Path) -> Sample:
    contexts = items(row, "ctxs", dict)
    return question_over(
        [passage_of({"title": text(c, "title", ""), "text": text(c, "text")}, i) for i, c in enumerate(contexts)],
        id=str(row.get("id", number)),
        task=path.name.split(".")[0],
        question=text(row, "question"),
        answers=tuple(items(row, "answers", str)),
        gold=tuple(index for index, context in enumerate(contexts) if context.get("isgold") is True),
    )
