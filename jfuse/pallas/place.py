"""Moves a stored chunk layer into a request: keys are rotated to their request positions while both are written.

One op replaces rotate, concatenate and pad: chunks are written into the context buffer one by one, so neither their
number nor their exact lengths enter a compiled shape.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jfuse.pallas.rotate import rotate
from jfuse.types import AnyArray, LayerKV


@functools.partial(jax.jit, donate_argnames="buffer")
def place(
    buffer: LayerKV,
    chunk: LayerKV,
    start: Int[AnyArray, ""],
    length: Int[AnyArray, ""],
    cos: Float[Array, "C F"],
    sin: Float[Array, "C F"],
) -> LayerKV:
    """Writes the first `length` entries of a padded chunk at rows start.. of the buffer, keys rotated.

    The buffer is donated: use the returned one. Rows outside stay as they are, bit for bit.

    Args:
        cos, sin: the RoPE table of the chunk's rows at their request positions (`models.rope.angles`).
    """
    return LayerKV(_write(buffer.k, rotate(chunk.k, cos, sin), start, length), _write(buffer.v, chunk.v, start, length))


@functools.partial(jax.jit, donate_argnames="buffer")
def place_half(
    buffer: Float[Array, "S K H"],
    values: Float[AnyArray, "C K H"],
    start: Int[AnyArray, ""],
    length: Int[AnyArray, ""],
    table: tuple[Float[Array, "C F"], Float[Array, "C F"]] | None,
) -> Float[Array, "S K H"]:
    """One half of `place`, for keys that arrive before their values: rotated by the table, or as they are."""
    return _write(buffer, values if table is None else rotate(jnp.asarray(values), *table), start, length)


def _write(
    target: Float[Array, "S K H"],
    values: Float[AnyArray, "C K H"],
    start: Int[AnyArray, ""],
    length: Int[AnyArray, ""],
) -> Float[Array, "S K H"]:
    size, room = values.shape[0], target.shape[0]
    window = min(size, room)
    # A padded chunk may reach past the end of the buffer: its window then starts earlier and its rows are shifted.
    at = jnp.clip(start, 0, room - window)
    source = jnp.arange(window) - (start - at)  # the chunk row that belongs to each row of the window
    inside = ((source >= 0) & (source < length))[:, None, None]
    values = jnp.take(values, jnp.clip(source, 0, size - 1), axis=0).astype(target.dtype)
    old = jax.lax.dynamic_slice_in_dim(target, at, window)
    return jax.lax.dynamic_update_slice_in_dim(target, jnp.where(inside, values, old), at, 0)
