"""What a run leaves for readers: `metrics.json` in the shape of lm-evaluation-harness, `metrics.csv`, and a table.

In go a run's folder; out come files beside its rows. Everything is computed from the rows, so it can be done again.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jfuse.evals.records import KEY, MANIFEST, ROWS, TIMINGS, Row, key_of, read_rows, write_json
from jfuse.evals.summary import (
    BETTER,
    OTHERS,
    RESAMPLES,
    Cell,
    Pair,
    as_row,
    averages,
    cells,
    incomplete,
    left_out,
    pairs,
)

METRICS, TABLE = "metrics.json", "metrics.csv"


class Run(NamedTuple):
    """A run's folder, read."""

    manifest: dict[str, Any]
    rows: list[Row]
    cells: list[Cell]
    pairs: list[Pair]
    incomplete: int  # samples that do not count yet, because a planned method is missing
    too_long: int = 0  # samples that their model could not serve, left out for every method
    left_out: Sequence[str] = ()  # methods of earlier goes, by key, that lack samples which count


def read_run(folder: str | Path, *, compared: Sequence[str] | None = None) -> Run:
    """Reads what a run has measured so far.

    Args:
        compared: methods to compare in pairs; all by default.

    Raises:
        ValueError: no run, or a damaged one.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no run ({MANIFEST} is missing); give the folder of an evaluation.")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    times = {key_of(time): time for time in read_rows(folder / TIMINGS)}
    rows = [_timed(row, times.get(key_of(row), {})) for row in read_rows(folder / ROWS)]
    planned = manifest.get("planned")
    too_long = sum(map(len, manifest.get("too_long", {}).values()))
    compared_pairs = pairs(rows, planned, methods=compared)
    unfinished, hidden = incomplete(rows, planned), left_out(rows, planned)
    return Run(manifest, rows, cells(rows, planned), compared_pairs, unfinished, too_long, hidden)


def write_results(folder: str | Path, *, compared: Sequence[str] | None = None) -> Run:
    """Writes `metrics.json` and `metrics.csv` into a run's folder."""
    folder, run = Path(folder), read_run(folder, compared=compared)
    write_json(folder / METRICS, as_metrics(run))
    columns = list(as_row(run.cells[0])) if run.cells else []
    with (folder / TABLE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_rounded(as_row(cell)) for cell in run.cells)
    return run


def as_metrics(run: Run) -> dict[str, Any]:
    """The shape of lm-evaluation-harness: `results[name]["measure,none"]`, a name being task, method and ratio."""
    many = len({cell.model for cell in run.cells}) > 1
    names = {_name(cell, many): cell for cell in run.cells}
    tasks, limit = run.manifest["identity"]["tasks"], run.manifest["settings"]["limit"]
    drawn: dict[tuple[str, str], set[str]] = {}
    for row in run.rows:
        drawn.setdefault((row["model"], row["task"]), set()).add(row["id"])
    return {
        "results": {name: _result(name, cell) for name, cell in names.items()},
        "configs": {name: {"task": cell.task, **tasks[cell.task]} for name, cell in names.items()},
        "versions": {name: run.manifest["identity"]["format"] for name in names},
        "n-samples": {  # an earlier go may have asked for more than the limit of the last one
            name: {"original": max(limit, len(drawn[cell.model, cell.task])), "effective": cell.n}
            for name, cell in names.items()
        },
        "higher_is_better": {name: {measure: BETTER[measure] > 0 for measure in BETTER} for name in names},
        "config": {
            "model": sorted(run.manifest["identity"]["models"]),
            "limit": limit,
            "bootstrap_iters": RESAMPLES,
        },
        "pairs": [_rounded(pair._asdict()) for pair in run.pairs],
        "averages": [
            {"model": model, "method": method, "ratio": ratio, "kl_closed": round(value, 6)}
            for (model, method, ratio), value in averages(run.cells).items()
        ],
        "incomplete": run.incomplete,
        "left_out": list(run.left_out),
    }


def _result(name: str, cell: Cell) -> dict[str, Any]:
    result: dict[str, Any] = {"alias": name}
    for measure in (*BETTER, *OTHERS):
        if measure in cell.mean:
            result[f"{measure},none"] = round(cell.mean[measure], 6)
            result[f"{measure}_stderr,none"] = round(cell.error[measure], 6)
        if measure in cell.closed and cell.closed[measure].value is not None:
            result |= {
                f"{measure}_closed{end},none": round(value, 6)
                for end, value in zip(("", "_low", "_high"), cell.closed[measure], strict=True)
                if value is not None
            }
    return result


def _name(cell: Cell, many: bool) -> str:
    return (f"{cell.model}/" if many else "") + f"{cell.task}/{cell.method}@{cell.ratio:g}"


def _timed(row: Row, time: Mapping[str, Any]) -> Row:
    return row | {name: value for name, value in time.items() if name not in KEY and name not in row}


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def markdown(found: Iterable[Cell], measure: str = "kl") -> str:
    """A table in Markdown: methods by tasks, the raw mean and the share of the gap closed with its interval."""
    listed = list(found)
    tasks = list(dict.fromkeys(cell.task for cell in listed))
    by_key: dict[tuple[str, float], dict[str, Cell]] = {}
    for cell in listed:
        by_key.setdefault((cell.method, cell.ratio), {})[cell.task] = cell
    lines = ["| method | ratio | realised | " + " | ".join(tasks) + " |", "|---|---|---|" + "---|" * len(tasks)]
    for (method, ratio), own in by_key.items():
        realised = np.mean([cell.mean["realised"] for cell in own.values()])
        shown = [_shown(own[task], measure) if task in own else "" for task in tasks]
        lines.append(f"| {method} | {ratio:g} | {realised:.2f} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def _shown(cell: Cell, measure: str) -> str:
    if measure not in cell.mean:
        return ""
    share = cell.closed.get(measure)
    raw = f"{cell.mean[measure]:.3f}"
    if share is None or share.value is None or share.low is None or share.high is None:
        return raw
    return f"{raw} · {share.value:.0%} [{share.low:.0%}, {share.high:.0%}] n{cell.n}"
