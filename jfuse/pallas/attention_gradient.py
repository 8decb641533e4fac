"""The gradient of `selective_attention`: one pass over the visited blocks, whichever implementation ran forward.

In come the op's arguments, what it gave, and the cotangents of both; out come those of queries, keys and values. The
weights of a block are computed again from the log-sum-exp (Dao 2023, FlashAttention-2, algorithm 2), so that nothing
of size rows x keys is kept in between.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jfuse.pallas.key_blocks import END, NEAR, NEAR_END, Visit, visit

ROW_BLOCK = 64
KEY_BLOCK = 256


def attention_gradient(
    arguments: tuple[Any, ...],
    results: tuple[Float[Array, "R N H"], Float[Array, "R N"]],
    cotangents: tuple[Float[Array, "R N H"], Float[Array, "R N"]],
) -> tuple[Float[Array, "R N H"], Float[Array, "S K H"], Float[Array, "S K H"]]:
    """Cotangents of q, k and v; products are summed in float32.

    Args:
        arguments: q, k, v, row positions, key positions, visible set or None, window, as `partial_attention` has them.
        results: output and log-sum-exp.
    """
    q, k, v, row_positions, key_positions, visible, window = arguments
    row_block, key_block = min(ROW_BLOCK, q.shape[0]), min(KEY_BLOCK, k.shape[0])
    plan = visit(k, v, row_positions, key_positions, visible, window, row_block=row_block, key_block=key_block)
    (out, lse), (d_out, d_lse) = results, cotangents
    # d score = weight x (d weight - shift): the softmax's own mean, less what arrives through the log-sum-exp.
    shift = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1) - d_lse
    rows = tuple(_row_blocks(a, k.shape[1], row_block) for a in (q, d_out, lse, shift))
    # Blocks of keys are written in place: the last may not reach past the end.
    padding = ((0, plan.bounds.shape[1] - k.shape[0]), (0, 0), (0, 0))
    keys = tuple(jnp.pad(a, padding).transpose(1, 0, 2) for a in (plan.k, plan.v))

    def step(totals, block):
        ranges, position, *parts = block
        d_q, totals = _visit_keys(keys, totals, plan, ranges, position, parts, key_block)
        return totals, d_q

    zero = jnp.zeros(keys[0].shape, jnp.float32)
    positions = plan.row_positions.reshape(-1, row_block)
    (d_k, d_v), d_q = jax.lax.scan(step, (zero, zero), (plan.ranges, positions, *rows))
    d_q = d_q.transpose(0, 2, 1, 3, 4).reshape(-1, *q.shape[1:])[: q.shape[0]].astype(q.dtype)
    return d_q, _put_back(d_k, plan, k), _put_back(d_v, plan, v)


def _visit_keys(keys, totals, plan: Visit, ranges, position, parts, key_block):
    """One block of rows: its d q [K, R, G, H], and what it adds to d k and d v."""
    q, d_out, lse, shift = parts
    scale = 1 / math.sqrt(q.shape[-1])
    end, near = ranges[END], ranges[NEAR]

    def step(i, carry):
        d_q, d_k, d_v = carry
        at = jnp.where(i < end, i, near + i - end) * key_block
        k, v = (jax.lax.dynamic_slice_in_dim(a, at, key_block, axis=1) for a in keys)
        first, last = jax.lax.dynamic_slice_in_dim(plan.bounds, at, key_block, axis=1)[:, None, None, :]
        seen = ((first <= position[:, None, None]) & (position[:, None, None] <= last))[None]
        scores = _product("krgh,ksh->krgs", q, k) * scale
        weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0)
        slope = (weights * (_product("krgh,ksh->krgs", d_out, v) - shift[..., None]) * scale).astype(k.dtype)
        d_q += _product("krgs,ksh->krgh", slope, k)
        d_k = _add(d_k, at, _product("krgs,krgh->ksh", slope, q))
        d_v = _add(d_v, at, _product("krgs,krgh->ksh", weights.astype(v.dtype), d_out))
        return d_q, d_k, d_v

    steps = end + ranges[NEAR_END] - near
    d_q, *totals = jax.lax.fori_loop(0, steps, step, (jnp.zeros(q.shape, jnp.float32), *totals))
    return d_q, tuple(totals)


def _product(equation: str, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _add(total, at, part):
    old = jax.lax.dynamic_slice_in_dim(total, at, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, at, axis=1)


def _row_blocks(a, kv_heads: int, row_block: int):
    """Blocks [b, K, R, G, ...] of an array [R, N, ...], padded with zeros."""
    a = jnp.pad(a, ((0, -a.shape[0] % row_block), *((0, 0),) * (a.ndim - 1)))
    a = a.reshape(-1, row_block, kv_heads, a.shape[1] // kv_heads, *a.shape[2:])
    return jnp.moveaxis(a, 2, 1)


def _put_back(total, plan: Visit, like):
    total = total.transpose(1, 0, 2)[: like.shape[0]].astype(like.dtype)
    return total if plan.order is None else jnp.zeros_like(total).at[plan.order].set(total, unique_indices=True)
