"""Studies that compare configurations: each is a list of parts, and a part is one run of the evaluation.

In go parts and a folder; out come flat rows, one per method, ratio and task, with the part's own columns beside the
figures. Every part is resumable, as any evaluation is.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jfuse.evals.methods import FULL, REUSE
from jfuse.evals.results import write_results
from jfuse.evals.run import evaluate
from jfuse.evals.settings import Settings
from jfuse.evals.summary import as_row
from jfuse.selectors.base import Selector

Row = dict[str, Any]


class Part(NamedTuple):
    """One run of a study."""

    label: str  # its folder below the study's
    settings: Settings
    columns: Mapping[str, Any] = {}  # what tells its rows from those of other parts
    selectors: Mapping[str, Selector] = {}  # by the names that the settings use


def run_parts(parts: Iterable[Part], out: str | Path, **options: Any) -> list[Row]:
    """Measures what is missing and returns the rows of all parts.

    Args:
        out: the study's folder.
        options: of `evaluate`, such as `load` and `progress`.
    """
    rows: list[Row] = []
    for part in parts:
        folder = Path(out) / part.label
        evaluate(part.settings, folder, selectors=part.selectors, **options)
        rows += [{**part.columns, **as_row(cell)} for cell in write_results(folder).cells]
    return rows


def pooled(rows: Iterable[Row], by: Iterable[str] = ("method", "ratio"), *, measure: str = "kl_closed") -> list[Row]:
    """Means over tasks of a measure and of the time to first token, where the measure is there for every task.

    A share that is closed is blank where full prefill has no clear lead over reuse; such tasks are left out for all
    methods alike, so that every mean is over the same tasks (QCFuse Fig. 11).
    """
    found = list(rows)
    blank = {row["task"] for row in found if row.get(measure) is None and row["method"] not in (FULL, REUSE)}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row["task"] not in blank and row.get(measure) is not None:
            groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [_pooled(dict(zip(by, key, strict=True)), own, measure) for key, own in groups.items()]


def _pooled(keys: Row, rows: list[Row], measure: str) -> Row:
    means: Row = {}
    for name in (measure, "realised", "visible", "ttft"):
        values = [row[name] for row in rows if row.get(name) is not None]
        means[name] = sum(values) / len(values) if len(values) == len(rows) else None
    return {**keys, "tasks": len(rows), **means}
