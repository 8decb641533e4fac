"""The host tier: whole chunks of a store in host memory, verified and padded once, ready to move to the device.

Where the device has `pinned_host` memory the chunks lie there, as JAX arrays, and move without the host's help.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from jfuse.config import chunk_bucket
from jfuse.offload import Device, frozen_copy, host_memory, to_host
from jfuse.store import ChunkId, ChunkStore
from jfuse.types import ChunkAnchors, KVCache


class HostedChunk(NamedTuple):
    """A chunk in host memory."""

    tokens: Int32[np.ndarray, " C"]
    kv: KVCache  # un-rotated keys, padded to the chunk's bucket
    anchors: ChunkAnchors  # at the store's anchor ratio, not padded
    num_bytes: int


class HostTier:
    """A bounded, least-recently-used selection of a store's chunks in host memory. Safe for threads.

    Args:
        max_bytes: what the chunks may take; those that do not fit are read from the store as before.
        device: where requests run; the default device by default.
        pinned: None takes pinned memory where it gains something (`offload.host_memory`).
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        max_bytes: int | None = None,
        device: Device | None = None,
        pinned: bool | None = None,
    ):
        """Opens an empty tier.

        Raises:
            ValueError: a cap below 1.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}; use a number of bytes >= 1, or None for no cap.")
        self.store, self.max_bytes = store, max_bytes
        self.device = jax.devices()[0] if device is None else device
        self.kind = host_memory(self.device, pinned=pinned)
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkId, HostedChunk] = OrderedDict()  # least recently used first
        self._used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._used

    def load(self, ids: Sequence[ChunkId]) -> int:
        """Brings chunks into host memory; later ones push out the least recently used. Returns how many now lie there.

        Raises:
            ChunkMiss: the store cannot serve one of them.
        """
        for id in dict.fromkeys(ids):
            if self.get(id) is None:
                self._admit(id)
        with self._lock:
            return sum(id in self._chunks for id in dict.fromkeys(ids))

    def get(self, id: ChunkId) -> HostedChunk | None:
        """The chunk, if it lies here; it stays valid for whoever holds it."""
        with self._lock:
            if id in self._chunks:
                self._chunks.move_to_end(id)
            return self._chunks.get(id)

    def clear(self) -> None:
        """Lets every chunk go."""
        with self._lock:
            self._chunks.clear()
            self._used = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._chunks)

    def _admit(self, id: ChunkId) -> None:
        chunk, anchors = self.store.read([id])[0], self.store.anchors([id])[0]
        rows = chunk_bucket(len(chunk.tokens))
        size = sum(half.nbytes // half.shape[0] * rows for half in jax.tree.leaves(chunk.kv))
        size += sum(a.nbytes for a in jax.tree.leaves((chunk.tokens, anchors)))
        if self.max_bytes is not None and size > self.max_bytes:
            return
        # Copies, because the store may let its bytes go.
        tokens, block = jax.tree.map(lambda a: frozen_copy(a, a.shape[0]), (chunk.tokens, anchors))
        kv = to_host(jax.tree.map(lambda half: frozen_copy(half, rows), chunk.kv), self.device, self.kind)
        with self._lock:
            if id in self._chunks:  # another thread was quicker
                return
            self._chunks[id] = HostedChunk(tokens, kv, block, size)
            self._used += size
            while self.max_bytes is not None and self._used > self.max_bytes:
                self._used -= self._chunks.popitem(last=False)[1].num_bytes
