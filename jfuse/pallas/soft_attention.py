"""Attention with a weight per key inside the softmax: dense, reverse-differentiable, blocked so that it stays small.

The definition of the restricted context for soft selections: a key of weight w takes part as if it stood there w
times, so weight 0 is absence and weight 1 is ordinary attention.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jfuse.types import AnyArray

ROW_BLOCK = 64


def soft_attention(
    q: Float[Array, "S N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    positions: Int[AnyArray, " S"],
    *,
    weights: Float[Array, " S"],
    window: Int[AnyArray, ""] | int = 0,
) -> Float[Array, "S N H"]:
    """Causal attention of all positions, exp(score - max) multiplied by the key's weight (finite gradient at 0).

    A row sees itself and the `window` positions before it in full. Rows are visited in checkpointed blocks, so
    neither pass keeps anything of size rows x keys.
    """
    rows, heads, size = q.shape
    block = min(ROW_BLOCK, rows)
    padding = -rows % block
    positions = jnp.asarray(positions, jnp.int32)
    grouped = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(-1, block, k.shape[1], heads // k.shape[1], size)
    at = jnp.pad(positions, (0, padding)).reshape(-1, block)

    @jax.checkpoint
    def attend(block):
        q, row = block
        scores = jnp.einsum("RKGH,SKH->KGRS", q, k, preferred_element_type=jnp.float32) / math.sqrt(size)
        row = row[:, None]
        near = row - positions[None, :] <= window  # a window of 0 still holds the row itself
        weight = jnp.where(positions[None, :] <= row, jnp.where(near, 1.0, weights[None, :]), 0.0)
        top = jax.lax.stop_gradient(jnp.where(weight > 0, scores, -jnp.inf).max(-1, keepdims=True))
        # Keys of weight 0 may score above the maximum; clipped, they stay finite and still weigh nothing.
        shares = jnp.exp(jnp.minimum(scores - top, 80.0)) * weight[None, None]
        total = shares.sum(-1)
        out = jnp.einsum("KGRS,SKH->RKGH", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return out / jnp.moveaxis(total, -1, 0)[..., None]

    out = jax.lax.map(attend, (grouped, at))
    return out.reshape(-1, heads, size)[:rows].astype(v.dtype)
