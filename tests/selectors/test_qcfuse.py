"""QCFuse and its combinations with RelaxKV: anchors, critical layers, selection."""

import dataclasses

import jax
import numpy as np
import pytest

from jfuse import selectors
from jfuse.config import View
from jfuse.probe import probe
from jfuse.selectors.score import query_attention
from tests.selectors import plain

SCORE = {"rtol": 2e-4, "atol": 2e-6}


def anchors_seen(request, ratio):
    """Per layer, the cached positions that the anchor probe sees."""
    return [{int(p) for p in row if p < request.end} for row in np.asarray(request.anchors(ratio).positions)]


def plain_score(request, layers, seen, **settings):
    q, own = plain.query_states(request, seen)
    keys, _ = plain.cached(request)
    scores = [plain.head_mass(request, q[l], own[l], keys[l], **settings).mean((0, 1)) for l in layers]
    return np.stack(scores)[:, request.num_prefix :]


def test_score_and_selection(request_, evidence, score, choose):
    """Anchors as the view, question rows, full softmax set, means; the sum over L* decides; floor, at least one."""
    selector = selectors.qcfuse((2, 1))
    assert selector.view == View("anchors", (2, 1), 0.1)
    actual = plain.on_context(request_, score(selector, evidence(request_, selector, scoring=slice(1, 9))))
    expected = plain_score(request_, (2, 1), anchors_seen(request_, 0.1), rows=range(1, 9))
    np.testing.assert_allclose(actual, expected, **SCORE)
    for ratio, k in ((0.0, 0), (0.01, 1), (0.3, 20), (1.0, 69)):
        selection = choose(request_, selector, ratio, scoring=slice(1, 9))
        for row in selection.recompute:
            assert plain.picked(request_, row) == plain.best(expected.sum(0), k)


def test_anchors_differ_by_layer_and_stand_at_request_positions(request_):
    """Pitfalls 20-22: per-layer sets of one size, prefix in full, positions those of the request."""
    seen = anchors_seen(request_, 0.1)
    starts = request_.num_prefix + np.cumsum([0, 21, 1, 34])
    for row in seen:
        assert set(range(request_.num_prefix)) <= row
        counts = [len({p for p in row if a <= p < b}) for a, b in zip(starts, [*starts[1:], request_.end], strict=True)]
        assert counts == [3, 1, 4, 2]  # ceil of a tenth of 21, 1, 34, 13
    more = anchors_seen(request_, 0.4)
    assert len({frozenset(row) for row in more}) > 1


def test_the_query_stands_after_the_whole_context(request_, evidence, score):
    """Pitfall 20: not after the compacted anchors; moving it there changes the score."""
    selector = selectors.qcfuse((1, 3))
    seen = evidence(request_, selector)
    assert seen.query_positions[: len(request_.query)].tolist() == list(range(request_.end, request_.end + 11))
    earlier = request_._replace(
        context=request_.context._replace(
            segments=np.where(np.arange(len(request_.context.segments)) < 40, request_.context.segments, -1)
        )
    )
    moved = score(selector, evidence(earlier, selector))
    assert not np.allclose(moved[:, 9:40], score(selector, seen)[:, 9:40], rtol=1e-2)


def test_ratio_one_and_all_layers_is_prophetkv(request_, evidence, score, choose):
    """Equality between methods: anchors that are the whole context, and every layer, with the same switches."""
    every = selectors.qcfuse((0, 1, 2, 3), anchor_ratio=1.0)
    whole = selectors.prophetkv("qcfuse")
    a, b = (score(s, evidence(request_, s)) for s in (every, whole))
    np.testing.assert_allclose(plain.on_context(request_, a), plain.on_context(request_, b), rtol=1e-4, atol=1e-7)
    for ratio in (0.1, 0.5):
        a, b = (choose(request_, s, ratio).recompute for s in (every, whole))
        np.testing.assert_array_equal(a, b)


def test_deeper_weights_do_not_matter(request_, evidence, score):
    """Pitfall 27: neither layers past the deepest critical one nor that layer's own attention output and MLP."""
    selector = selectors.qcfuse((1, 2))
    first = score(selector, evidence(request_, selector))
    blocks = request_.model.params["blocks"]
    deeper = jax.tree.map(lambda leaf: leaf.at[3].set(7.0), blocks)
    deeper |= {name: jax.tree.map(lambda leaf: leaf.at[2].set(7.0), deeper[name]) for name in ("o", "gate_up", "down")}
    changed = request_._replace(model=request_.model.replace(params={**request_.model.params, "blocks": deeper}))
    np.testing.assert_array_equal(first, score(selector, evidence(changed, selector)))
    shallower = blocks | {"down": jax.tree.map(lambda leaf: leaf.at[1].set(0.5), blocks["down"])}
    changed = request_._replace(model=request_.model.replace(params={**request_.model.params, "blocks": shallower}))
    assert not np.allclose(first, score(selector, evidence(changed, selector)))


def test_layers_are_checked(request_, evidence, score):
    """Pitfall 34, S-07: 0-based, within the model, none twice, at least one."""
    with pytest.raises(ValueError, match="at least one critical layer"):
        selectors.qcfuse(())
    for layers, message in (((4,), "layers 0..3"), ((-5,), "down to -4"), ((1, 1), "twice"), ((3, -1), "twice")):
        with pytest.raises(ValueError, match=message):
            evidence(request_, selectors.qcfuse(layers))
    assert selectors.qcfuse((-1,)).view.layer_indices(4) == (3,)


def test_order_of_layers_and_equal_arguments(request_, choose):
    """The order of critical layers changes nothing; equal arguments give the same static object."""
    a, b = (choose(request_, selectors.qcfuse(layers), 0.2).recompute for layers in ((1, 3), (3, 1)))
    np.testing.assert_array_equal(a, b)
    assert selectors.qcfuse((1, 3)) is selectors.qcfuse((1, 3))


def test_demo_scores_one_layer(request_, evidence, score):
    """QCFuse demo: one critical layer, with anchors or with the question alone."""
    for tokens, seen in (("anchors", anchors_seen(request_, 0.1)), ("query", [set()] * 4)):
        selector = selectors.qcfuse_demo(2, tokens=tokens)
        actual = plain.on_context(request_, score(selector, evidence(request_, selector)))
        np.testing.assert_allclose(actual, plain_score(request_, (2,), seen), **SCORE)
    assert selectors.qcfuse_demo(2).ratio == 0.3


@pytest.mark.parametrize("layers", [(1, 2), (3, 0), (2,)])
def test_combination_takes_the_nearest_critical_layer(request_, choose, layers):
    """Ours: RelaxKV's targets and context from critical layers only; S_l of the nearest one, the shallower of two."""
    selector = selectors.qcfuse_relaxkv(layers, window=3)
    scores = dict(zip(layers, plain_score(request_, layers, anchors_seen(request_, 0.1)), strict=True))
    sets = [plain.best(scores[plain.nearest(layers, l)], 10) for l in range(4)]
    selection = choose(request_, selector, 0.15)
    for row, expected in zip(selection.recompute, plain.staircase(sets), strict=True):
        assert plain.picked(request_, row) == expected
    assert plain.picked(request_, selection.visible[0]) == set().union(*sets)
    assert int(selection.window) == 3
    free = choose(request_, selectors.qcfuse_layerwise(layers), 0.15)
    np.testing.assert_array_equal(free.recompute, selection.recompute)
    assert np.asarray(free.visible).all() and int(free.window) == 0


def test_view_is_frozen():
    """A selector is a value: its view cannot be changed in place."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        selectors.qcfuse((1,)).view.tokens = "context"


def test_evidence_outside_the_view_does_not_matter(request_, evidence, score):
    """Poisoned layers outside the view, and poisoned values, change nothing."""
    selector = selectors.qcfuse((1, 2))
    first = score(selector, evidence(request_, selector))
    poison = jax.tree.map(lambda a: a * np.nan, request_.context.kv[0])
    kv = {1: request_.context.kv[1]._replace(v=poison.v), 2: request_.context.kv[2]._replace(v=poison.v)}
    poisoned = request_._replace(context=request_.context._replace(kv=kv))
    anchors = request_.anchors(0.1)
    seen = probe(poisoned.model, poisoned.query, anchors, poisoned.context, selector.view)
    np.testing.assert_array_equal(first, score(selector, seen))
    assert query_attention() is query_attention()
