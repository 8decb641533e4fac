"""Readers of evaluation files: which format a file has is seen from its first row. Local files only."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jfuse.evals.data import Sample, read_samples
from jfuse.evals.readers.located import read_located
from jfuse.evals.readers.longbench import read_longbench
from jfuse.evals.readers.retrieved import read_retrieved
from jfuse.evals.readers.ruler_file import read_ruler
from jfuse.evals.rows import read_document, read_first

FORMATS: dict[str, Callable[..., list[Sample]]] = {
    "jfuse": read_samples,
    "longbench": read_longbench,
    "lveval": read_longbench,
    "ruler": read_ruler,
    "retrieved": read_retrieved,
    "squad": partial(read_located, kind="squad"),
    "newsqa": partial(read_located, kind="newsqa"),
    "nq": partial(read_located, kind="nq"),
    "mrqa": partial(read_located, kind="mrqa"),
}


def read_file(path: str | Path, *, limit: int | None = None) -> list[Sample]:
    """Reads a file in any of `FORMATS`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown format, a malformed line by number, or two questions of one id.
    """
    samples = FORMATS[format_of(path)](path, limit=limit)
    if not samples:
        raise ValueError(f"{path} holds no sample; give a file with at least one.")
    seen: set[str] = set()
    for number, sample in enumerate(samples, start=1):
        if sample.id in seen:
            raise ValueError(f"{path}, question {number}: id {sample.id!r} is there already; ids must differ.")
        seen.add(sample.id)
    return samples


def format_of(path: str | Path) -> str:
    """The name in `FORMATS` of a file's format.

    Raises:
        ValueError: no row, or a format that is not known: what the first row has, and the formats that are known.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        raise ValueError(f"{path} is a Parquet file; write its rows as JSON Lines first.")
    suffix = path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix
    first = read_document(path) if suffix == ".json" else read_first(path)
    found = _of_document(first) if suffix == ".json" else _of_row(first)
    if found is not None:
        return found
    row = next(iter(first), None) if isinstance(first, list) else first
    if row is None:
        raise ValueError(f"{path} holds no row; give a file with at least one question.")
    seen = f"the fields {', '.join(row) or '(none)'}" if isinstance(row, dict) else f"no fields, but {row!r:.60}"
    others = ", ".join(name for name in FORMATS if name != "jfuse")
    raise ValueError(
        f"{path} is in no known format: its first object has {seen}. jfuse's own is JSON Lines with the fields "
        f"question, answers (a list) and chunks; the others are {others}."
    )


def _of_row(row: Any) -> str | None:
    marks = {
        "ruler": {"input", "outputs"},
        "lveval": {"input", "context", "answer_keywords"},
        "longbench": {"input", "context", "answers"},
        "retrieved": {"question", "ctxs"},
        "nq": {"document_text", "annotations"},
        "jfuse": {"question", "answers"},
    }
    if not isinstance(row, dict):
        return None
    if "header" in row or "qas" in row:
        return "mrqa"
    return next((name for name, fields in marks.items() if fields <= row.keys()), None)


def _of_document(value: Any) -> str | None:
    if isinstance(value, list):
        return "retrieved" if value and _of_row(value[0]) == "retrieved" else None
    articles = value.get("data") if isinstance(value, dict) else None
    if not isinstance(articles, list) or not articles or not isinstance(articles[0], dict):
        return None
    return "squad" if "paragraphs" in articles[0] else "newsqa" if "questions" in articles[0] else None
