"""Attention with weighted keys: the definition of a restricted context for soft selections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import pallas
from jfuse.pallas.soft_attention import ROW_BLOCK
from jfuse.types import PAD_POSITION
from tests.reference import attention, restricted_mask, scores

pytestmark = pytest.mark.usefixtures("strict")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
soft_attention = jax.jit(pallas.soft_attention)


def draw(keys, heads=4, kv_heads=2, size=8, seed=0):
    rng = np.random.default_rng([keys, seed])
    shapes = (keys, heads, size), (keys, kv_heads, size), (keys, kv_heads, size)
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


def weighted(q, k, v, weights, window):
    """Softmax over exp(score) times weight, rows one by one in float64; itself and the window weigh 1."""
    out, every = np.zeros((len(q), q.shape[1], v.shape[-1])), np.exp(scores(q.astype(float), k))
    values = np.repeat(v, q.shape[1] // v.shape[1], 1)
    for row in range(len(q)):
        share = np.where(row - np.arange(row + 1) <= window, 1.0, weights[: row + 1])
        masses = every[:, row, : row + 1] * share
        out[row] = np.einsum("ns,snh->nh", masses / masses.sum(-1, keepdims=True), values[: row + 1])
    return out


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("keys", [1, 9, ROW_BLOCK + 5])
def test_weights_multiply_inside_the_softmax(keys, window):
    """Weights between 0 and 1, and rows that are not a multiple of the block."""
    q, k, v = draw(keys)
    weights = np.random.default_rng(0).random(keys).astype(np.float32)
    actual = soft_attention(q, k, v, np.arange(keys, dtype=np.int32), weights=weights, window=window)
    np.testing.assert_allclose(actual, weighted(q, k, v, weights, window), **CLOSE)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_zero_is_absence_and_one_is_ordinary(share):
    """At 0 and 1 it is the hard restricted context; keys of weight 0 that score far above the rest change nothing."""
    keys = ROW_BLOCK + 5
    q, k, v = draw(keys)
    visible = np.random.default_rng(1).random(keys) < share
    k[~visible] *= 40
    mask = restricted_mask(np.arange(keys), np.zeros(keys), visible, 2)
    actual = soft_attention(q, k, v, np.arange(keys, dtype=np.int32), weights=visible.astype(np.float32), window=2)
    np.testing.assert_allclose(actual, attention(q, k.astype(float), v, mask), rtol=1e-4, atol=1e-5)


def test_padding_reaches_nobody_and_is_finite():
    """Pitfall 32: keys at PAD_POSITION, whatever they hold."""
    q, k, v = draw(ROW_BLOCK + 5)
    at = np.r_[np.arange(ROW_BLOCK - 4), np.full(9, PAD_POSITION)].astype(np.int32)
    weights = np.ones(ROW_BLOCK + 5, np.float32)
    k[-9:], v[-9:] = 50, 50
    out = soft_attention(q, k, v, at, weights=weights, window=0)
    np.testing.assert_allclose(out[:-9], weighted(q[:-9], k[:-9], v[:-9], weights, 0), **CLOSE)
    assert np.isfinite(out).all()


def test_gradient_against_finite_differences():
    """With respect to weights, at 0 and 1 too (one-sided there), queries, keys and values."""
    q, k, v = draw(10, size=4)
    weights = np.r_[0.0, 1.0, 0.0, 1.0, np.random.default_rng(2).random(6)].astype(np.float32)
    mix = np.random.default_rng(3).standard_normal((10, 4, 4))
    at = np.arange(10, dtype=np.int32)

    def loss(q, k, v, weights):
        return (soft_attention(q, k, v, at, weights=weights) * jnp.asarray(mix, jnp.float32)).sum()

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    gradients = slopes(q, k, v, weights)

    def exact(*inputs):
        return (weighted(*inputs, 0) * mix).sum()

    inputs, step = [a.astype(float) for a in (q, k, v, weights)], 1e-6
    for which, gradient in enumerate(gradients):
        for place in np.random.default_rng(which).choice(inputs[which].size, min(8, inputs[which].size), replace=False):
            up, down = ([a.copy() for a in inputs] for _ in range(2))
            up[which].flat[place] += step
            down[which].flat[place] -= step
            expected = (exact(*up) - exact(*down)) / (2 * step)
            np.testing.assert_allclose(np.asarray(gradient).flat[place], expected, rtol=1e-3, atol=1e-4)
    k[2] = 100 * q[5, :2]  # a key of weight 0 that scores far above the rest
    assert all(np.isfinite(gradient).all() for gradient in slopes(q, k, v, weights))


def test_neither_pass_keeps_rows_by_keys():
    """Pitfall 57: forward and backward temporaries stay below a share of one score matrix."""
    keys, heads = 16 * ROW_BLOCK, 8
    q, k, v = draw(keys, heads, 1, 8)
    at, weights = np.arange(keys, dtype=np.int32), np.full(keys, 0.5, np.float32)

    def loss(q, k, v, weights):
        return soft_attention(q, k, v, at, weights=weights).sum()

    matrix = 4 * heads * keys * keys
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    assert both.lower(q, k, v, weights).compile().memory_analysis().temp_size_in_bytes < matrix / 2
