"""Where a request's chunk caches come from: device memory, host memory, or a store.

A source hands out one chunk's layer at a time, keys un-rotated, in NumPy or JAX arrays that nobody writes to again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jfuse.anchors import AnchorRule, chunk_anchors
from jfuse.config import chunk_bucket
from jfuse.host_tier import HostTier
from jfuse.offload import device_of, to_device
from jfuse.stitch import pad_rows
from jfuse.store import ChunkMiss, ChunkStore
from jfuse.types import Chunk, ChunkAnchors, LayerKV


class Lost(Exception):
    """A chunk of the request could not be read after all; with its tokens it can be encoded again."""

    def __init__(self, index: int, reason: str):
        super().__init__(f"chunk {index} of the request was lost while it was read: {reason}")
        self.index = index
        self.reason = reason


@runtime_checkable
class Source(Protocol):
    """The chunks of one request, in order. Methods may be called from a background thread, one call at a time."""

    @property
    def tokens(self) -> Sequence[Int[np.ndarray, " _"]]:
        """Token ids of each chunk."""
        ...

    @property
    def waits(self) -> bool:
        """Whether a read takes time of its own, so that a thread should do it."""
        ...

    @property
    def anchor_rule(self) -> AnchorRule | None:
        """What chunks that are lost meanwhile are encoded with; None is the model's default rule."""
        ...

    def tier(self, i: int) -> str:
        """Where chunk i lies: "device", "host", "memory", "disk"."""
        ...

    def anchors(self, i: int, ratio: float, until: int) -> ChunkAnchors:
        """The anchor block of chunk i, the first `until` layers."""
        ...

    def layer(self, i: int, l: int, *, keys: bool = True, values: bool = True) -> LayerKV:
        """Layer l of chunk i; a half that is not asked for comes without rows, and is not read."""
        ...

    def mend(self, i: int, chunk: Chunk) -> None:
        """Takes an encoded chunk in place of one that was lost."""
        ...


class ResidentChunks:
    """Chunks in device memory, padded to their buckets: the source of cache-ready measurements."""

    waits, anchor_rule = False, None

    def __init__(self, chunks: Sequence[Chunk], anchor_ratio: float = 0.1):
        self.tokens = [np.asarray(chunk.tokens) for chunk in chunks]
        self._kv = [
            tuple(to_device(pad_rows(kv, chunk_bucket(len(chunk.tokens))), device_of(())) for kv in chunk.kv)
            for chunk in chunks
        ]
        self._ratio, self._anchors = anchor_ratio, [chunk_anchors(chunk, anchor_ratio) for chunk in chunks]
        self._chunks = list(chunks)

    def tier(self, i: int) -> str:
        """The device."""
        return "device"

    def anchors(self, i: int, ratio: float, until: int) -> ChunkAnchors:
        """The block made at construction, or a new one for another ratio."""
        return self._anchors[i] if ratio == self._ratio else chunk_anchors(self._chunks[i], ratio)

    def layer(self, i: int, l: int, *, keys: bool = True, values: bool = True) -> LayerKV:
        """Device arrays, nothing is copied."""
        return part_of(self._kv[i][l], keys, values)

    def mend(self, i: int, chunk: Chunk) -> None:
        """Never needed: nothing here is read again."""
        raise AssertionError("chunks in device memory are not lost")


class StoredChunks:
    """Chunks of a store, read as they are needed, from a host tier where they lie there already.

    Args:
        computed: chunks by their index that the store does not hold, kept in memory for the request.
        host: a host tier above the store.
    """

    def __init__(
        self,
        store: ChunkStore,
        ids: Sequence[str],
        computed: Mapping[int, Chunk] | None = None,
        *,
        host: HostTier | None = None,
    ):
        self._store, self._ids, self.computed = store, list(ids), dict(computed or {})
        self._disk = "memory" if store.url.startswith("memory:") else "disk"
        self._hosted = {i: found for i, id in enumerate(ids) if host is not None and (found := host.get(id))}
        self.tokens = [
            np.asarray(self.computed[i].tokens)
            if i in self.computed
            else self._hosted[i].tokens
            if i in self._hosted
            else store.tokens([id])[0]
            for i, id in enumerate(ids)
        ]

    @property
    def anchor_rule(self) -> AnchorRule | None:
        """The store's."""
        return self._store.anchor_rule

    @property
    def waits(self) -> bool:
        """Unless every chunk lies in host memory."""
        return len(self._hosted.keys() | self.computed.keys()) < len(self._ids)

    def tier(self, i: int) -> str:
        """Where the chunk is read from."""
        return "memory" if i in self.computed else "host" if i in self._hosted else self._disk

    def anchors(self, i: int, ratio: float, until: int) -> ChunkAnchors:
        """The anchor block, read alone.

        Raises:
            Lost: it cannot be read.
        """
        if i in self.computed:
            return chunk_anchors(self.computed[i], ratio)
        if i in self._hosted and ratio == self._store.anchor_ratio:
            return self._hosted[i].anchors
        return self._read(i, lambda: self._store.anchors([self._ids[i]], ratio, until=until)[0])

    def layer(self, i: int, l: int, *, keys: bool = True, values: bool = True) -> LayerKV:
        """One layer, checked as it is read.

        Raises:
            Lost: it cannot be read, or was found damaged.
        """
        if i in self.computed:
            return part_of(self.computed[i].kv[l], keys, values)
        if i in self._hosted:
            return part_of(self._hosted[i].kv[l], keys, values)
        return self._read(i, lambda: part_of(self._store.layer([self._ids[i]], l, values=values)[0], keys, values))

    def mend(self, i: int, chunk: Chunk) -> None:
        """Serves the encoded chunk from now on, wherever the request repeats it."""
        same = [j for j, id in enumerate(self._ids) if id == self._ids[i]]
        self.computed.update({j: chunk for j in same})

    def _read(self, i: int, read: Any) -> Any:
        try:
            return read()
        except ChunkMiss as miss:
            raise Lost(i, miss.reason) from miss
        except OSError as error:
            raise Lost(i, f"not readable: {error}") from error


def part_of(layer: LayerKV, keys: bool, values: bool) -> LayerKV:
    """The layer without the rows of a half that is not wanted."""
    return LayerKV(layer.k if keys else _no_rows(layer.k), layer.v if values else _no_rows(layer.v))


def _no_rows(half: Any) -> np.ndarray:
    """No rows of this half. On the host, because slicing a device array would be an operation on the device."""
    return np.empty((0, *half.shape[1:]), half.dtype)
