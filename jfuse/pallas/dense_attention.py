"""Attention of gathered rows with static trip counts: where `selective_attention` takes its gradient from.

It visits the rows in checkpointed blocks and all keys at once, so that reverse differentiation keeps no scores.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jfuse.types import PAD_POSITION

NEGATIVE = -1e30  # finite, so that a fully masked row gives zeros and not NaN
ROW_BLOCK = 64


def dense_attention(
    q: Float[Array, "R N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    row_positions: Int[Array, " R"],
    key_positions: Int[Array, " S"],
    visible: Bool[Array, " S"] | None,
    window: Int[Array, ""],
) -> tuple[Float[Array, "R N H"], Float[Array, "R N"]]:
    """Attention output and log-sum-exp, as `partial_attention` gives them."""
    rows, heads, size = q.shape
    block = min(ROW_BLOCK, rows)
    padding = -rows % block
    grouped = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(-1, block, k.shape[1], heads // k.shape[1], size)
    at = jnp.pad(row_positions, (0, padding), constant_values=PAD_POSITION).reshape(-1, block)

    @jax.checkpoint
    def attend(part):
        q, row = part
        row = row[:, None]
        keep = (key_positions[None] <= row) & (row < PAD_POSITION)
        if visible is not None:
            keep &= visible[None] | (row - key_positions[None] <= window)
        scores = jnp.einsum("RKGH,SKH->KGRS", q, k, preferred_element_type=jnp.float32) / math.sqrt(size)
        scores = jnp.where(keep[None, None], scores, NEGATIVE)
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        shares = jnp.where(keep[None, None], jnp.exp(scores - top), 0.0)
        total = shares.sum(-1, keepdims=True)
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        out = jnp.einsum("KGRS,SKH->RKGH", (shares / total).astype(v.dtype), v, preferred_element_type=jnp.float32)
        return out, jnp.where(empty, NEGATIVE, top + jnp.log(total))[..., 0]

    out, lse = jax.lax.map(attend, (grouped, at))  # [block, R, K, G, H], [block, K, G, R]
    out = out.reshape(-1, heads, size)[:rows].astype(v.dtype)
    return out, jnp.moveaxis(lse, -1, 1).reshape(-1, heads)[:rows]
