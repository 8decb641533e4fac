"""The Triton kernel of `place`: chunk rows are read once, rotated in float32 and written into the aliased buffer."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jfuse.types import LayerKV

ROW_BLOCK = 16

Table = tuple[Float[Array, "C F"], Float[Array, "C F"]]


def place_triton(
    buffer: LayerKV,
    chunk: LayerKV,
    start: Int[Array, ""],
    length: Int[Array, ""],
    cos: Float[Array, "C F"],
    sin: Float[Array, "C F"],
    *,
    interpret: bool = False,
) -> LayerKV:
    """As `place` defines it; keys and values in one launch."""
    return LayerKV(*_write(buffer, chunk, start, length, (cos, sin), rotated=(True, False), interpret=interpret))


def place_half_triton(
    buffer: Float[Array, "S K H"],
    values: Float[Array, "C K H"],
    start: Int[Array, ""],
    length: Int[Array, ""],
    table: Table | None,
    *,
    interpret: bool = False,
) -> Float[Array, "S K H"]:
    """As `place_half` defines it."""
    return _write((buffer,), (values,), start, length, table, rotated=(table is not None,), interpret=interpret)[0]


def _write(
    buffers: Sequence[Float[Array, "S K H"]],
    chunks: Sequence[Float[Array, "C K H"]],
    start: Int[Array, ""],
    length: Int[Array, ""],
    table: Table | None,
    *,
    rotated: tuple[bool, ...],
    interpret: bool,
) -> Sequence[Float[Array, "S K H"]]:
    size, heads, _ = chunks[0].shape
    tables = table or ()
    half = table[0].shape[1] if table else 0
    by_row = pl.BlockSpec((ROW_BLOCK, max(pl.next_power_of_2(half), 1)), lambda i, head: (i, 0))
    one = pl.BlockSpec((1,), lambda i, head: (0,))
    source, target = (pl.BlockSpec(arrays[0].shape, lambda i, head: (0, 0, 0)) for arrays in (chunks, buffers))
    first_buffer = 2 + len(tables) + len(chunks)
    return pl.pallas_call(
        functools.partial(_kernel, half=half, rotated=rotated),
        grid=(pl.cdiv(size, ROW_BLOCK), heads),
        in_specs=[one, one, *[by_row] * len(tables), *[source] * len(chunks), *[target] * len(buffers)],
        out_specs=[target] * len(buffers),
        out_shape=[jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in buffers],
        input_output_aliases={first_buffer + i: i for i in range(len(buffers))},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="place",
    )(jnp.reshape(start, 1), jnp.reshape(length, 1), *tables, *chunks, *buffers)


def _kernel(start_ref, length_ref, *refs, half: int, rotated: tuple[bool, ...]):
    count = len(rotated)
    tables = refs[: -3 * count]  # cosines and sines, if any keys are rotated
    sources, _, targets = (refs[-i * count :][:count] for i in (3, 2, 1))
    size, head = sources[0].shape[0], pl.program_id(1)
    row = pl.program_id(0) * ROW_BLOCK + jnp.arange(ROW_BLOCK)
    at = start_ref[0] + row
    inside = (row < jnp.minimum(length_ref[0], size)) & (at < targets[0].shape[0])

    def tile(first: int, columns: int):
        """Columns and mask of a tile; Triton's tiles are powers of two wide."""
        column = jnp.arange(pl.next_power_of_2(columns))
        return first + column[None, :], inside[:, None] & (column < columns)[None, :]

    def load(source, column, keep):
        return triton.load(source.at[row[:, None], head, column], mask=keep, other=0)

    def store(target, column, keep, values):
        triton.store(target.at[at[:, None], head, column], values.astype(target.dtype), mask=keep)

    for source, target, turn in zip(sources, targets, rotated, strict=True):
        done = 2 * half if turn else 0
        if turn:
            low, keep = tile(0, half)
            high, _ = tile(half, half)
            cos, sin = (triton.load(table, mask=keep, other=0) for table in tables)
            a, b = (load(source, column, keep).astype(jnp.float32) for column in (low, high))
            store(target, low, keep, (a * cos - b * sin).astype(source.dtype))
            store(target, high, keep, (b * cos + a * sin).astype(source.dtype))
        if done < source.shape[2]:
            column, keep = tile(done, source.shape[2] - done)
            store(target, column, keep, load(source, column, keep))
