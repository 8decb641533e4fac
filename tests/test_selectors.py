"""The contract that every selector of the catalogue keeps, whatever it scores.

A new selector needs one row in `CATALOGUE`; the tests fail until it has one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.config import View
from jfuse.fuse import fuse
from jfuse.probe import probe
from jfuse.selectors import listing
from jfuse.selectors.base import Selector, _select, budget_for, select
from jfuse.selectors.topk import soft_top_k
from jfuse.types import Evidence
from tests.tiny import build_request, choose

pytestmark = pytest.mark.usefixtures("strict")
LAYERS = (1, -1)
SOFT = functools.partial(soft_top_k, temperature=1e-7)


class Row(NamedTuple):
    """What may differ between selectors."""

    at_zero: int = 0  # positions recomputed at the last layer at ratio 0, of 69
    at_one: int | None = 69  # and at ratio 1; None where it depends on the scores
    exact: bool = True  # the last layer recomputes exactly the budget
    ties: bool = False  # scores tie by construction, so that a soft pick shares


CATALOGUE = {
    "reuse": Row(at_one=0, exact=False),
    "recompute_all": Row(at_zero=69, exact=False),
    "random": Row(),
    "epic": Row(ties=True),
    "epic_16": Row(at_zero=46, at_one=46, ties=True),  # 16 of 21, 1 of 1, 16 of 34, 13 of 13
    "cacheblend": Row(),
    "cacheblend_lmcache": Row(),
    "cacheblend_paper": Row(),
    "a3": Row(),
    "fusionrag": Row(),
    "fusionrag_qcfuse": Row(),
    "prophetkv": Row(),
    "prophetkv_qcfuse": Row(),
    "prophetkv_ucm": Row(),
    "prophetkv_kvbench": Row(),
    "qcfuse": Row(),
    "qcfuse_demo": Row(),
    "relaxkv": Row(),
    "relaxkv_full_prefix": Row(),
    "relaxkv_g": Row(),
    "global_sparse": Row(),
    "layerwise_sparse": Row(),
    "target_capacity": Row(at_one=None, exact=False),
    "target_union": Row(exact=False),
    "qcfuse_layerwise": Row(),
    "qcfuse_relaxkv": Row(),
    "learned": Row(),
}


QUICK = {"reuse", "random", "epic", "cacheblend_paper", "a3", "qcfuse", "qcfuse_relaxkv", "target_capacity"}


def build(name: str) -> Selector:
    return selectors.by_name(name, layers=LAYERS)


def evidence_of(request, selector, **changes) -> Evidence:
    context, anchors = request.context, request.view_cache(selector.view)
    return probe(
        request.model, request.query, changes.get("anchors", anchors), changes.get("context", context), selector.view
    )


@pytest.fixture(params=CATALOGUE)
def name(request) -> str:
    return request.param


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CATALOGUE])
def one_of_each(request) -> str:
    """All selectors, but quickly only one of each kind: these tests compile a program for each."""
    return request.param


def test_the_catalogue_is_complete():
    """Every name has a row here, and every selector function of `__all__` has a name."""
    assert set(CATALOGUE) == set(listing.NAMED), "add a row to CATALOGUE"
    named = {factory for factory, _ in listing.NAMED.values()}
    functions = {
        getattr(selectors, name) for name in selectors.__all__ if hasattr(getattr(selectors, name), "cache_info")
    }
    assert functions == named, "add the selector to jfuse.selectors.listing.NAMED"


def test_it_is_a_static_value(name):
    """Equal arguments give one object, which can be hashed; it says where it comes from and what it costs."""
    selector = build(name)
    assert selector is build(name) and hash(selector) == hash(build(name))
    assert selector.name and selector.source and 0 <= selector.ratio <= 1 and isinstance(selector.view, View)
    selector.view.layer_indices(4)


def test_picks_are_within_the_budget(one_of_each):
    """Law 6, S-01, S-02, S-09; pitfalls 29, 30, 31, 34: nested in depth, context only, exactly k at the last layer."""
    request, selector, row = build_request(), build(one_of_each), CATALOGUE[one_of_each]
    scores = np.asarray(jax.jit(selector.score)(evidence_of(request, selector), None))
    layers = selector.view.layer_indices(4)
    assert scores.dtype == np.float32 and scores.ndim == 2 and scores.shape[1] == 192
    assert scores.shape[0] in {1, len(layers), selector.view.fresh} and np.isfinite(scores[:, 9:78]).all()
    before = _select._cache_size()
    for ratio in (0.0, 0.01, 0.3, 1.0):
        selection = choose(request, selector, ratio)
        recompute, visible = np.asarray(selection.recompute), np.asarray(selection.visible)
        assert recompute.dtype == visible.dtype == bool and recompute.shape == (4, 192)
        assert visible.shape in {(1, 192), (4, 192)} and visible[:, :9].all()
        assert not (recompute[1:] & ~recompute[:-1]).any()
        assert not recompute[:, :9].any() and not recompute[:, 78:].any()
        k = budget_for(selector, ratio, request.context.sizes(11))
        k = min(k[0] if isinstance(k, tuple) else k, 69)
        if row.exact:
            assert recompute[-1].sum() == k
        if ratio in (0.0, 1.0):
            assert recompute[-1].sum() == (row.at_one if ratio else row.at_zero) or (ratio and row.at_one is None)
            if recompute[-1].sum() in (0, 69):
                assert (recompute == recompute[-1]).all()
    assert _select._cache_size() <= before + 1  # pitfall 53: the budget is traced


def test_the_ends_are_reuse_and_full_prefill(one_of_each):
    """ID-1, ID-2, S-01, S-02; pitfalls 1, 2, for every selector."""
    request, selector, row = build_request(), build(one_of_each), CATALOGUE[one_of_each]
    if row.at_zero == 0:
        fused = fuse(request.model, request.context, choose(request, selector, 0.0), row_block=96)
        assert all(ours is theirs for ours, theirs in zip(fused.kv, request.context.kv, strict=True))
    if row.at_one == 69:
        fused = fuse(request.model, request.context, choose(request, selector, 1.0), row_block=96)
        full = request.reference.run(request.ids)
        for l, layer in enumerate(fused.kv):
            np.testing.assert_allclose(layer.k[:78], full.k[l, :78], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(layer.v[:78], full.v[l, :78], rtol=1e-5, atol=1e-5)


def test_only_the_view_is_looked_at(one_of_each):
    """Layers outside the view are absent, values that the view does not ask for and deeper anchors are NaN."""
    request, selector = build_request(), build(one_of_each)
    view, layers = selector.view, selector.view.layer_indices(4)
    if view.tokens == "context" or view.kept:
        pytest.skip("the view is the whole cache")
    kv = {l: request.context.kv[l] for l in {*layers, *range(view.fresh)}}
    if not view.values:
        kv = {l: layer._replace(v=jnp.full_like(layer.v, jnp.nan)) for l, layer in kv.items()}
    anchors = request.view_cache(view)
    if anchors is not None:
        deeper = [jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), layer) for layer in anchors.kv[max(layers) :]]
        anchors = anchors._replace(kv=(*anchors.kv[: max(layers)], *deeper))
    poisoned = evidence_of(request, selector, context=request.context._replace(kv=kv), anchors=anchors)
    k = budget_for(selector, 0.3, request.context.sizes(11))
    actual = select(selector, poisoned, k, num_layers=4)
    jax.tree.map(np.testing.assert_array_equal, actual, choose(request, selector, 0.3))


def test_a_second_request_of_the_bucket_compiles_nothing(one_of_each):
    """Pitfalls 13, 53: other lengths, another number of chunks; and the first request again gives the same answer."""
    selector = build(one_of_each)
    first = choose(build_request(), selector, 0.3)
    before = _select._cache_size()
    other = choose(build_request(lengths=(40, 17, 9), seed=2), selector, 0.3)
    again = choose(build_request(), selector, 0.3)
    assert _select._cache_size() == before
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.asarray(other.recompute)[:, 9 + 66 :].any()


def test_padding_changes_nothing(one_of_each):
    """S-04, S-05, pitfall 32: one request in an exact buffer and in a padded one, with the query padded alike."""
    selector = build(one_of_each)
    padded, bare = (choose(request, selector, 0.3) for request in (build_request(), build_request(pad_to=1)))
    np.testing.assert_array_equal(padded.recompute[:, :78], bare.recompute)
    np.testing.assert_array_equal(padded.visible[:, 9:78], bare.visible[:, 9:])


def test_soft_picks_become_hard_ones(one_of_each):
    """Section 3 of the method: the same scores and allocation under soft weights, in the limit of no temperature."""
    request, selector, row = build_request(), build(one_of_each), CATALOGUE[one_of_each]
    hard, soft = choose(request, selector, 0.3), choose(request, selector, 0.3, pick=SOFT)
    if row.exact and not row.ties:
        np.testing.assert_allclose(soft.recompute, np.asarray(hard.recompute, np.float32), atol=1e-2)
        np.testing.assert_allclose(soft.visible, np.asarray(hard.visible, np.float32), atol=1e-2)
    weights = np.asarray(soft.recompute, np.float32)
    assert np.isfinite(weights).all() and weights.min() >= 0 and weights.max() <= 1
    assert not weights[:, :9].any() and not weights[:, 78:].any()
    np.testing.assert_allclose(weights[-1].sum(), np.asarray(hard.recompute)[-1].sum(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("lengths", [(1,), (13, 7, 1, 9, 5), (34, 34)])
def test_extreme_requests(one_of_each, lengths):
    """T-06, pitfall 59: one token in all, one-token chunks, no prefix, a query of one token; every ratio runs."""
    request, selector, row = (
        build_request(lengths=lengths, prefix=0, query=1),
        build(one_of_each),
        CATALOGUE[one_of_each],
    )
    total = sum(lengths)
    for ratio in (0.0, 0.5, 1.0):
        recompute = np.asarray(choose(request, selector, ratio).recompute)
        assert not recompute[:, total:].any() and recompute[0].sum() <= total
        if row.exact:
            k = budget_for(selector, ratio, request.context.sizes(1))
            assert recompute[-1].sum() == min(k[0] if isinstance(k, tuple) else k, total)


def blank_evidence(num_context: int, size: int, seed: int = 0) -> Evidence:
    segments = np.where(np.arange(size) < num_context, 0, -1).astype(np.int32)
    positions = np.where(segments == 0, np.arange(size), 2**30).astype(np.int32)
    one = np.zeros(1, np.int32)
    return Evidence((), (), (), None, one == 0, one, positions, segments, np.arange(size, dtype=np.int32))


def test_half_of_700_in_a_bucket_of_1024():
    """S-04: 350 positions, none in the padding."""
    selector = selectors.random(0)
    recompute = np.asarray(select(selector, blank_evidence(700, 1024), 350, num_layers=2).recompute)
    assert recompute.sum(-1).tolist() == [350, 350] and not recompute[:, 700:].any()


def test_constant_scores_take_the_first_positions():
    """Pitfall 31: ties go to the lower position, padding and prefix apart; more than there are takes all."""
    selector = selectors.random(0)._replace(score=lambda evidence, params=None: jnp.zeros((1, 64)), name="constant")
    evidence = blank_evidence(40, 64)
    evidence = evidence._replace(segments=np.where(np.arange(64) < 5, -2, evidence.segments))
    for k, expected in ((3, range(5, 8)), (0, ()), (35, range(5, 40)), (1000, range(5, 40))):
        recompute = np.asarray(select(selector, evidence, k, num_layers=1).recompute)[0]
        np.testing.assert_array_equal(np.flatnonzero(recompute), list(expected))


def test_random_draws_are_of_the_seed_alone():
    """Padding and other tokens change nothing; another seed draws others; draws are spread over the context."""
    picks = [
        np.flatnonzero(
            np.asarray(select(selectors.random(seed), blank_evidence(700, size), 70, num_layers=1).recompute)[0]
        )
        for seed, size in ((0, 1024), (0, 704), (1, 1024))
    ]
    np.testing.assert_array_equal(picks[0], picks[1])
    assert set(picks[0]) != set(picks[2]) and np.ptp(picks[0]) > 500


def test_select_inside_a_trace():
    """A user's own jit, vmap and grad, with a traced temperature in the pick."""
    request, selector = build_request(), build("qcfuse")
    evidence = evidence_of(request, selector)
    hard = choose(request, selector, 0.3)
    traced = jax.jit(lambda e, k: select(selector, e, k, num_layers=4))(evidence, 20)
    np.testing.assert_array_equal(traced.recompute, hard.recompute)
    many = jax.vmap(lambda k: select(selector, evidence, k, num_layers=4))(jnp.array([0, 20, 69]))
    assert many.recompute[:, 0].sum(-1).tolist() == [0, 20, 69]

    def loss(temperature):
        pick = functools.partial(soft_top_k, temperature=temperature)
        weights = select(selector, evidence, 20, num_layers=4, pick=pick).recompute[0]
        return (weights * jnp.arange(192.0)).sum()

    slope, step, run = jax.jit(jax.grad(loss))(1e-3), 1e-5, jax.jit(loss)
    expected = (float(run(1e-3 + step)) - float(run(1e-3 - step))) / (2 * step)
    assert np.isfinite(slope) and float(slope) == pytest.approx(expected, rel=0.05)
