"""CacheBlend's three versions: deviation, staircase, gradual filter, each against plain NumPy."""

import jax
import numpy as np
import pytest

from jfuse import selectors
from jfuse.fuse import cache_error, fuse
from jfuse.selectors.base import budget_for
from jfuse.selectors.score import kv_deviation
from tests import tiny
from tests.reference import attention
from tests.selectors import plain

SCORE = {"rtol": 5e-4, "atol": 1e-5}
KV = {"rtol": 1e-4, "atol": 1e-5}


def deviation(request, layer, names):
    """Squared differences of fresh and cached entries of the context, summed over heads and channels."""
    fresh, cached = plain.prefix_fresh(request), plain.cached(request)
    parts = {"k": 0, "v": 1}
    total = sum(((fresh[parts[n]][layer] - cached[parts[n]][layer]) ** 2).sum((1, 2)) for n in names)
    return total[request.num_prefix :]


@pytest.mark.parametrize(("preset", "names"), [("code", "v"), ("lmcache", "k"), ("paper", "kv")])
def test_deviation_and_choice(request_, evidence, choose, score, preset, names):
    """Pitfall 37: values, rotated keys, or both, at layer 1; the budget counts the prefix (and the query)."""
    selector = selectors.cacheblend(preset)
    expected = deviation(request_, 1, names)
    actual = plain.on_context(request_, score(selector, evidence(request_, selector)))[0]
    np.testing.assert_allclose(actual, expected, **SCORE)
    population = request_.end + (len(request_.query) if preset == "lmcache" else 0)
    for ratio in (0.15, 0.5):
        k = int(ratio * population)
        assert budget_for(selector, ratio, request_.context.sizes(len(request_.query))) == k
        rows = [plain.picked(request_, row) for row in choose(request_, selector, ratio).recompute]
        everyone, chosen = set(range(request_.num_context)), plain.best(expected, k)
        assert rows == [everyone, chosen if preset == "lmcache" else everyone, chosen, chosen]


def test_deviation_starts_at_layer_one(request_):
    """Pitfall 5: at layer 0 every cached entry is exact, so a check there would choose by rounding noise."""
    assert deviation(request_, 0, "kv").max() < 1e-20
    assert deviation(request_, 1, "v").min() > 1e-6
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="check_layer"):
            selectors.cacheblend(check_layer=wrong)
    with pytest.raises(ValueError, match="use layers >= 1"):
        kv_deviation((0,))


def dense(request, rows):
    """The plain formula: all tokens run, and at each layer only the given rows keep their own keys and values."""
    recompute = np.zeros((request.model.config.num_layers, request.end), bool)
    for l, row in enumerate(rows):
        recompute[l, [i + request.num_prefix for i in row]] = True
    return request.oracle(recompute)


@pytest.mark.parametrize("preset", ["code", "lmcache"])
def test_fusion_equals_the_plain_formula(request_, choose, preset):
    """Version "code" keeps layer 1 fresh for every token, wherever it stops; LMCache writes the chosen ones."""
    selector = selectors.cacheblend(preset)
    selection = choose(request_, selector, 0.3)
    fused = fuse(request_.model, request_.context, selection, row_block=96)
    expected = dense(request_, [plain.picked(request_, row) for row in selection.recompute])
    for l, layer in enumerate(fused.kv):
        np.testing.assert_allclose(layer.k[: request_.end], expected.k[l, : request_.end], **KV)
        np.testing.assert_allclose(layer.v[: request_.end], expected.v[l, : request_.end], **KV)
    fresh = plain.prefix_fresh(request_)[1][1]
    same = np.abs(np.asarray(fused.kv[1].v)[: request_.end] - fresh).max((1, 2)) < 1e-4
    chosen = plain.picked(request_, selection.recompute[2])
    assert all(same) if preset == "code" else same.sum() < request_.end - 20 and all(same[[i + 9 for i in chosen]])


def filtered(request, shares, k):
    """The paper's gradual filter in plain words: run, measure, let the most deviating of the remaining go on."""
    reference, c, s = request.reference, request.model.config, request.num_prefix
    ids, at = request.ids[: request.end], np.arange(request.end)
    cached_k, cached_v = plain.cached(request)
    x, alive, sets = reference.params["embed"]["table"][ids], set(range(request.num_context)), []
    causal = at[None, :] <= at[:, None]
    for l in range(c.num_layers):
        q, k_new, v_new = reference.project(l, x)
        q, k_new = reference.rotate(q, at), reference.rotate(k_new, at)
        rows = np.array([i < s or i - s in alive for i in at])[:, None, None]
        k_l, v_l = np.where(rows, k_new, cached_k[l]), np.where(rows, v_new, cached_v[l])
        sets.append(alive)
        gap = ((k_l - cached_k[l]) ** 2).sum((1, 2)) + ((v_l - cached_v[l]) ** 2).sum((1, 2))
        counts = [*(int(share * request.num_context) for share in shares), k]
        if 1 <= l <= len(counts):
            order = sorted(alive, key=lambda i, gap=gap: (-gap[i + s], i))
            alive = set(order[: counts[l - 1]])
        x = reference.finish(l, x, attention(q, k_l, v_l, causal))
    return sets


@pytest.mark.parametrize("shares", [(0.6,), (0.7, 0.4)])
def test_gradual_filter(choose, shares):
    """The paper's schedule: each check measures tokens whose states already read the stale entries of the dropped."""
    request = tiny.build_request()
    selector = selectors.cacheblend("paper", schedule=shares)
    k = budget_for(selector, 0.2, request.context.sizes())
    assert k == (int(0.2 * request.end), *(int(share * 69) for share in shares))
    rows = [plain.picked(request, row) for row in choose(request, selector, 0.2).recompute]
    assert rows == filtered(request, shares, k[0])
    assert [len(row) for row in rows[:2]] == [69, 69]


def test_filter_never_lets_fewer_through_than_the_ratio(choose):
    """A ratio above the schedule widens it, so that ratio 1 is full prefill and the sets stay nested."""
    request = tiny.build_request()
    selector = selectors.cacheblend("paper", schedule=(0.3, 0.2))
    assert np.asarray(choose(request, selector, 1).recompute).sum(1).tolist() == [69] * 4
    rows = [plain.picked(request, row) for row in choose(request, selector, 0.5).recompute]
    assert [len(row) for row in rows] == [69, 69, 39, 39] and rows[3] == rows[2]
    assert not np.asarray(choose(request, selector, 0).recompute).any()


@pytest.mark.parametrize("preset", ["code", "lmcache", "paper"])
def test_ends(request_, choose, preset):
    """Equality between methods, S-01, S-02: ratio 1 is full prefill, ratio 0 plain reuse with no layer refreshed."""
    selector = selectors.cacheblend(preset)
    fused = fuse(request_.model, request_.context, choose(request_, selector, 1), row_block=96)
    assert np.asarray(cache_error(fused, request_.full())).max() < 1e-5
    assert not np.asarray(choose(request_, selector, 0).recompute).any()


def test_the_query_does_not_matter(request_, choose):
    """CacheBlend is query-independent: nothing is probed."""
    other = request_._replace(query=(request_.query + 1) % 128)
    a, b = (choose(r, selectors.cacheblend(), 0.3).recompute for r in (request_, other))
    np.testing.assert_array_equal(a, b)


def test_poison_outside_the_view(request_, evidence, score):
    """Only the check layer of the cache is read."""
    selector = selectors.cacheblend()
    first = score(selector, evidence(request_, selector))
    poison = jax.tree.map(lambda a: a * np.nan, request_.context.kv)
    kv = (poison[0], request_.context.kv[1], *poison[2:])
    np.testing.assert_array_equal(
        first, score(selector, evidence(request_._replace(context=request_.context._replace(kv=kv)), selector))
    )


def test_schedule_is_checked():
    """A schedule belongs to the paper's version and does not grow."""
    with pytest.raises(ValueError, match="checks once"):
        selectors.cacheblend(schedule=(0.5,))
    for wrong in ((0.2, 0.3), (0.0,), (1.5,)):
        with pytest.raises(ValueError, match="do not grow"):
            selectors.cacheblend("paper", schedule=wrong)
