"""From rows to figures: raw means beside the share of the gap from reuse to full prefill that each method closes.

In go the rows of a run; out come `Cell`s, one per model, task, method and ratio, and paired comparisons. All methods
are placed on the same samples: a sample that lacks one of the planned methods counts for none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

from jfuse.evals.methods import FULL, REUSE, Method
from jfuse.evals.records import Row

BETTER = {"kl": -1, "first_kl": -1, "nll": -1, "top1": 1, "score": 1}
"""Measures on which a gap is closed, and whether they should grow."""

OTHERS = ("realised", "visible", "sinks", "recall", "context", "ttft")
EQUAL_WORK = 0.03
RESAMPLES = 2000
TINY = 1e-12  # nats
SEED = 0

Group = dict[tuple[str, float], dict[str, Row]]  # rows by method and ratio, then by sample


class Share(NamedTuple):
    """A share of the gap with its 95 % bootstrap interval; None throughout where there is no clear gap."""

    value: float | None
    low: float | None
    high: float | None


class Cell(NamedTuple):
    """One method on one task."""

    model: str
    task: str
    method: str
    ratio: float
    n: int
    mean: dict[str, float]  # of every measure that the rows have
    error: dict[str, float]  # standard errors of these
    closed: dict[str, Share]  # (reuse - x) / (reuse - full), means first


class Pair(NamedTuple):
    """Two methods at one ratio, or at equal work, on the same samples; negative differences speak for the first."""

    model: str
    task: str
    first: str
    first_ratio: float
    second: str
    second_ratio: float
    n: int
    difference: float  # mean KL of the first less that of the second, as a share of the mean KL of reuse
    low: float
    high: float
    wins: int  # samples on which the first has the smaller KL


def cells(rows: Iterable[Row], planned: Mapping[str, int] | None = None) -> list[Cell]:
    """Every method on every task.

    Args:
        planned: method keys (`Method.key`) with the number of samples each is to be measured on. Samples that lack one
            of them are left out; so are other methods, unless they were measured on all samples that count
            (`left_out` names them). By default all that are found are planned for all samples.
    """
    found = []
    for (model, task), group in _groups(rows, planned):
        for (method, ratio), own in group.items():
            found.append(_cell(model, task, method, ratio, own, group))
    return found


def pairs(
    rows: Iterable[Row], planned: Mapping[str, int] | None = None, *, methods: Sequence[str] | None = None
) -> list[Pair]:
    """Every two methods at one ratio or at equal work, on the samples that both were measured on.

    Equal work: mean realised shares at most `EQUAL_WORK` apart. Nominal ratios mean different work for methods that
    choose layer by layer.

    Args:
        methods: only these; all by default.
    """
    found = []
    for (model, task), group in _groups(rows, planned):
        keys = [key for key in group if key[0] not in (FULL, REUSE) and (methods is None or key[0] in methods)]
        for i, first in enumerate(keys):
            for second in keys[i + 1 :]:
                ids = [id for id in group[first] if id in group[second]]
                if len(ids) > 1 and (first[1] == second[1] or _equal_work(group[first], group[second], ids)):
                    found.append(_pair(model, task, first, second, ids, group))
    return found


def averages(found: Sequence[Cell], measure: str = "kl") -> dict[tuple[str, str, float], float]:
    """Mean share closed per model, method and ratio over the model's tasks with a clear gap, the same for all methods.

    A task counts if its gap is clear for every method that was measured on it; a method counts if it was measured on
    every such task.
    """
    shares: dict[str, dict[str, dict[tuple[str, float], float]]] = {}
    blank = set()
    for cell in found:
        own = shares.setdefault(cell.model, {}).setdefault(cell.task, {})
        value = cell.closed[measure].value if measure in cell.closed else None
        if value is None:
            blank.add((cell.model, cell.task))
        else:
            own[cell.method, cell.ratio] = value
    means = {}
    for model, tasks in shares.items():
        clear = [own for task, own in tasks.items() if (model, task) not in blank]
        for key in dict.fromkeys(key for own in clear for key in own):
            values = [own[key] for own in clear if key in own]
            if len(values) == len(clear):
                means[model, *key] = float(np.mean(values))
    return means


def incomplete(rows: Sequence[Row], planned: Mapping[str, int] | None = None) -> int:
    """Samples with rows that do not count, because a planned method is missing."""
    used = {
        (model, task, id) for (model, task), group in _groups(rows, planned) for own in group.values() for id in own
    }
    return len({(row["model"], row["task"], row["id"]) for row in rows} - used)


def left_out(rows: Iterable[Row], planned: Mapping[str, int] | None = None) -> list[str]:
    """Keys of methods that were measured but are not planned, and lack samples that count: `cells` has none of them."""
    found = list(rows)
    shown = {(*where, *method) for where, group in _groups(found, planned) for method in group}
    hidden = [row for row in found if (row["model"], row["task"], row["method"], row["ratio"]) not in shown]
    keys = dict.fromkeys(_key(row["method"], row["ratio"]) for row in hidden)
    return [key for key in keys if planned and key not in planned]


def gap(full: Float[np.ndarray, " n"], reuse: Float[np.ndarray, " n"], better: int) -> float | None:
    """How much better full prefill is than reuse, or None under two standard errors of the paired difference."""
    difference = better * (full - reuse)
    if len(difference) < 2:
        return None
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    mean = float(difference.mean())
    return mean if mean > 0 and mean >= 2 * error else None


def _groups(rows: Iterable[Row], planned: Mapping[str, int] | None):
    tables: dict[tuple[str, str], Group] = {}
    for row in rows:
        group = tables.setdefault((row["model"], row["task"]), {})
        group.setdefault((row["method"], row["ratio"]), {})[row["id"]] = row
    for key, group in tables.items():
        index = {id: row["index"] for own in group.values() for id, row in own.items()}
        names = {_key(*method): method for method in group}
        limits = planned or dict.fromkeys(names, len(index))
        most = max(limits.values(), default=0)  # samples beyond it are from a longer go, and count if all is there
        used = {
            id
            for id, place in index.items()
            if all(
                id in group.get(names.get(name, ("", 0.0)), {})
                for name, limit in limits.items()
                if place < limit or limit == most
            )
        }
        kept = {
            method: {id: own[id] for id in sorted(used & own.keys(), key=index.__getitem__)}
            for method, own in group.items()
            if _key(*method) in limits or used <= own.keys()
        }
        yield key, {method: own for method, own in kept.items() if own}


def _key(method: str, ratio: float) -> str:
    return Method(method, ratio).key


def _cell(model: str, task: str, method: str, ratio: float, own: dict[str, Row], group: Group) -> Cell:
    ids = list(own)
    mean, error, closed = {}, {}, {}
    for name in (*BETTER, *OTHERS):
        if all(own[id].get(name) is not None for id in ids):
            values = _column(own, ids, name)
            mean[name] = float(values.mean())
            error[name] = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
    ends = [group.get(key, {}) for key in ((FULL, 1.0), (REUSE, 0.0))]
    for name in BETTER:
        if name in mean and all(id in end for end in ends for id in ids):
            full, reuse = (_column(end, ids, name) for end in ends)
            closed[name] = _share(_column(own, ids, name), full, reuse, BETTER[name])
    return Cell(model, task, method, ratio, len(ids), mean, error, closed)


def _column(own: dict[str, Row], ids: Sequence[str], name: str) -> Float[np.ndarray, " n"]:
    return np.array([own[id][name] for id in ids], np.float64)


def _share(
    own: Float[np.ndarray, " n"], full: Float[np.ndarray, " n"], reuse: Float[np.ndarray, " n"], better: int
) -> Share:
    whole = gap(full, reuse, better)
    if whole is None:
        return Share(None, None, None)
    value = float((better * (own - reuse)).mean()) / whole
    low, high = _interval((own - reuse, full - reuse), lambda a, b, axis: a.mean(axis) / b.mean(axis))
    return Share(value, low, high)


def _equal_work(first: dict[str, Row], second: dict[str, Row], ids: list[str]) -> bool:
    if any(own[id].get("realised") is None for own in (first, second) for id in ids):
        return False
    apart = _column(first, ids, "realised").mean() - _column(second, ids, "realised").mean()
    return abs(float(apart)) <= EQUAL_WORK


def _pair(model: str, task: str, first, second, ids: list[str], group: Group) -> Pair:
    a, b, reuse = (_column(group[key], ids, "kl") for key in (first, second, (REUSE, 0.0)))
    reuse = np.maximum(reuse, TINY)  # one chunk alone is exact, and leaves nothing to divide by
    low, high = _interval((a - b, reuse), lambda d, r, axis: d.mean(axis) / r.mean(axis))
    difference = float((a - b).mean() / reuse.mean())
    wins = int((a < b).sum())
    return Pair(model, task, first[0], first[1], second[0], second[1], len(ids), difference, low, high, wins)


def _interval(samples: tuple[Float[np.ndarray, " n"], ...], statistic) -> tuple[float, float]:
    """95 % percentile bootstrap, samples drawn together; the same draws for every method.

    Draws without any gap say nothing about its share, and are left out. There are few: the gap is clear.
    """
    if len(samples[0]) < 2 or all(np.ptp(sample) == 0 for sample in samples):
        point = float(statistic(*samples, axis=-1))
        return point, point
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = stats.bootstrap(
            samples,
            statistic,
            n_resamples=RESAMPLES,
            paired=True,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(SEED),
        ).bootstrap_distribution
    low, high = np.percentile(drawn[np.isfinite(drawn)], (2.5, 97.5))
    return float(low), float(high)


def as_row(cell: Cell) -> dict[str, Any]:
    """A cell as one flat row, for tables and CSV; what is missing is None."""
    row: dict[str, Any] = {name: getattr(cell, name) for name in ("model", "task", "method", "ratio", "n")}
    for name in (*BETTER, *OTHERS):
        row[name], row[f"{name}_se"] = cell.mean.get(name), cell.error.get(name)
        if name in BETTER:
            share = cell.closed.get(name, Share(None, None, None))
            row |= {f"{name}_closed": share.value, f"{name}_closed_low": share.low, f"{name}_closed_high": share.high}
    return row
