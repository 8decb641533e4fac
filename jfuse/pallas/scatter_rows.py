"""Writes recomputed keys and values into a layer, in place: in come the layer and R rows, out comes the layer."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jfuse.config import Implementation
from jfuse.pallas.by_definition import by_definition
from jfuse.pallas.choice import Kernel, choose
from jfuse.pallas.scatter_rows_triton import scatter_rows_triton
from jfuse.types import AnyArray, LayerKV


def scatter_rows(
    layer: LayerKV, place: Int[AnyArray, " R"], rows: LayerKV, *, implementation: Implementation = None
) -> LayerKV:
    """The layer with row r of `rows` at index `place[r]`, in the layer's dtype; all other entries keep their bits.

    Inside a `jit` that donates the layer, nothing else of it is copied or read.

    Args:
        place: sorted and distinct. Indices at the layer's length and above are padding, and their rows are dropped.
        implementation: "xla", "pallas" for a GPU kernel, or None for the best that runs here (`pallas.choice`).

    Raises:
        ValueError: "pallas" where no kernel can run.
        RuntimeError: "pallas" where the kernel fails.
    """
    run = choose("scatter_rows", implementation, KERNELS, _scatter, layer.k.dtype)
    return by_definition(run, _scatter)(layer, jnp.asarray(place), rows)


def _scatter(layer: LayerKV, place: Int[AnyArray, " R"], rows: LayerKV) -> LayerKV:
    def write(old, new):
        new = jnp.asarray(new, old.dtype)
        return jnp.asarray(old).at[place].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    return LayerKV(write(layer.k, rows.k), write(layer.v, rows.v))


def _trial(dtype: np.dtype, size: int):
    """Heads of an odd size, rows of another dtype, padding rows."""
    del size
    rng = np.random.default_rng(0)
    layer = LayerKV(*(rng.standard_normal((100, 3, 80)).astype(dtype) for _ in range(2)))
    rows = LayerKV(*(rng.standard_normal((37, 3, 80)).astype(np.float32) for _ in range(2)))
    return layer, np.r_[3 * np.arange(33), 100 + np.arange(4)].astype(np.int32), rows


KERNELS = (
    Kernel(
        "triton",
        scatter_rows_triton,
        lambda device, dtype, size: device.capability >= (8, 0) and np.dtype(dtype).itemsize in (2, 4),
        _trial,
    ),
)
