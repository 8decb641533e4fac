"""Π: places stored chunk caches at their request positions and puts them side by side (QCFuse eq. 4).

In come chunks in request order and, optionally, the exact cache of the system prefix; out comes one `ContextCache`.
The same pieces work on whole chunks and layer by layer, while later layers are still being read.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.config import anchor_bucket, chunk_bucket, context_bucket
from jfuse.models.rope import Rope, angles
from jfuse.pallas.place import place, place_half
from jfuse.pallas.rotate import rotate
from jfuse.types import (
    PAD_POSITION,
    PADDING_SEGMENT,
    PREFIX_SEGMENT,
    AnchorCache,
    AnyArray,
    Chunk,
    ChunkAnchors,
    ContextCache,
    LayerKV,
)

ChunkHalf = Float[AnyArray, "_ K H"]
ContextHalf = Float[Array, "S K H"]


class Layout(NamedTuple):
    """Where everything of one request stands; host integers only."""

    tokens: Int[np.ndarray, " S"]
    positions: Int[np.ndarray, " S"]
    segments: Int[np.ndarray, " S"]
    starts: tuple[int, ...]  # request position of each chunk's first token
    lengths: tuple[int, ...]
    num_prefix: int

    @property
    def end(self) -> int:
        """Position after the last chunk, where the query starts."""
        return self.num_prefix + sum(self.lengths)


def make_layout(
    chunks: Sequence[Int[AnyArray, " _"]], prefix: Int[AnyArray, " P"] | None = None, *, pad_to: int = 1
) -> Layout:
    """The layout [prefix | chunks | padding] of a request, from token ids.

    Args:
        pad_to: context bucket; 1 leaves no padding at all.
    """
    prefix = np.zeros(0, np.int32) if prefix is None else np.asarray(prefix, np.int32)
    lengths = tuple(len(tokens) for tokens in chunks)
    starts = tuple(int(start) for start in len(prefix) + np.cumsum((0, *lengths))[:-1])
    end = len(prefix) + sum(lengths)
    size = end if pad_to == 1 else context_bucket(len(prefix), sum(lengths), pad_to)
    segments = np.repeat(np.arange(-1, len(lengths)), (len(prefix), *lengths))
    segments[: len(prefix)] = PREFIX_SEGMENT
    return Layout(
        np.pad(np.concatenate([prefix, *chunks]).astype(np.int32), (0, size - end)),
        np.pad(np.arange(end, dtype=np.int32), (0, size - end), constant_values=PAD_POSITION),
        np.pad(segments.astype(np.int32), (0, size - end), constant_values=PADDING_SEGMENT),
        starts,
        lengths,
        len(prefix),
    )


def stitch(chunks: Sequence[Chunk], rope: Rope, *, prefix: ContextCache | None = None, pad_to: int = 1) -> ContextCache:
    """The stitched cache KV^PIC(C): every chunk at its request positions after the prefix, keys rotated once.

    Args:
        prefix: the exact cache of the system prefix, as `pipeline.encode_prefix` makes it.
        pad_to: context bucket; serving uses 512, 1 pads nothing.

    Raises:
        ValueError: no chunks.
    """
    if not chunks:
        raise ValueError("stitch got no chunks; a request needs at least one (use prefill for a plain prompt).")
    layout = make_layout([chunk.tokens for chunk in chunks], prefix_tokens(prefix), pad_to=pad_to)
    write = LayerWriter(layout, rope)
    layers = zip(*(chunk.kv for chunk in chunks), strict=True)
    kv = tuple(write.whole(list(pieces), None if prefix is None else prefix.kv[l]) for l, pieces in enumerate(layers))
    return ContextCache(layout.tokens, layout.positions, layout.segments, kv)


def prefix_tokens(prefix: ContextCache | None) -> Int[np.ndarray, " P"] | None:
    """The prefix's token ids without padding."""
    return None if prefix is None else np.asarray(prefix.tokens)[: prefix.end]


class LayerWriter:
    """Stitches the layers of one request one by one, from chunk layers and the prefix; RoPE tables are made once."""

    def __init__(self, layout: Layout, rope: Rope):
        self._size = len(layout.tokens)
        self._spans = [
            (np.int32(start), np.int32(length), _angles(rope, np.arange(chunk_bucket(length), dtype=np.int32) + start))
            for start, length in zip(layout.starts, layout.lengths, strict=True)
        ]

    def whole(self, pieces: Sequence[LayerKV], prefix: LayerKV | None) -> LayerKV:
        """A layer from its chunks' keys and values."""
        layer = self._open(pieces[0].k, prefix)
        for piece, (start, length, table) in zip(pieces, self._spans, strict=True):
            layer = place(layer, pad_rows(piece, chunk_bucket(int(length))), start, length, *table)
        return layer

    def keys(self, keys: Sequence[ChunkHalf], prefix: LayerKV | None) -> LayerKV:
        """A layer from its chunks' keys alone; the chunks' values are zeros as yet."""
        layer = self._open(keys[0], prefix)
        return layer._replace(k=self._half(layer.k, keys, rotated=True))

    def values(self, layer: LayerKV, values: Sequence[ChunkHalf]) -> LayerKV:
        """The layer that `keys` made, which is used up, with its chunks' values."""
        return layer._replace(v=self._half(layer.v, values, rotated=False))

    def _open(self, like: Any, prefix: LayerKV | None) -> LayerKV:
        return _open_buffer(prefix, self._size, *like.shape[1:], like.dtype)

    def _half(self, half: ContextHalf, pieces: Sequence[ChunkHalf], *, rotated: bool) -> ContextHalf:
        for piece, (start, length, table) in zip(pieces, self._spans, strict=True):
            rows = pad_rows(piece, chunk_bucket(int(length)))
            half = place_half(half, rows, start, length, table if rotated else None)
        return half


def pad_rows(layer: Any, size: int) -> Any:
    """A chunk layer, or half of one, with at least `size` rows. Chunks on the host are padded there."""

    def pad(half: Any) -> Any:
        missing = size - half.shape[0]
        return np.pad(np.asarray(half), ((0, missing), (0, 0), (0, 0))) if missing > 0 else half

    return jax.tree.map(pad, layer)


_angles = jax.jit(angles, static_argnames="rope")


@functools.partial(jax.jit, static_argnames=("size", "num_kv_heads", "head_size", "dtype"))
def _open_buffer(prefix: LayerKV | None, size: int, num_kv_heads: int, head_size: int, dtype) -> LayerKV:
    """A zeroed context layer that starts with the prefix, whose padding comes along and stays masked."""

    def open_one(values):
        rows = jnp.zeros((size, num_kv_heads, head_size), dtype)
        return rows if values is None else rows.at[: min(values.shape[0], size)].set(values[:size])

    return LayerKV(*(open_one(values) for values in (prefix or (None, None))))


def stitch_anchors(
    anchors: Sequence[ChunkAnchors],
    rope: Rope,
    layout: Layout,
    *,
    prefix: ContextCache | None = None,
    ratio: float = 0.1,
    pad_to: int = 1,
    layers: Iterable[int] | None = None,
) -> AnchorCache:
    """The compact probe view KV^A(C_A): prefix and anchors, at the positions they have in the full request (eq. 16).

    Args:
        anchors: one block per chunk, in request order; an empty sequence leaves the prefix alone (or nothing).
        ratio: the anchor ratio r_a, which fixes the padded size; `pad_to` 1 pads nothing.
        layers: which layers to place (a probe needs none past the deepest of its view); all by default.
    """
    layers = tuple(
        range(len(anchors[0].kv) if anchors else len(prefix.kv) if prefix else 0) if layers is None else layers
    )
    count = sum(block.offsets.shape[1] for block in anchors)
    context = sum(layout.lengths)
    size = anchor_bucket(0, context, ratio, count, pad_to) if anchors and pad_to > 1 else count
    if not anchors and prefix is None:
        return AnchorCache(np.zeros((len(layers), 0), np.int32), ())
    positions = np.full((len(layers), size), PAD_POSITION, np.int32)
    if anchors:
        placed = [np.asarray(block.offsets) + start for block, start in zip(anchors, layout.starts, strict=True)]
        positions[:, :count] = np.concatenate(placed, axis=1)[list(layers)]
    kv = []
    for row, l in enumerate(layers):
        rows = _gather_host([block.kv[l] for block in anchors], size) if anchors else None
        kv.append(_place_anchors(rope, rows, positions[row], None if prefix is None else prefix.kv[l]))
    if prefix is not None:
        positions = np.concatenate([np.tile(np.asarray(prefix.positions), (len(layers), 1)), positions], axis=1)
    return AnchorCache(positions, tuple(kv))


def _gather_host(pieces: Sequence[LayerKV], size: int) -> LayerKV:
    """Anchor rows of all chunks side by side in one padded host array: they are few, and one transfer moves them."""

    def join(arrays):
        out = np.zeros((size, *arrays[0].shape[1:]), arrays[0].dtype)
        np.concatenate([np.asarray(a) for a in arrays], out=out[: sum(a.shape[0] for a in arrays)])
        return out

    return LayerKV(join([piece.k for piece in pieces]), join([piece.v for piece in pieces]))


@functools.partial(jax.jit, static_argnames="rope")
def _place_anchors(rope: Rope, rows: LayerKV | None, positions: Int[Array, " A"], prefix: LayerKV | None) -> LayerKV:
    parts = [] if prefix is None else [prefix]
    if rows is not None:
        parts.append(LayerKV(rotate(rows.k, *angles(rope, positions)), rows.v))
    return LayerKV(*(jnp.concatenate(values) for values in zip(*parts, strict=True)))
