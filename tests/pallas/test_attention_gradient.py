"""The gradient of selective attention against that of a plain softmax over a whole mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize(("rows", "keys"), [(1, 3), (70, 300), (64, 256)])
@pytest.mark.parametrize("restricted", [False, True])
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
    np.testing.assert_allclose(loss(ours)(q, k, v), loss(theirs)(q, k, v), rtol=1e-4)
    gradients = (jax.jit(jax.grad(loss(f), argnums=(0, 1, 2)))(q, k, v) for f in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
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

    ours = jax.grad(split, argnums=(0, 1, 2))(q, k, v)
    theirs = jax.grad(lambda q, k, v: jnp.sin(plain(q, k, v, mask)[0]).sum(), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)
    batch = jax.vmap(jax.grad(lambda q: selective_attention(q, k, v, at).sum()))(jnp.stack([q, q + 1.0]))
    np.testing.assert_allclose(batch[0], jax.grad(lambda q: selective_attention(q, k, v, at).sum())(q), **CLOSE)
