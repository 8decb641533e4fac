"""What the break-even estimate says, against published figures, by hand, and against this machine."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jfuse import costs, selectors
from jfuse.evals.published import QWEN3_8B, SIZES, compare, table
from jfuse.hardware import Hardware, measure
from jfuse.models.tiny import tiny_config, tiny_model
from jfuse.plan import FULL, break_even, full_prefill_row, fusion_row, plan
from jfuse.types import Sizes

H20 = Hardware("H20", 100e12, 3.2e12, 50e9, 10e9)
QCFUSE, PROPHETKV = selectors.qcfuse((20, 21, 19)), selectors.prophetkv("qcfuse")


@pytest.fixture(scope="module")
def published():
    return compare()


def test_published_times_are_met_within_their_deviations(published):
    """QCFuse Figs. 1, 11, 13; the table in the documentation is the one computed here.

    At 10 GB/s and ratios from 0.2 every point is met within 20 %. Where loading weighs more (ratio 0.1, reuse, 3 GB/s)
    the published systems are up to 31 % slower than bytes over bandwidth allow.
    """
    for row in published:
        usual = row.point.gb_per_s == 10 and row.point.ratio >= 0.2
        assert abs(row.deviation) <= (0.20 if usual else 0.31), row
    assert np.mean([abs(row.deviation) for row in published]) < 0.13
    page = Path(__file__).parents[1] / "docs" / "plan.md"
    assert table(published) in page.read_text(encoding="utf-8")


def test_the_order_of_methods_is_the_published_one(published):
    rows = published
    for figure, rate in {(row.point.figure, row.point.gb_per_s) for row in rows}:
        own = [row for row in rows if (row.point.figure, row.point.gb_per_s) == (figure, rate)]
        best = min(own, key=lambda row: row.point.seconds)
        quickest = min(own, key=lambda row: row.predicted)
        assert (quickest.point.method, quickest.point.ratio) == (best.point.method, best.point.ratio)
    at = {(row.point.figure, row.point.gb_per_s, row.point.method, row.point.ratio): row for row in rows}
    for rate, ratio in ((3.0, 2.05 / 1.47), (10.0, 1.23 / 1.00)):
        prophetkv, qcfuse = at["13", rate, "prophetkv", 0.5], at["13", rate, "qcfuse", 0.5]
        assert prophetkv.predicted / qcfuse.predicted == pytest.approx(ratio, rel=0.1)


def test_one_request_reckoned_by_hand():
    """Bytes over bandwidth, FLOPs over speed, and the larger of loading and recomputation."""
    config = QWEN3_8B
    row = fusion_row(config, H20, SIZES, QCFUSE, ratio=0.5)
    half = 8 * 128 * 2
    anchors, keys = 21 * 2 * half * 20 * 52, 3 * half * 10240
    assert row.selection_bytes == anchors + keys
    probe = costs.probe_cost(config, QCFUSE.view, SIZES).flops
    weights = 22 * sum(costs.layer_weights(config)) * 2
    assert row.selection == pytest.approx((anchors + keys) / 10e9 + max(probe / 100e12, weights / 3.2e12))
    load = (72 * half * 10240 - keys) / 10e9
    # 5,120 positions run through 36 layers, the last one up to keys and values; on average they read half the context.
    keys_values, rest = 4096 * 2 * 8 * 128, 2 * 4096 * 32 * 128 + 3 * 4096 * 12288
    assert row.edges == pytest.approx(35 * 5120 * (32 + 10240 / 2), rel=0.02)
    arithmetic = 2 * 5120 * (36 * keys_values + 35 * rest) + 4 * 32 * 128 * row.edges
    assert row.fusion == pytest.approx(arithmetic / 100e12) and row.fusion > load
    slow = fusion_row(config, replace(H20, disk=0.5e9), SIZES, QCFUSE, ratio=0.5)
    assert slow.fusion == pytest.approx((72 * half * 10240 - keys) / 0.5e9)
    whole = fusion_row(config, replace(H20, disk=0.5e9), SIZES, PROPHETKV, ratio=0.5)
    assert whole.selection == pytest.approx(72 * half * 10240 / 0.5e9) and whole.fusion < 1.0
    assert full_prefill_row(config, H20, SIZES).ttft == pytest.approx(costs.prefill_cost(config, 10336).flops / 100e12)


def test_the_plan_names_the_fastest():
    rows = plan(QWEN3_8B, H20, SIZES, [QCFUSE, PROPHETKV, selectors.reuse()], ratio=None)
    assert [row.ttft for row in rows] == sorted(row.ttft for row in rows)
    assert rows[0].method == "reuse" and [row.fastest for row in rows] == [True, False, False, False]
    full = next(row for row in rows if row.method == FULL)
    assert full.speed_up == 1.0 and rows[0].speed_up > 5
    crawl = plan(QWEN3_8B, replace(H20, disk=0.2e9), SIZES, [QCFUSE, PROPHETKV], ratio=0.5)
    assert crawl[0].method == FULL, "loading the cache takes 7.5 s, recomputing it 1.7 s"


@pytest.mark.parametrize("name", ["relaxkv", "cacheblend", "qcfuse_layerwise", "a3", "recompute_all"])
def test_every_shape_of_selection_can_be_planned(name):
    selector = selectors.by_name(name, layers=(1, 2))
    config = tiny_config()
    row = fusion_row(config, H20, Sizes(4, (64, 32), 8), selector)
    assert 0 < row.ttft < 1 and row.flops > 0
    if name == "recompute_all":
        full = costs.prefill_cost(config, 4 + 96 + 8).flops
        assert row.flops == pytest.approx(full, rel=0.05), "all rows again, less the prefix"


def test_break_even_is_the_length_at_which_the_order_turns():
    """From there on fusion wins, one chunk earlier it does not."""
    hardware = Hardware("slow disk", 20e12, 1e12, disk=0.24e9)
    tokens = break_even(QWEN3_8B, hardware, PROPHETKV, ratio=0.3)
    assert tokens is not None and tokens % 512 == 0 and 512 < tokens < 40960

    def wins(count):
        sizes = Sizes(32, (512,) * (count // 512), 64)
        own = fusion_row(QWEN3_8B, hardware, sizes, PROPHETKV, ratio=0.3)
        return own.ttft < full_prefill_row(QWEN3_8B, hardware, sizes).ttft

    assert wins(tokens) and not wins(tokens - 512)
    assert break_even(QWEN3_8B, replace(hardware, disk=1e6), PROPHETKV, ratio=0.3) is None
    assert break_even(QWEN3_8B, H20, selectors.reuse(), ratio=None) == 512
    for longest in (50, 96, 600):  # no room for a chunk
        assert break_even(QWEN3_8B, H20, selectors.reuse(), longest=longest) is None


@pytest.mark.parametrize("field", ["flops", "memory", "link", "disk", "overhead"])
def test_machines_that_cannot_be_are_refused(field):
    with pytest.raises(ValueError, match=f"Hardware.{field} is -1"):
        Hardware(**{"name": "none", "flops": 1.0, "memory": 1.0, field: -1.0})


def test_this_machine_can_be_measured(tmp_path):
    model = tiny_model(jax.random.key(0), num_layers=2)
    found = measure(model, tokens=64, repeats=1, folder=tmp_path)
    assert min(found.flops, found.memory, found.link, found.disk) > 1e3 and "measured" in found.name
    assert not list(tmp_path.iterdir())
