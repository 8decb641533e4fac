"""The Triton kernel of `selective_attention`, for Ampere and Hopper: online softmax over the key blocks of `visit`.

The rows of a block are those of all query heads that share a KV head, side by side, so that each key is loaded once
for them, and one row alone fills a tile. Few rows are spread over the card by splitting their keys; the parts are
merged by their log-sum-exp.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from jfuse.pallas.key_blocks import END, NEAR, NEAR_END, WHOLE, visit
from jfuse.pallas.merge import NEGATIVE, merge_partial

PROGRAMS = 264  # wanted on the card: two for each multiprocessor of an H200
MAX_SPLITS = 16
LOG2E = math.log2(math.e)


def selective_attention_triton(
    q: Float[Array, "R N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    row_positions: Int[Array, " R"],
    key_positions: Int[Array, " S"],
    visible: Bool[Array, " S"] | None,
    window: Int[Array, ""],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "R N H"], Float[Array, "R N"]]:
    """Attention output and log-sum-exp, as `partial_attention` defines them."""
    (rows, heads, size), (keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    row_block, key_block, warps, stages = tile(rows * group, size, q.dtype)
    plan = visit(
        k,
        v,
        jnp.repeat(row_positions, group),
        key_positions,
        visible,
        window,
        row_block=row_block,
        key_block=key_block,
    )
    blocks, padded = plan.ranges.shape[0], plan.bounds.shape[1]
    splits = max(1, min(PROGRAMS // (blocks * kv_heads), padded // (2 * key_block), MAX_SPLITS))
    wide = max(pl.next_power_of_2(size), 16)
    kernel = functools.partial(
        _kernel,
        shape=(rows, group, keys, size),
        splits=splits,
        key_block=key_block,
        precision=dot_precision(q.dtype, interpret),
    )
    key_spec = pl.BlockSpec((padded, None, wide), lambda i, h: (0, h // splits, 0))
    out, lse = pl.pallas_call(
        kernel,
        grid=(blocks, kv_heads * splits),
        in_specs=[
            pl.BlockSpec((None, 4), lambda i, h: (i, 0)),
            pl.BlockSpec((row_block,), lambda i, h: (i,)),
            pl.BlockSpec((None, padded), lambda i, h: (0, 0)),
            pl.BlockSpec((None, padded), lambda i, h: (1, 0)),
            pl.BlockSpec(q.shape, lambda i, h: (0, 0, 0)),
            key_spec,
            key_spec,
        ],
        out_specs=[
            pl.BlockSpec((None, *q.shape), lambda i, h: (h % splits, 0, 0, 0)),
            pl.BlockSpec((None, rows, heads), lambda i, h: (h % splits, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, *q.shape), v.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, heads), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="selective_attention_triton",
    )(plan.ranges, plan.row_positions, plan.bounds, plan.bounds, q, plan.k, plan.v)
    if splits == 1:
        return out[0], lse[0]
    whole, lse = merge_partial([(out[i], lse[i]) for i in range(splits)])
    return whole.astype(v.dtype), lse


def tile(rows: int, size: int, dtype: jnp.dtype) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps, and stages of the copy pipeline; `make kernels` holds them to 0 spills."""
    few = max(pl.next_power_of_2(rows), 16)
    if dtype == jnp.float32:
        most, keys, warps = (32, 32, 8) if size <= 128 else (16, 16, 8)
    elif size <= 64:
        most, keys, warps = 64, 64, 4
    elif size <= 128:
        most, keys, warps = 64, 32 if few >= 64 else 64, 4
    else:
        most, keys, warps = 64, 32, 8
    return min(few, most), keys, warps, 2


def dot_precision(dtype: jnp.dtype, interpret: bool):
    """Products of float32 in three parts on the tensor cores, which keeps 1e-6; in full where a CPU interprets."""
    if dtype != jnp.float32:
        return None
    return jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def _kernel(
    range_ref,
    row_ref,
    first_ref,
    last_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    *,
    shape: tuple[int, int, int, int],
    splits: int,
    key_block: int,
    precision,
):
    rows, group, keys, size = shape
    wide, row_block = k_ref.shape[-1], row_ref.shape[0]
    head, split = pl.program_id(1) // splits, pl.program_id(1) % splits
    packed = pl.program_id(0) * row_block + jnp.arange(row_block)
    row, query_head = packed // group, head * group + packed % group
    column = jnp.arange(wide)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    own = (row[:, None], query_head[:, None], column[None, :])
    position = row_ref[...]
    q = triton.load(q_ref.at[own], mask=inside, other=0)
    scale = LOG2E / math.sqrt(size)

    whole, end, near = range_ref[WHOLE], range_ref[END], range_ref[NEAR]
    steps = end + range_ref[NEAR_END] - near
    share = (steps + splits - 1) // splits
    first, last = jnp.minimum(split * share, steps), jnp.minimum((split + 1) * share, steps)

    def step(i, carry, *, masked: bool):
        out, top, total = carry
        at = jnp.where(i < end, i, near + i - end) * key_block
        here, column_inside = pl.ds(at, key_block), (column < size)[None, :]
        index = at + jnp.arange(key_block)
        bounds = {}
        if masked or wide > size:
            keep = (index < keys)[:, None] & column_inside if masked else column_inside
            bounds = {"mask": jnp.broadcast_to(keep, (key_block, wide)), "other": 0}
        scores = triton.dot(q, triton.load(k_ref.at[here], **bounds).T, precision=precision) * scale
        if masked:
            first_row, last_row = (triton.load(ref.at[here])[None, :] for ref in (first_ref, last_ref))
            seen = (first_row <= position[:, None]) & (position[:, None] <= last_row)
            scores = jnp.where(seen, scores, NEGATIVE)
        new_top = jnp.maximum(top, scores.max(1))
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - new_top[:, None])
        value = triton.load(v_ref.at[here], **bounds)
        added = triton.dot(weights.astype(value.dtype), value, precision=precision)
        return out * decay[:, None] + added, new_top, total * decay + weights.sum(1)

    carry = (
        jnp.zeros((row_block, wide), jnp.float32),
        jnp.full((row_block,), NEGATIVE, jnp.float32),
        jnp.zeros((row_block,), jnp.float32),
    )
    carry = jax.lax.fori_loop(
        jnp.minimum(first, whole), jnp.minimum(last, whole), functools.partial(step, masked=False), carry
    )
    out, top, total = jax.lax.fori_loop(
        jnp.maximum(first, whole), jnp.maximum(last, whole), functools.partial(step, masked=True), carry
    )
    # A row that saw only masked keys has top NEGATIVE and weights exp(0); padding rows are let into whole blocks.
    empty = (top <= NEGATIVE / 2) | (position < 0)
    total = jnp.where(empty, 1.0, total)
    out = jnp.where(empty[:, None], 0.0, out / total[:, None])
    triton.store(out_ref.at[own], out.astype(out_ref.dtype), mask=inside)
    lse = jnp.where(empty, NEGATIVE, (top + jnp.log2(total)) / LOG2E)
    triton.store(lse_ref.at[row, query_head], lse, mask=row < rows)
