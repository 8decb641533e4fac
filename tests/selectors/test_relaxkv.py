"""RelaxKV and its controls: sets, context, fusion, each against plain sets."""

import numpy as np
import pytest

from jfuse import selectors
from jfuse.fuse import cache_error, fuse
from jfuse.selectors.base import budget_for, select
from tests import tiny
from tests.selectors import plain

KV = {"rtol": 1e-4, "atol": 1e-5}
CONTROLS = {
    "relaxkv": selectors.relaxkv,
    "relaxkv_full_prefix": selectors.relaxkv_full_prefix,
    "relaxkv_g": selectors.relaxkv_g,
    "global_sparse": selectors.global_sparse,
    "layerwise_sparse": selectors.layerwise_sparse,
    "target_capacity": selectors.target_capacity,
    "target_union": selectors.target_union,
}


def layer_scores(request, denominator="all"):
    """Mean attention over heads and query rows of every layer, the query run over everything."""
    return plain.question_attention(request, plain.everything_before(request), denominator=denominator)


def plain_sets(request, ratio, name):
    """Targets per layer and context (one set, or one per layer) in plain words."""
    n, full = request.num_context, set(range(request.num_context))
    count = lambda share: min(n, max(1, round(share * n))) if share else 0  # noqa: E731
    raw = layer_scores(request, "context" if name == "relaxkv_g" else "all")
    scaled = np.stack([plain.min_max(row) for row in raw])
    layers = range(len(raw))
    own = [plain.best(scaled[l], count(ratio)) for l in layers]
    union = set().union(*own)
    targets = plain.staircase(own)
    if name == "relaxkv":
        return targets, union
    if name == "relaxkv_full_prefix":
        return targets, full
    if name == "global_sparse":
        return targets, plain.best(scaled.mean(0), len(union))
    if name == "layerwise_sparse":
        return targets, [plain.best(scaled[l], len(union)) for l in layers]
    if name == "target_union":
        return [plain.best(scaled.mean(0), len(union))] * len(raw), union
    if name == "target_capacity":
        union = set().union(*(plain.best(scaled[l], count(0.2)) for l in layers))
        return [plain.best(scaled.mean(0), min(int(ratio * n), len(union)))] * len(raw), union
    chosen = max(1, int(ratio * n)) if ratio else 0
    return [plain.best(raw.mean(0), chosen)] * len(raw), set().union(
        *(plain.best(raw[l], count(ratio)) for l in layers)
    )


# Ratios at which the scores of the request put some target outside of what its targets see.
OUTSIDE = {
    "relaxkv_g": 0.05,
    "global_sparse": 0.15,
    "layerwise_sparse": 0.15,
    "target_capacity": 0.5,
    "target_union": 0.15,
}


@pytest.mark.parametrize(
    ("name", "ratio"), sorted({(name, ratio) for name in CONTROLS for ratio in (0.15, 0.3)} | set(OUTSIDE.items()))
)
def test_targets_and_context(request_, choose, name, ratio):
    """Pitfalls 40, 42: every control's sets; the prefix is always visible; tokens outside U may be targets."""
    selection = choose(request_, CONTROLS[name](), ratio)
    targets, context = plain_sets(request_, ratio, name)
    assert [plain.picked(request_, row) for row in selection.recompute] == targets
    expected = context if isinstance(context, list) else [context]
    assert [plain.picked(request_, row) for row in selection.visible] == expected
    assert np.asarray(selection.visible)[:, : request_.num_prefix].all() and int(selection.window) == 0
    if OUTSIDE.get(name) == ratio:  # else a selection cut to what it sees would pass
        seen = expected * (len(targets) // len(expected))
        assert any(row - visible for row, visible in zip(targets, seen, strict=True))


def test_relaxkv_sets(request_, choose):
    """Pitfall 40, S-09: nested, R_0 = U, S_l inside R_l of size k, the last layer's set is S_{L-1} itself."""
    selection = choose(request_, selectors.relaxkv(), 0.2)
    rows = [plain.picked(request_, row) for row in selection.recompute]
    own = [plain.best(row, 14) for row in layer_scores(request_)]
    assert all(deeper <= upper for upper, deeper in zip(rows, rows[1:], strict=False))
    assert rows[0] == plain.picked(request_, selection.visible[0]) == set().union(*own)
    assert all(mine <= row for mine, row in zip(own, rows, strict=True)) and rows[-1] == own[-1]
    only_last = own[-1] - set().union(*own[:-1])
    assert only_last and all(only_last <= row for row in rows)  # chosen at the end only, active from layer 0


@pytest.mark.parametrize("name", ["relaxkv", "layerwise_sparse", "relaxkv_g", "target_capacity"])
@pytest.mark.parametrize("window", [0, 3])
def test_fusion_equals_the_dense_mask(request_, choose, name, window):
    """Retired targets are read stale, self and prefix always, the window too; against a T x T mask per layer."""
    selection = choose(request_, CONTROLS[name](window=window), 0.25)
    fused = fuse(request_.model, request_.context, selection, row_block=96)
    expected = request_.oracle(selection.recompute, visible=selection.visible, window=window)
    for l, layer in enumerate(fused.kv):
        np.testing.assert_allclose(layer.k[: request_.end], expected.k[l, : request_.end], **KV)
        np.testing.assert_allclose(layer.v[: request_.end], expected.v[l, : request_.end], **KV)


def test_ratio_one_is_full_prefill(request_, choose):
    """Equality between methods: at r = 1 U is everything, and so is every R_l; target_capacity alone is capped."""
    full = request_.full()
    for name in ("relaxkv", "relaxkv_full_prefix", "relaxkv_g", "global_sparse", "layerwise_sparse", "target_union"):
        selection = choose(request_, CONTROLS[name](), 1)
        assert np.asarray(selection.visible).all(), name
        fused = fuse(request_.model, request_.context, selection, row_block=96)
        assert np.asarray(cache_error(fused, full)).max() < 1e-5, name
    capped = choose(request_, selectors.target_capacity(), 1)
    union = choose(request_, selectors.target_union(), 0.2)
    np.testing.assert_array_equal(capped.recompute, union.recompute)
    np.testing.assert_array_equal(capped.visible, union.visible)


def test_g_in_the_full_context_is_prophetkv(request_, choose):
    """Equality between methods: same targets, and with everything visible the same cache."""
    for ratio in (0.1, 0.29):
        g, prophet = (choose(request_, s(), ratio) for s in (selectors.relaxkv_g, selectors.prophetkv))
        np.testing.assert_array_equal(g.recompute, prophet.recompute)
        assert not np.asarray(g.visible).all()
        opened = g._replace(visible=np.ones_like(g.visible))
        a, b = (fuse(request_.model, request_.context, s, row_block=96).kv for s in (opened, prophet))
        for one, other in zip(a, b, strict=True):
            np.testing.assert_array_equal(one.k, other.k)
            np.testing.assert_array_equal(one.v, other.v)


def test_full_prefix_with_all_targets_is_full_prefill(request_, choose):
    """Pitfall 40: the control with every position as target."""
    fused = fuse(request_.model, request_.context, choose(request_, selectors.relaxkv_full_prefix(), 1), row_block=96)
    assert np.asarray(cache_error(fused, request_.full())).max() < 1e-5


def test_a_target_of_layer_zero_changes_nothing(request_, choose):
    """Pitfall 40: h = 0 writes layer-0 entries, which are exact already; it still is part of the context."""
    selection = choose(request_, selectors.relaxkv(), 0.2)
    recompute = np.array(selection.recompute)
    short = recompute[0] & ~recompute[1]
    assert short.any()
    without = recompute.copy()
    without[0] &= ~short
    a, b = (
        fuse(request_.model, request_.context, selection._replace(recompute=rows), row_block=96)
        for rows in (recompute, without)
    )
    assert np.asarray(cache_error(a, b)).max() < 1e-6


def test_realised_ratio_is_far_above_the_nominal_one(request_, choose):
    """Pitfall 51, S-09: layer-token states of RelaxKV against those of a global set at the same nominal ratio."""
    realised = {
        name: np.asarray(choose(request_, s, 0.15).recompute).sum() / (4 * request_.num_context)
        for name, s in (("relaxkv", selectors.relaxkv()), ("prophetkv", selectors.prophetkv()))
    }
    assert realised["prophetkv"] == 10 / 69 and realised["relaxkv"] > 1.5 * realised["prophetkv"]


def test_rounding_is_half_to_even():
    """Pitfall 29: round(2.5) is 2, round(3.5) is 4, and at least one for a positive ratio."""
    sizes = lambda n: tiny.build_request().context.sizes()._replace(chunks=(n,))  # noqa: E731
    counts = [budget_for(selectors.relaxkv(), ratio, sizes(n)) for ratio, n in ((0.5, 5), (0.5, 7), (0.05, 3), (0, 9))]
    assert counts == [2, 4, 1, 0]


def test_second_budget_is_asked_for(request_, evidence):
    """A selector with two budgets says how to get them; a window below 0 is refused."""
    seen = evidence(request_, selectors.relaxkv_g())
    with pytest.raises(ValueError, match="budget_for"):
        select(selectors.relaxkv_g(), seen, 7, num_layers=4)
    with pytest.raises(ValueError, match="window is -1"):
        selectors.relaxkv(window=-1)
