"""Anchor rules against plain NumPy: sink, key norms, H2O, KVzip with and without teacher forcing, shared sets."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import anchors
from jfuse.anchors import LayerStates, anchor_offsets
from jfuse.chunks import encode_chunk
from jfuse.fingerprint import Fingerprint
from jfuse.types import PAD_POSITION
from tests import tiny
from tests.reference import Reference, scores, softmax

pytestmark = pytest.mark.usefixtures("strict")
IDS = np.random.default_rng(4).integers(0, 128, 21).astype(np.int32)
ASK = (5, 6, 7)


@pytest.fixture(scope="module")
def model():
    return tiny.build_model()


def alone(model, ids):
    """Queries, keys and attention [L, N, T, T] of one causal pass."""
    run = Reference(model.config, model.params).run(ids)
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    return run, np.stack([softmax(scores(q, k), causal) for q, k in zip(run.q, run.k, strict=True)])


def encoded(model, rule, ids=IDS):
    return np.asarray(encode_chunk(model, ids, anchor_rule=rule).anchor_score, np.float64)


def test_sink(model):
    """The first ceil(ratio * C) tokens, in every layer."""
    np.testing.assert_array_equal(anchor_offsets(encoded(model, anchors.sink()), 0.24), np.tile(np.arange(6), (4, 1)))


@pytest.mark.parametrize("keep", ["small", "large"])
def test_key_norm(model, keep):
    """Pitfall 39: small norms are kept by default, large ones by flag; un-rotated norms serve, no token is forced."""
    run, _ = alone(model, IDS)
    norms = np.linalg.norm(run.k_raw, axis=-1).mean(-1)
    score = encoded(model, anchors.knorm(keep))
    np.testing.assert_allclose(score, -norms if keep == "small" else norms, rtol=1e-4)
    kept = anchor_offsets(score, 0.2)
    order = np.argsort(norms if keep == "small" else -norms, axis=1)[:, :5]
    np.testing.assert_array_equal(kept, np.sort(order, axis=1))


def test_norms_to_keep_are_small_or_large():
    with pytest.raises(ValueError, match="keep is 'big'; use one of 'small', 'large'"):
        inspect.unwrap(anchors.knorm)("big")  # without the type hook of the tests, which would refuse first


def test_h2o(model):
    """Column sums of the chunk's own attention, each divided by the number of rows that can see the column."""
    _, attention = alone(model, IDS)
    expected = attention.mean(1).sum(1) / (len(IDS) - np.arange(len(IDS)))
    np.testing.assert_allclose(encoded(model, anchors.h2o()), expected, rtol=1e-4)


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("length", [21, 128, 130])
def test_kvzip(model, repeat, length):
    """Pitfall 38: probe rows follow the chunk; with teacher forcing each of its tokens is one of them, once."""
    ids = np.random.default_rng(length).integers(0, 128, length).astype(np.int32)
    probe = [*ASK, *(ids.tolist() if repeat else [])]
    _, attention = alone(model, np.r_[ids, probe])
    expected = attention[:, :, length:, :length].max((1, 2))
    score = encoded(model, anchors.kvzip(ASK, repeat=repeat), ids)
    np.testing.assert_allclose(score[:, 4:], expected[:, 4:], rtol=2e-4, atol=1e-7)
    assert (score[:, :4] > 1e30).all()


def test_probes_leave_the_cache_alone(model):
    """Whatever follows the chunk, its entries stay; they do not depend on the rule."""
    rules = (anchors.kvzip(ASK, repeat=True), anchors.kvzip(ASK), anchors.sink(), anchors.shared(anchors.h2o()))
    first, *others = (encode_chunk(model, IDS, anchor_rule=rule).kv for rule in rules)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            np.testing.assert_allclose(ours.k, theirs.k, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(ours.v, theirs.v, rtol=1e-6, atol=1e-6)


def test_a_repetition_that_finds_its_tokens_scores_one():
    """Pitfall 38: rows that copy score their source near 1, padding neither scores nor is scored."""
    n, size, width = 5, 8, 16
    eye = 30.0 * jnp.eye(width)[:n]
    empty = jnp.zeros((size - n, width))
    q = jnp.concatenate([jnp.zeros((size + 2, width)), eye, empty])[:, None]
    k = jnp.concatenate([eye[: n - 1], jnp.zeros((size + 2 - (n - 1), width)), jnp.zeros((size, width))])[:, None]
    inside = jnp.arange(size) < n
    positions = jnp.concatenate(
        [
            jnp.where(inside, jnp.arange(size), PAD_POSITION),
            n + jnp.arange(2),
            jnp.where(inside, n + 2 + jnp.arange(size), PAD_POSITION),
        ]
    )
    probe = (jnp.arange(2 * size + 2) >= size) & (positions < PAD_POSITION)
    score = anchors.kvzip_score(LayerStates(q, k, positions.astype(jnp.int32), probe))[:n]
    assert (np.asarray(score)[: n - 1] > 0.99).all()  # found by their own row
    assert score[n - 1] < 0.5  # its key matches nothing


def test_one_set_for_all_layers(model):
    """QCFuse eq. 14: the mean of the layers' scores, then the forced tokens; the same offsets everywhere."""
    own, one = encoded(model, anchors.kvzip(ASK)), encoded(model, anchors.shared(anchors.kvzip(ASK)))
    np.testing.assert_allclose(one[:, 4:], np.tile(own[:, 4:].mean(0), (4, 1)), rtol=1e-5)
    assert len({tuple(row) for row in anchor_offsets(own, 0.4).tolist()}) > 1
    assert len({tuple(row) for row in anchor_offsets(one, 0.4).tolist()}) == 1


def test_rules_by_name_belong_to_different_caches(model):
    """Every rule has its own fingerprint, is made once, and is found by its name."""
    names = [n + s for n in ("sink", "knorm", "knorm_large", "h2o", "kvzip", "kvzip_repeat") for s in ("", "_shared")]
    rules = [anchors.by_name(name, model) for name in names]
    assert [rule.name for rule in rules] == names
    assert all(anchors.by_name(name, model) is rule for name, rule in zip(names, rules, strict=True))
    named = model.replace(weights_id="w")
    assert len({Fingerprint.of(named, anchor_rule=rule).digest for rule in rules}) == len(names)
    for wrong in ("h20", "sink_shared_shared", ""):
        with pytest.raises(ValueError, match="no anchor rule"):
            anchors.by_name(wrong, model)


def test_teacher_forcing_needs_room(model):
    """A chunk that fits alone may not fit twice."""
    ids = np.ones(2100, np.int32)
    with pytest.raises(ValueError, match="4203 positions"):
        encode_chunk(model, ids, anchor_rule=anchors.kvzip(ASK, repeat=True))
