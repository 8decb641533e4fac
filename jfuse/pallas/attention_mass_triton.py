"""The Triton kernels of `attention_mass`: log-sum-exp per row and head, then masses reduced before they are stored.

Two passes over the keys. What is kept between and after them: one number per row, head and split of the keys, and one
per key and block of rows (and head, if heads are kept apart).
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from jfuse.pallas.merge import NEGATIVE
from jfuse.pallas.selective_attention_triton import dot_precision, tile

NOWHERE = np.iinfo(np.int32).max  # position of a key that no row sees
PROGRAMS = 256  # wanted of the first pass: twice the multiprocessors of a large device


def log_mass_triton(
    q: Float[Array, "U N H"],
    k: Float[Array, "S K H"],
    row_positions: Int[Array, " U"],
    key_positions: Int[Array, " S"],
    counted: Bool[Array, " S"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "U N"]:
    """As `log_mass` defines it. The keys are split, so that a short query fills the device."""
    (rows, heads, size), keys = q.shape, k.shape[0]
    row_block, key_block, warps, stages = _tile(rows, size, q.dtype)
    row_blocks, key_blocks = pl.cdiv(rows, row_block), pl.cdiv(keys, key_block)
    splits = min(max(PROGRAMS // (row_blocks * heads), 1), key_blocks)
    steps = pl.cdiv(key_blocks, splits)
    padded, group, wide = splits * steps * key_block, heads // k.shape[1], pl.next_power_of_2(size)
    parts = pl.pallas_call(
        functools.partial(
            _log_mass_kernel,
            shape=(rows, keys, size),
            key_block=key_block,
            steps=steps,
            precision=dot_precision(q.dtype, interpret),
        ),
        grid=(row_blocks, heads, splits),
        in_specs=[
            pl.BlockSpec((row_block,), lambda i, h, s: (i,)),
            pl.BlockSpec((padded,), lambda i, h, s: (0,)),
            pl.BlockSpec((row_block, None, wide), lambda i, h, s: (i, h, 0)),
            pl.BlockSpec((padded, None, wide), lambda i, h, s: (0, h // group, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, row_block), lambda i, h, s: (s, h, i)),
        out_shape=jax.ShapeDtypeStruct((splits, heads, row_blocks * row_block), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="log_mass",
    )(_pad(row_positions, row_block, -1), _where(key_positions, counted, padded), q, k)
    top = parts.max(0)
    return (top + jnp.log(jnp.exp(parts - top[None]).sum(0)))[:, :rows].T


def attention_mass_triton(
    q: Float[Array, "U N H"],
    k: Float[Array, "S K H"],
    row_positions: Int[Array, " U"],
    key_positions: Int[Array, " S"],
    counted: Bool[Array, " S"] | None,
    rows: Bool[Array, " U"],
    others: Float[Array, "U N"] | None,
    *,
    heads: Literal["mean", "max", "each"] = "mean",
    over_rows: Literal["mean", "max"] = "mean",
    interpret: bool = False,
) -> Float[Array, " S"] | Float[Array, "N S"]:
    """As `attention_mass` defines it: `log_mass`, then exp(score - lse), reduced before it is stored."""
    lse = log_mass_triton(q, k, row_positions, key_positions, counted, interpret=interpret)
    lse = lse if others is None else jnp.logaddexp(lse, others)
    (count, num_heads, size), keys = q.shape, k.shape[0]
    row_block, key_block, warps, stages = _tile(count, size, q.dtype)
    row_blocks, key_blocks, wide = pl.cdiv(count, row_block), pl.cdiv(keys, key_block), pl.next_power_of_2(size)
    out_heads = num_heads if heads == "each" else 1
    parts = pl.pallas_call(
        functools.partial(
            _mass_kernel,
            shape=(count, keys, size),
            heads=heads,
            over_rows=over_rows,
            precision=dot_precision(q.dtype, interpret),
        ),
        grid=(key_blocks, row_blocks, out_heads),
        in_specs=[
            pl.BlockSpec((row_block,), lambda j, i, h: (i,)),
            pl.BlockSpec((key_block,), lambda j, i, h: (j,)),
            pl.BlockSpec((num_heads, row_block), lambda j, i, h: (0, i)),
            pl.BlockSpec((row_block, num_heads, wide), lambda j, i, h: (i, 0, 0)),
            pl.BlockSpec((key_block, k.shape[1], wide), lambda j, i, h: (j, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, key_block), lambda j, i, h: (i, h, j)),
        out_shape=jax.ShapeDtypeStruct((row_blocks, out_heads, key_blocks * key_block), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="attention_mass",
    )(
        _pad(jnp.where(rows, row_positions, -1), row_block, -1),
        _where(key_positions, counted, key_blocks * key_block),
        jnp.pad(lse, ((0, -count % row_block), (0, 0))).T,
        q,
        k,
    )
    if over_rows == "max":
        out = parts.max(0)
    else:
        out = parts.sum(0) / jnp.maximum(rows.sum(), 1).astype(jnp.float32)
    return out[:, :keys] if heads == "each" else out[0, :keys]


def _tile(rows: int, size: int, dtype: jnp.dtype) -> tuple[int, int, int, int]:
    """The tile of `selective_attention`, a size smaller for float32, whose products in three parts take registers."""
    return tile(rows, 2 * size if dtype == jnp.float32 else size, dtype)


def _pad(positions: Int[Array, " U"], multiple: int, value: int) -> Int[Array, " V"]:
    return jnp.pad(positions.astype(jnp.int32), (0, -positions.shape[0] % multiple), constant_values=value)


def _where(key_positions: Int[Array, " S"], counted: Bool[Array, " S"] | None, size: int) -> Int[Array, " P"]:
    at = key_positions.astype(jnp.int32)
    at = at if counted is None else jnp.where(counted, at, NOWHERE)
    return jnp.pad(at, (0, size - at.shape[0]), constant_values=NOWHERE)


def _load(ref, first: Int[Array, ""], count: int, size: int):
    """A tile whose first row is row `first` of `count`; what lies outside the array is zero, not read."""
    row, column = first + jnp.arange(ref.shape[0]), jnp.arange(ref.shape[1])
    return triton.load(ref, mask=(row < count)[:, None] & (column < size)[None, :], other=0)


def _scores(q, k, size: int, precision):
    """Scaled scores, in powers of two."""
    return triton.dot(q, k.T, precision=precision) * (math.log2(math.e) / math.sqrt(size))


def _log_mass_kernel(
    row_ref, key_ref, q_ref, k_ref, out_ref, *, shape: tuple[int, int, int], key_block: int, steps: int, precision
):
    rows, keys, size = shape
    row = row_ref[...]
    q = _load(q_ref, pl.program_id(0) * row.shape[0], rows, size)
    first = pl.program_id(2) * steps

    def step(i, carry):
        top, total = carry
        at = (first + i) * key_block
        k = _load(k_ref.at[pl.ds(at, key_block)], at, keys, size)
        keep = triton.load(key_ref.at[pl.ds(at, key_block)])[None, :] <= row[:, None]
        scores = jnp.where(keep, _scores(q, k, size, precision), NEGATIVE)
        new_top = jnp.maximum(top, scores.max(1))
        weights = jnp.where(keep, jnp.exp2(scores - new_top[:, None]), 0.0)
        return new_top, total * jnp.exp2(top - new_top) + weights.sum(1)

    start = jnp.full(row.shape, NEGATIVE, jnp.float32), jnp.zeros(row.shape, jnp.float32)
    top, total = jax.lax.fori_loop(0, steps, step, start)
    some = total > 0
    out_ref[...] = jnp.where(some, (top + jnp.log2(jnp.where(some, total, 1.0))) * math.log(2), NEGATIVE)


def _mass_kernel(
    row_ref, key_ref, lse_ref, q_ref, k_ref, out_ref, *, shape: tuple[int, int, int], heads, over_rows, precision
):
    rows, keys, size = shape
    (row_block, num_heads, _), (key_block, kv_heads, _) = q_ref.shape, k_ref.shape
    first_key, first_row = pl.program_id(0) * key_block, pl.program_id(1) * row_block
    keep = key_ref[...][None, :] <= row_ref[...][:, None]

    def mass(h):
        q = _load(q_ref.at[:, h], first_row, rows, size)
        k = _load(k_ref.at[:, jax.lax.div(h, jnp.int32(num_heads // kv_heads))], first_key, keys, size)
        exponent = _scores(q, k, size, precision) - lse_ref[h, :][:, None] * math.log2(math.e)
        return jnp.where(keep, jnp.exp2(exponent), 0.0)

    def step(h, total):
        return jnp.maximum(total, mass(h)) if heads == "max" else total + mass(h)

    if heads == "each":
        total = mass(pl.program_id(2))
    else:
        start = jnp.zeros((row_block, key_block), jnp.float32)
        total = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_heads), step, start)
        total = total / num_heads if heads == "mean" else total
    out_ref[...] = total.max(0) if over_rows == "max" else total.sum(0)
