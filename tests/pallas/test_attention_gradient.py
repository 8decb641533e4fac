"""The gradient of selective attention against that of a plain softmax over a whole mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.pallas.attention_gradient import KEY_BLOCK, ROW_BLOCK
from jfuse.pallas.choice import INTERPRETED, pretended
from jfuse.pallas.selective_attention import attend, partial_attention, selective_attention
from jfuse.types import PAD_POSITION, LayerKV

pytestmark = pytest.mark.usefixtures("strict")
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def draw(rows, keys, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, 4, 8), (keys, 2, 8), (keys, 2, 8))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def plain(q, k, v, mask):
    """Softmax over explicit scores; rows that see nothing give zeros."""
    k, v = jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)
    scores = jnp.where(mask[None], jnp.einsum("rnh,snh->nrs", q, k) / jnp.sqrt(8.0), -1e30)
    weights = jax.nn.softmax(scores, -1) * mask.any(-1).astype(jnp.float32)[None, :, None]
    return jnp.einsum("nrs,snh->rnh", weights, v), jax.nn.logsumexp(scores, -1).T


@pytest.mark.parametrize(("rows", "keys", "restricted"), [(1, 3, False), (64, 256, False), (70, 300, True)])
def test_gradient_equals_the_plain_one(rows, keys, restricted):
    """q, k and v, output and log-sum-exp, with rows in gaps, padding on both sides, a visible set and a window."""
    q, k, v = draw(rows, keys)
    rng = np.random.default_rng(1)
    at = np.sort(rng.choice(keys, rows, replace=False)).astype(np.int32) if rows > 1 else np.array([1], np.int32)
    key_at = np.arange(keys, dtype=np.int32)
    if rows > 1:
        at[-3:], key_at[-20:] = PAD_POSITION, PAD_POSITION
    visible, window = (rng.random(keys) < 0.3, 4) if restricted else (None, 0)
    mask = (key_at[None] <= at[:, None]) & (at < PAD_POSITION)[:, None]
    if restricted:
        mask &= visible[None] | (at[:, None] - key_at[None] <= window)
    seen = jnp.asarray(mask.any(-1))[:, None]

    def loss(function):
        def total(q, k, v):
            out, lse = function(q, k, v)
            return (jnp.sin(out) * jnp.arange(8.0)[None, None]).sum() + jnp.where(seen, jnp.cos(lse), 0.0).sum()

        return total

    ours = lambda q, k, v: partial_attention(q, k, v, at, key_positions=key_at, visible=visible, window=window)  # noqa: E731
    theirs = lambda q, k, v: plain(q, k, v, jnp.asarray(mask))  # noqa: E731
    (value, gradients), (plain_value, plain_gradients) = (
        jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1, 2)))(q, k, v) for f in (ours, theirs)
    )
    np.testing.assert_allclose(value, plain_value, rtol=1e-4)
    for a, b in zip(gradients, plain_gradients, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, **CLOSE)


def test_gradient_through_two_caches_and_a_batch():
    """Merging partial results and mapping over a batch keep the gradient."""
    q, k, v = draw(5, 40)
    at = np.arange(35, 40, dtype=np.int32)
    mask = jnp.asarray(np.arange(40)[None] <= at[:, None])

    def split(q, k, v):
        parts = [(LayerKV(k[:30], v[:30]), np.arange(30)), (LayerKV(k[30:], v[30:]), np.arange(30, 40))]
        return jnp.sin(attend(q, at, parts)).sum()

    dense = lambda q, k, v: jnp.sin(plain(q, k, v, mask)[0]).sum()  # noqa: E731
    ours, theirs = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (split, dense))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    one = jax.grad(lambda q: jnp.sin(selective_attention(q, k, v, at)).sum())
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(jnp.stack([q + 1.0, q]))[1], theirs[0], **CLOSE)


def test_gradient_against_finite_differences():
    """The derivative along random directions of q, k and v, by central differences of the op itself in float32."""
    q, k, v = draw(6, 20)
    at = np.arange(14, 20, dtype=np.int32)

    def total(q, k, v):
        out, lse = partial_attention(q, k, v, at, visible=np.arange(20) % 3 == 0, window=2)
        return (jnp.sin(out) * jnp.arange(8.0)[None, None]).sum() + jnp.cos(lse).sum()

    slopes, value = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v), jax.jit(total)
    for which, slope in enumerate(slopes):
        way = np.random.default_rng(which).standard_normal(slope.shape).astype(np.float32)
        up, down = ([a + sign * 1e-2 * way if i == which else a for i, a in enumerate((q, k, v))] for sign in (1, -1))
        expected = (float(value(*up)) - float(value(*down))) / 2e-2
        np.testing.assert_allclose((np.asarray(slope) * way).sum(), expected, rtol=5e-3, atol=5e-3)


def test_gradient_of_a_kernel_equals_that_of_the_definition():
    """Pallas forward, the same backward: the kernel's own output and log-sum-exp enter it."""
    q, k, v = draw(6, 20)
    at = np.arange(14, 20, dtype=np.int32)
    slopes = jax.jit(jax.grad(lambda q, k, v: jnp.sin(selective_attention(q, k, v, at)).sum(), argnums=(0, 1, 2)))
    expected = slopes(q, k, v)
    with pretended(INTERPRETED):
        actual = slopes(q, k, v)
    for a, b in zip(actual, expected, strict=True):
        assert np.any(np.asarray(a) != 0)
        np.testing.assert_allclose(a, b, **CLOSE)


def test_neither_pass_keeps_rows_by_keys():
    """Pitfall 57: temporaries of forward and backward stay below a share of one score matrix."""
    rows, keys, heads = 16 * ROW_BLOCK, 8 * KEY_BLOCK, 8
    shape = lambda n, heads: jax.ShapeDtypeStruct((n, heads, 8), jnp.float32)  # noqa: E731
    loss = lambda q, k, v: selective_attention(q, k, v, np.arange(rows, dtype=np.int32)).sum()  # noqa: E731
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    compiled = both.lower(shape(rows, heads), shape(keys, 1), shape(keys, 1)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * heads * rows * keys / 8
