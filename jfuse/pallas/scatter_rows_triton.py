"""The Triton kernel of `scatter_rows`: each program writes a few rows of keys and of values; the layer is aliased."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Int

from jfuse.types import LayerKV

ROW_BLOCK = 4
COLUMN_BLOCK = 1024  # with four rows, four 16-byte stores for each thread of four warps


def scatter_rows_triton(layer: LayerKV, place: Int[Array, " R"], rows: LayerKV, *, interpret: bool = False) -> LayerKV:
    """As `scatter_rows` defines it."""
    shape, (count, *_) = layer.k.shape, rows.k.shape
    width = shape[1] * shape[2]
    columns = min(pl.next_power_of_2(width), COLUMN_BLOCK)
    flat = LayerKV(*(half.reshape(shape[0], width) for half in layer))
    new = LayerKV(*(half.reshape(count, width) for half in rows))
    block = pl.BlockSpec((ROW_BLOCK, columns), lambda i, j: (i, j))
    whole = pl.BlockSpec(flat.k.shape, lambda i, j: (0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, count=count, size=shape[0], width=width),
        grid=(pl.cdiv(count, ROW_BLOCK), pl.cdiv(width, columns)),
        in_specs=[pl.BlockSpec((ROW_BLOCK,), lambda i, j: (i,)), block, block, whole, whole],
        out_specs=[whole, whole],
        out_shape=[jax.ShapeDtypeStruct(half.shape, half.dtype) for half in flat],
        input_output_aliases={3: 0, 4: 1},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scatter_rows",
    )(jnp.asarray(place, jnp.int32), *new, *flat)
    return LayerKV(*(half.reshape(shape) for half in out))


def _kernel(place_ref, k_ref, v_ref, _k, _v, k_out, v_out, *, count: int, size: int, width: int):
    rows, columns = k_ref.shape
    row = pl.program_id(0) * rows + jnp.arange(rows)
    at = triton.load(place_ref, mask=row < count, other=size)
    column = pl.program_id(1) * columns + jnp.arange(columns)
    keep = (at < size)[:, None] & (column < width)[None, :]
    for new, out in ((k_ref, k_out), (v_ref, v_out)):
        values = triton.load(new, mask=keep, other=0).astype(out.dtype)
        triton.store(out.at[at[:, None], column[None, :]], values, mask=keep)
