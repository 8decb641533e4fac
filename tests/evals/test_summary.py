"""Gaps, shares, intervals and comparisons from rows, against the definitions (pitfall 50, M-06)."""

import json

import numpy as np
import pandas
import pytest

from jfuse.evals.methods import FULL
from jfuse.evals.records import Records
from jfuse.evals.results import markdown, write_results
from jfuse.evals.summary import averages, cells, gap, incomplete, left_out, pairs

RNG = np.random.default_rng(0)
N = 20
REUSE_KL = RNG.uniform(0.8, 1.2, N)


def rows(task="mq", n=N, **kl):
    """Rows of both ends and of further methods at ratio 0.3, from their KL."""
    table = {FULL: np.zeros(n), "reuse": REUSE_KL[:n], **kl}
    ratios = {FULL: 1.0, "reuse": 0.0}
    return [
        {"model": "m", "task": task, "id": f"{task}-{i}", "index": i, "method": name, "ratio": ratios.get(name, 0.3)}
        | {"kl": float(value), "first_kl": float(value), "nll": 1 + float(value), "top1": 0.5, "realised": 0.3}
        for i in range(n)
        for name, values in table.items()
        for value in values[i : i + 1]
    ]


def found(given, **options):
    return {(cell.task, cell.method): cell for cell in cells(given, **options)}


def test_share_is_the_ratio_of_means_on_both_measures():
    half = found(rows(half=REUSE_KL / 2))["mq", "half"]
    assert half.closed["kl"].value == pytest.approx(0.5) and half.closed["nll"].value == pytest.approx(0.5)
    assert half.mean["kl"] == pytest.approx(REUSE_KL.mean() / 2)
    assert half.error["kl"] == pytest.approx(REUSE_KL.std(ddof=1) / 2 / np.sqrt(N))
    ends = found(rows())
    assert ends["mq", FULL].closed["kl"].value == 1 and ends["mq", "reuse"].closed["kl"].value == 0
    noisy = REUSE_KL * RNG.uniform(0, 1, N)
    cell = found(rows(noisy=noisy))["mq", "noisy"]
    assert cell.closed["kl"].value == pytest.approx(1 - noisy.mean() / REUSE_KL.mean())
    # The interval is a bootstrap over samples: close to the delta method's for a ratio of means.
    residual = (REUSE_KL - noisy) - cell.closed["kl"].value * REUSE_KL
    error = residual.std(ddof=1) / np.sqrt(N) / REUSE_KL.mean()
    assert cell.closed["kl"].low == pytest.approx(cell.closed["kl"].value - 1.96 * error, abs=0.4 * error)
    assert cell.closed["kl"].high == pytest.approx(cell.closed["kl"].value + 1.96 * error, abs=0.4 * error)


def test_share_is_blank_where_full_and_reuse_hardly_differ():
    """Pitfall 50: under two standard errors of the paired difference, or with reuse above full prefill."""
    full, reuse = np.zeros(4), np.array([1.0, -1.0, 1.0, -0.9])
    assert gap(full, reuse, -1) is None and gap(full, -np.ones(4), -1) is None and gap(full[:1], reuse[:1], -1) is None
    edge = np.array([1.0, 3.0])  # mean 2, standard error 1
    assert gap(np.zeros(2), edge, -1) == 2 and gap(np.zeros(2), edge - 0.01, -1) is None
    given = [row | {"nll": 1.0 + row["index"] % 2} for row in rows(x=REUSE_KL / 2)]
    cell = found(given)["mq", "x"]
    assert cell.closed["nll"].value is None and cell.mean["nll"] == 1.5 and cell.closed["kl"].value is not None


def test_denominators_are_equal_for_all_methods():
    """M-06: a sample that lacks a method counts for none; a method planned on fewer samples has ends of its own."""
    given = rows(a=REUSE_KL / 2, b=REUSE_KL / 4)
    torn = [row for row in given if (row["index"], row["method"]) != (3, "b")]
    assert {cell.n for cell in cells(torn)} == {N - 1} and incomplete(torn) == 1
    planned = {f"{FULL}@1": N, "reuse@0": N, "a@0.3": N, "b@0.3": 10}
    fewer = [row for row in given if row["method"] != "b" or row["index"] < 10]
    table = found(fewer, planned=planned)
    assert table["mq", "a"].n == N and table["mq", "b"].n == 10 and incomplete(fewer, planned) == 0
    assert table["mq", "b"].closed["kl"].value == pytest.approx(0.75)  # over the first ten alone
    assert cells([row for row in given if row["method"] != "reuse"], planned=planned) == []


def test_methods_of_an_earlier_go_stay_if_they_were_measured_on_all_that_counts():
    """`--selectors a` and then `--selectors b` in one folder; what is not shown is named."""
    planned = {f"{FULL}@1": N, "reuse@0": N, "b@0.3": N}
    given = rows(a=REUSE_KL / 2, b=REUSE_KL / 4)
    table = found(given, planned=planned)
    assert table["mq", "a"].n == table["mq", "b"].n == N and left_out(given, planned) == []
    assert [(pair.first, pair.second) for pair in pairs(given, planned)] == [("a", "b")]
    torn = [row for row in given if (row["index"], row["method"]) != (3, "a")]
    assert ("mq", "a") not in found(torn, planned=planned) and found(torn, planned=planned)["mq", "b"].n == N
    assert left_out(torn, planned) == ["a@0.3"] and left_out(torn) == []
    torn = [row for row in given if (row["index"], row["method"]) != (3, "b")]
    assert {cell.n for cell in cells(torn, planned)} == {N - 1} and left_out(torn, planned) == []


def test_a_smaller_limit_does_not_let_torn_samples_in():
    """Stopped within the sample of index 12, then asked for 10: what is complete counts, what is torn does not."""
    given = rows(n=13, a=REUSE_KL / 2, b=REUSE_KL / 4)
    torn = [row for row in given if (row["index"], row["method"]) != (12, "b")]
    planned = {f"{FULL}@1": 10, "reuse@0": 10, "a@0.3": 10, "b@0.3": 10}
    assert {cell.n for cell in cells(torn, planned)} == {12} and incomplete(torn, planned) == 1


def test_intervals_are_finite_although_some_draws_have_no_gap():
    """Seven of twelve samples are ties: now and then a draw holds ties alone, and has no share."""
    kl = np.where(np.arange(12) < 5, 1.0, 0.0)
    given = [row | {"kl": kl[row["index"]] * row["kl"]} for row in rows(n=12, a=REUSE_KL / 2)]
    table = found(given)
    for name in (FULL, "reuse", "a"):
        share = table["mq", name].closed["kl"]
        assert share.value is not None and np.isfinite([share.low, share.high]).all()
    assert table["mq", "a"].closed["kl"].low == pytest.approx(0.5)
    exact = [row | {"kl": 0.0} for row in rows(n=5, a=REUSE_KL, b=REUSE_KL)]  # one chunk: reuse is exact
    assert [np.isfinite([p.difference, p.low, p.high]).all() for p in pairs(exact)] == [True]


def test_pairs_are_compared_on_the_same_samples():
    a, b = REUSE_KL * 0.5, REUSE_KL * 0.5 + np.where(np.arange(N) < 15, 0.1, -0.1)
    (pair,) = pairs(rows(a=a, b=b))
    assert (pair.first, pair.second, pair.n, pair.wins) == ("a", "b", N, 15)
    assert pair.difference == pytest.approx((a - b).mean() / REUSE_KL.mean())
    assert pair.low < pair.difference < pair.high < 0
    assert pairs(rows(a=a, b=b), methods=["a"]) == []


@pytest.mark.parametrize(("realised", "compared"), [(0.31, True), (0.4, False)])
def test_other_ratios_are_compared_at_equal_work(realised, compared):
    """A method that chooses layer by layer does at 0.1 what others do at 0.3."""
    given = [
        row | ({"ratio": 0.1, "realised": realised} if row["method"] == "b" else {"realised": row["ratio"]})
        for row in rows(a=REUSE_KL / 2, b=REUSE_KL / 4)
    ]
    found = [(pair.first, pair.first_ratio, pair.second, pair.second_ratio) for pair in pairs(given)]
    assert found == ([("a", 0.3, "b", 0.1)] if compared else [])


def test_average_leaves_out_tasks_without_a_gap():
    flat = [row | {"kl": 0.5, "task": "flat"} for row in rows("flat", a=REUSE_KL / 2)]
    means = averages(cells([*rows(a=REUSE_KL / 2), *rows("mv", a=REUSE_KL / 4), *flat]))
    assert means["m", "a", 0.3] == pytest.approx((0.5 + 0.75) / 2)
    fewer = [row | {"model": "other"} for row in rows(a=REUSE_KL / 2, b=REUSE_KL / 4)]
    both = averages(cells([*rows(a=REUSE_KL / 2), *rows("mv", a=REUSE_KL / 4), *fewer]))
    assert both["m", "a", 0.3] == means["m", "a", 0.3] and both["other", "b", 0.3] == pytest.approx(0.75)


def test_files_for_readers(tmp_path):
    """`metrics.json` in lm-evaluation-harness shape, a CSV that pandas reads in a line, a table in Markdown."""
    identity = {"format": 1, "tasks": {"mq": {"length": 1}}, "models": {"m": {}}}
    given = rows(a=REUSE_KL / 2)
    with Records(tmp_path, identity, about={"settings": {"limit": N - 1}}) as records:  # an earlier go had more
        for row in given:
            records.add(row, {"seconds": 0.5, "ttft": 0.25})
    run = write_results(tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["results"]["mq/a@0.3"]["kl_closed,none"] == 0.5
    assert metrics["results"]["mq/a@0.3"]["kl_stderr,none"] > 0
    assert metrics["n-samples"]["mq/a@0.3"] == {"original": N, "effective": N} and metrics["left_out"] == []
    assert metrics["results"].keys() == metrics["configs"].keys() == metrics["versions"].keys()
    table = pandas.read_csv(tmp_path / "metrics.csv").set_index("method")
    assert table.loc["a", "kl_closed"] == 0.5 and table.loc["a", "ttft"] == 0.25
    assert table["kl"].dtype == np.float64
    assert "| a | 0.3 | 0.30 | " in markdown(run.cells) and "50% [50%, 50%] n20" in markdown(run.cells)
