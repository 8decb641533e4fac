"""What recomputed rows may read under a restricted context: as a mask, or as a short list of gathered keys.

A row sees itself, the system prefix, the visible set and the `window` positions before it. A mask alone saves nothing
when the visible keys lie scattered; gathered side by side, with their positions, they cost what they are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jfuse.config import round_up
from jfuse.types import PAD_POSITION, PADDING_SEGMENT, PREFIX_SEGMENT, AnyArray, LayerKV, Selection

KEY_BLOCKS = 4
"""Gathered keys are padded to this many row blocks (512 keys while serving), so that few sizes are compiled."""

MOST = 0.75
"""Keys are gathered when that leaves at most this share of them; above it, copying costs as much as it saves."""


class Readable(NamedTuple):
    """The keys of one layer that its rows may read."""

    listed: Bool[Array, " M"]  # in the visible set or the prefix, hence readable by every later row
    place: Int[Array, " M"] | None  # where each key lies, sorted, padding past the end; None: all keys, in place


def key_counts(selection: Selection, segments: Int[AnyArray, " S"]) -> Int[Array, " L"]:
    """Per layer, how many keys the rows that attend there may read."""
    return _any_row(selection, jnp.asarray(segments)).sum(-1)


def gathered_size(count: int, total: int, row_block: int) -> int | None:
    """The padded size of the gathered keys, or None where a mask over all `total` keys is as cheap."""
    size = round_up(max(count, 1), KEY_BLOCKS * row_block)
    return size if size <= MOST * total else None


@functools.partial(jax.jit, static_argnames="size")
def readable(
    selection: Selection, layer: Int[AnyArray, ""] | int, segments: Int[AnyArray, " S"], size: int | None
) -> Readable:
    """What the rows of a layer may read; gathered into `size` places unless that is None."""
    segments = jnp.asarray(segments)
    listed = _listed(selection, segments)
    listed = listed[jnp.minimum(layer, listed.shape[0] - 1)]
    if size is None:
        return Readable(listed, None)
    (place,) = jnp.nonzero(_any_row(selection, segments)[layer], size=size, fill_value=segments.shape[0])
    return Readable(listed.at[place].get(mode="fill", fill_value=False), place.astype(jnp.int32))


def gather(
    kv: LayerKV, positions: Int[Array, " S"], keys: Readable | None
) -> tuple[LayerKV, Int[Array, " M"], Bool[Array, " M"] | None]:
    """Keys, values, their positions and the visible mask, as `selective_attention` takes them."""
    if keys is None or keys.place is None:
        return kv, positions, None if keys is None else keys.listed
    chosen = jax.tree.map(lambda a: a.at[keys.place].get(mode="fill", fill_value=0), kv)
    return chosen, positions.at[keys.place].get(mode="fill", fill_value=PAD_POSITION), keys.listed


def _listed(selection: Selection, segments: Int[Array, " S"]) -> Bool[Array, "Lc S"]:
    real = (segments != PADDING_SEGMENT)[None]
    return (jnp.asarray(selection.visible) | (segments == PREFIX_SEGMENT)[None]) & real


def _any_row(selection: Selection, segments: Int[Array, " S"]) -> Bool[Array, "L S"]:
    """Keys that some row which attends at a layer, because it goes on to the next one, may read."""
    recompute = jnp.asarray(selection.recompute)
    attending = jnp.concatenate([recompute[1:], jnp.zeros_like(recompute[:1])])
    return _listed(selection, segments) | _near(attending, jnp.asarray(selection.window))


def _near(rows: Shaped[Array, "L S"], window: Int[Array, ""]) -> Bool[Array, "L S"]:
    """Positions with a row at most `window` after them: differences of a running count."""
    count = jnp.pad(jnp.cumsum(rows, axis=-1, dtype=jnp.int32), ((0, 0), (1, 0)))
    start = jnp.arange(rows.shape[-1])
    end = jnp.minimum(start + window + 1, rows.shape[-1])
    return count[:, end] > count[:, start]
