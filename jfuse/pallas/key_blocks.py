"""Which blocks of keys a block of rows has to visit: what the kernels of `selective_attention` skip, they skip by this.

In come the positions of rows and keys and the visible set, out come the keys with the visible ones first, and for
every block of rows two ranges of key blocks. Only the ends of the ranges are computed, at run time: nothing of size
rows x keys exists, and other rows or another visible set of the same shapes run the same program.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.types import PAD_POSITION

WHOLE, END, NEAR, NEAR_END = range(4)
"""Columns of `Visit.ranges`. Key blocks in the order in which they are visited, visible keys first:

    0        WHOLE        END         NEAR    NEAR_END
    |----------|-----------|   ...     |---------|
     every key   some visible key       some key of a window
     of every    of some row            of some row
     row
"""

ALWAYS = np.iinfo(np.int32).max
"""Later than every row."""


class Visit(NamedTuple):
    """Keys in visiting order, and what each block of rows visits of them."""

    k: Float[Array, "S K H"]
    v: Float[Array, "S K H"]
    order: Int[Array, " S"] | None  # where each of them lay; None: they were not moved
    bounds: Int[Array, "2 P"]  # the first and the last position of a row that may read each; padded to whole blocks
    row_positions: Int[Array, " B"]  # padded to whole blocks; -1 for padding rows
    ranges: Int[Array, "b 4"]


def visit(
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    row_positions: Int[Array, " R"],
    key_positions: Int[Array, " S"],
    visible: Bool[Array, " S"] | None,
    window: Int[Array, ""],
    *,
    row_block: int,
    key_block: int,
) -> Visit:
    """Plans the visit of rows (repeat them first, if several heads lie in one block) to keys.

    The ranges are exact where rows and keys lie in the order of their positions, and cover more than that otherwise.
    """
    keys = k.shape[0]
    listed, order = jnp.int32(keys), None
    if visible is not None:
        listed = visible.sum(dtype=jnp.int32)
        order = _visible_first(visible, listed)
        k, v, key_positions = k[order], v[order], key_positions[order]
    row_positions = jnp.where(row_positions >= PAD_POSITION, -1, row_positions)
    row_positions = jnp.pad(row_positions, (0, -row_positions.shape[0] % row_block), constant_values=-1)
    key_positions = jnp.pad(key_positions, (0, -keys % key_block), constant_values=PAD_POSITION)
    is_listed = jnp.arange(key_positions.shape[0], dtype=jnp.int32) < listed
    reach = jnp.minimum(jnp.asarray(window, jnp.int32), PAD_POSITION)
    bounds = jnp.stack([key_positions, jnp.where(is_listed, ALWAYS, key_positions + reach)])
    ranges = _ranges(
        row_positions.reshape(-1, row_block), key_positions.reshape(-1, key_block), listed, is_listed, reach
    )
    return Visit(k, v, order, bounds, row_positions, ranges)


def _visible_first(visible, listed):
    """The stable order that puts visible keys before the others, without sorting."""
    visible = visible.astype(jnp.int32)
    place = jnp.where(visible > 0, jnp.cumsum(visible) - 1, listed + jnp.cumsum(1 - visible) - 1)
    return jnp.zeros_like(place).at[place].set(jnp.arange(place.shape[0], dtype=jnp.int32), unique_indices=True)


def _ranges(rows, keys, listed, is_listed, window):
    last = rows.max(1)[:, None]
    earliest = jnp.where(rows < 0, PAD_POSITION, rows).min(1)[:, None]
    block = jnp.arange(keys.shape[0], dtype=jnp.int32)[None, :]
    is_listed = is_listed.reshape(keys.shape)
    first_listed = jnp.where(is_listed, keys, PAD_POSITION).min(1)[None, :]
    first_other = jnp.where(is_listed, PAD_POSITION, keys).min(1)[None, :]
    last_other = jnp.where(is_listed | (keys == PAD_POSITION), -1, keys).max(1)[None, :]
    whole = (keys.max(1)[None, :] <= earliest) & is_listed.all(1)[None, :] & (earliest < PAD_POSITION)
    wanted = (first_listed <= last) | ((first_other <= last) & (last_other >= earliest - window))
    boundary = (listed + keys.shape[1] - 1) // keys.shape[1]  # the first block without a visible key
    ahead, behind = wanted & (block < boundary), wanted & (block >= boundary)
    num_whole = jnp.cumprod(whole, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
    end = jnp.maximum(jnp.where(ahead, block + 1, 0).max(1), num_whole)
    near_end = jnp.where(behind, block + 1, 0).max(1)
    near = jnp.minimum(jnp.where(behind, block, keys.shape[0]).min(1), near_end)
    return jnp.stack([num_whole, end, near, near_end], axis=1).astype(jnp.int32)
