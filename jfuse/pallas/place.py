"""Moves a stored chunk layer into a request: keys are rotated to their request positions while both are written.

One op replaces rotate, concatenate and pad: chunks are written into the context buffer one by one, so neither their
number nor their exact lengths enter a compiled shape.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.config import Implementation
from jfuse.pallas.by_definition import by_definition
from jfuse.pallas.choice import Device, Kernel, choose
from jfuse.pallas.place_triton import place_half_triton, place_triton
from jfuse.pallas.rotate import rotate
from jfuse.types import AnyArray, LayerKV


@functools.partial(jax.jit, donate_argnames="buffer", static_argnames="implementation")
def place(
    buffer: LayerKV,
    chunk: LayerKV,
    start: Int[AnyArray, ""],
    length: Int[AnyArray, ""],
    cos: Float[Array, "C F"],
    sin: Float[Array, "C F"],
    *,
    implementation: Implementation = None,
) -> LayerKV:
    """Writes the first `length` entries of a padded chunk at rows start.. of the buffer, keys rotated.

    The buffer is donated: use the returned one. Rows outside stay as they are, bit for bit.

    Args:
        cos, sin: the RoPE table of the chunk's rows at their request positions (`models.rope.angles`).
    """
    start, length, chunk = jnp.asarray(start), jnp.asarray(length), jax.tree.map(jnp.asarray, chunk)
    run = choose("place", implementation, KERNELS, _place, buffer.k.dtype)
    return by_definition(run, _place)(buffer, chunk, start, length, cos, sin)


@functools.partial(jax.jit, donate_argnames="buffer", static_argnames="implementation")
def place_half(
    buffer: Float[Array, "S K H"],
    values: Float[AnyArray, "C K H"],
    start: Int[AnyArray, ""],
    length: Int[AnyArray, ""],
    table: tuple[Float[Array, "C F"], Float[Array, "C F"]] | None,
    *,
    implementation: Implementation = None,
) -> Float[Array, "S K H"]:
    """One half of `place`, for keys that arrive before their values: rotated by the table, or as they are."""
    start, length, values = jnp.asarray(start), jnp.asarray(length), jnp.asarray(values)
    run = choose("place_half", implementation, HALF_KERNELS, _place_half, buffer.dtype)
    return by_definition(run, _place_half)(buffer, values, start, length, table)


def _place(buffer, chunk, start, length, cos, sin) -> LayerKV:
    keys = _place_half(buffer.k, chunk.k, start, length, (cos, sin))
    return LayerKV(keys, _place_half(buffer.v, chunk.v, start, length, None))


def _place_half(buffer, values, start, length, table):
    return _write(buffer, values if table is None else rotate(values, *table), start, length)


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


def _trial(dtype: np.dtype, size: int):
    """A padded chunk that reaches past the end of the buffer, heads of an odd size, keys rotated in part."""
    del size
    rng = np.random.default_rng(0)
    buffer, chunk = (
        LayerKV(*(rng.standard_normal((rows, 3, 80)).astype(dtype) for _ in range(2))) for rows in (100, 64)
    )
    cos, sin = (f(np.arange(64.0)[:, None] * np.arange(20.0)[None] / 50).astype(np.float32) for f in (np.cos, np.sin))
    return buffer, chunk, np.int32(70), np.int32(29), cos, sin


def _half_trial(dtype: np.dtype, size: int):
    buffer, chunk, start, length, cos, sin = _trial(dtype, size)
    return buffer.k, chunk.k, start, length, (cos, sin)


def _supports(device: Device, dtype: np.dtype, size: int) -> bool:
    return device.capability >= (8, 0) and np.dtype(dtype).itemsize in (2, 4)


KERNELS = (Kernel("triton", place_triton, _supports, _trial),)
HALF_KERNELS = (Kernel("triton", place_half_triton, _supports, _half_trial),)
