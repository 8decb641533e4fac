"""Encoding a passage: its cache alone from position 0, and anchor scores that depend on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.anchors import NUM_SINKS, AnchorRule, default_rule, kvzip
from jfuse.chunks import encode_chunk
from tests import tiny
from tests.reference import Reference

pytestmark = pytest.mark.usefixtures("strict")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def model():
    return tiny.build_model()


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model.config, model.params)


def ids(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, 128, length).astype(np.int32)


@pytest.mark.parametrize("length", [1, 3, 21, 128, 129])
def test_cache_equals_a_pass_over_the_chunk_alone(model, reference, length):
    """T-06, ID-5: un-rotated keys after bias and norm, values, from position 0; no padding in what is kept."""
    chunk, expected = encode_chunk(model, ids(length)), reference.run(ids(length))
    assert len(chunk.kv) == model.config.num_layers and chunk.anchor_score.shape == (4, length)
    for l, layer in enumerate(chunk.kv):
        assert layer.k.shape == layer.v.shape == (length, 2, 16)
        np.testing.assert_allclose(layer.k, expected.k_raw[l], **CLOSE)
        np.testing.assert_allclose(layer.v, expected.v[l], **CLOSE)


@pytest.mark.parametrize("length", [5, 21, 129])
def test_anchor_scores_are_kvzips(model, reference, length):
    """QCFuse eq. 14, pitfall 38: instruction rows over chunk and instruction; first tokens forced to the top."""
    chunk = encode_chunk(model, ids(length))
    expected = reference.anchor_scores(ids(length), default_rule(model).instruction)
    np.testing.assert_allclose(chunk.anchor_score[:, NUM_SINKS:], expected[:, NUM_SINKS:], rtol=1e-4, atol=1e-7)
    assert (chunk.anchor_score[:, :NUM_SINKS] > 1e30).all()


def test_the_instruction_leaves_no_trace_in_the_cache(model):
    """What follows the chunk changes its scores and none of its entries; a rule needs neither instruction nor sinks."""

    def norm(states):
        return jnp.linalg.norm(states.k.astype(jnp.float32), axis=(1, 2))

    plain = encode_chunk(model, ids(21), anchor_rule=AnchorRule("norm", norm, num_sinks=0))
    expected = [np.linalg.norm(layer.k, axis=(1, 2)) for layer in plain.kv]  # a rotation keeps the norm
    np.testing.assert_allclose(plain.anchor_score, expected, rtol=1e-5)
    for ours, theirs in zip(plain.kv, encode_chunk(model, ids(21)).kv, strict=True):
        np.testing.assert_allclose(ours.k, theirs.k, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(ours.v, theirs.v, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_another_instruction_gives_other_scores(model, reference):
    chunk = encode_chunk(model, ids(21), anchor_rule=kvzip((9, 5, 7)))
    expected = reference.anchor_scores(ids(21), [9, 5, 7])
    np.testing.assert_allclose(chunk.anchor_score[:, NUM_SINKS:], expected[:, NUM_SINKS:], rtol=1e-4, atol=1e-7)
    assert np.abs(chunk.anchor_score - encode_chunk(model, ids(21)).anchor_score)[:, NUM_SINKS:].max() > 1e-3


def test_a_chunk_does_not_depend_on_others(model):
    """T-07, pitfall 13: encoded first, after others or again, it has the same bits."""
    first = encode_chunk(model, ids(21))
    encode_chunk(model, ids(40))
    again = encode_chunk(model, ids(21))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_low_precision_weights_give_low_precision_caches(model):
    low = model.replace(params=jax.tree.map(lambda a: a.astype(jnp.bfloat16), model.params))
    chunk = encode_chunk(low, ids(21))
    assert chunk.kv[0].k.dtype == chunk.kv[0].v.dtype == jnp.bfloat16 and chunk.anchor_score.dtype == np.float32


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "chunk.*at least one token"),
        ([3, 128], r"128.*0\.\.127"),
        ([-1], r"-1.*0\.\.127"),
    ],
)
def test_bad_ids_are_refused_before_anything_runs(model, tokens, message):
    with pytest.raises((ValueError, TypeError), match=message):
        encode_chunk(model, np.asarray(tokens) if tokens else np.zeros(0, np.int32))


def test_a_chunk_beyond_the_models_positions_is_refused(model):
    """R-09: with both numbers."""
    with pytest.raises(ValueError, match="4097.*4096"):
        encode_chunk(model, ids(4095))
