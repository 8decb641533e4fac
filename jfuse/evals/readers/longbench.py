"""Files of LongBench (Bai et al., 2023) and LV-Eval (Yuan et al., 2024), with the benchmarks' own prompts and rules.

A row has `input`, `context`, `answers`, `dataset` and, for LV-Eval, `answer_keywords`; for classifications
`all_classes`. The context becomes one chunk, to be cut by `split_chunks`: pieces and prompt join to the official text.
"""

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

from jfuse.evals.data import Joints, Sample
from jfuse.evals.rows import Row, items, read_rows, text

LEFT_OUT = {
    "gov_report": "summaries of whole documents ask no question that fusion could help with",
    "qmsum": "a summary",
    "multi_news": "a summary",
    "vcsum": "a summary",
    "lcc": "code completion is scored by edit distance",
    "repobench-p": "code completion is scored by edit distance",
}
"""Tasks of LongBench that are not read, with the reason."""


@functools.cache
def benchmark_tasks() -> dict[str, dict[str, Any]]:
    """Prompt, output length and metric of every task of both benchmarks, by the name that rows give as `dataset`."""
    folder = Path(__file__).parents[2] / "data" / "benchmarks"
    tables = (json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("longbench", "lveval"))
    return {name: task for table in tables for name, task in table.items() if name != "_source"}


def read_longbench(path: str | Path, *, limit: int | None = None) -> list[Sample]:
    """Reads a file of LongBench or LV-Eval.

    Raises:
        ValueError: a malformed line or a task that is not read, with the file's name and the line's number.
    """
    path = Path(path)
    return list(itertools.islice(read_rows(path, lambda row, line: [_sample(row, line, path)]), limit))


def task_name(dataset: str) -> str:
    """A row's `dataset` or a file's name without what tells lengths: "cmrc_mixup_16k" and "hotpotqa_e" are such."""
    return re.sub(r"(_\d{1,3}k|_e)$", "", dataset)


def _sample(row: Row, line: int, path: Path) -> Sample:
    name = task_name(text(row, "dataset", path.name.split(".")[0]))
    if name not in benchmark_tasks():
        reason = f" ({LEFT_OUT[name]})" if name in LEFT_OUT else ""
        raise ValueError(f"dataset is {name!r}, which is not read{reason}; use {', '.join(benchmark_tasks())}.")
    task = benchmark_tasks()[name]
    before, after = task["prompt"].split("{context}")
    lead, cue = after.split("{input}") if "{input}" in after else (after, "")
    asked = text(row, "input")
    # A task without a question of its own (passage_count) asks by what stands after the context.
    lead, question, cue = (lead, asked, cue) if asked.strip() else ("", lead + asked + cue, "")
    return Sample(
        id=text(row, "_id", str(line)),
        task=name,
        instruction=before,
        example="",
        chunks=(text(row, "context"),),
        question=question,
        answer_prefix=cue,
        answers=tuple(items(row, "answers", str)),
        metric=task["metric"],
        lead=lead,
        joints=Joints("", "", ""),
        max_new_tokens=task["max_new_tokens"],
        keywords=_keywords(row),
        classes=tuple(items(row, "all_classes", str)) if row.get("all_classes") else (),
    )


def _keywords(row: Row) -> str:
    given = row.get("answer_keywords", "")
    return " ".join(items(row, "answer_keywords", str)) if isinstance(given, list) else text(row, "answer_keywords", "")
