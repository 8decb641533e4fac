"""ChunkStore: a content-addressed store of chunk caches that would rather miss than lie.

Chunks go in under the fingerprint of the model that made them; whole chunks, single layers and anchors come out as
read-only NumPy views, each range verified when it is first read. Moving them to a device is the caller's business.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
from jaxtyping import Int32

from jfuse.anchors import default_rule
from jfuse.config import checked_ratio
from jfuse.fingerprint import (
    FORMAT_VERSION,
    AnchorRuleLike,
    Fingerprint,
    checked_tokens,
    chunk_id,
    differing,
    tokens_digest,
)
from jfuse.store.admission import admitted
from jfuse.store.entry import Entry
from jfuse.store.index import Index
from jfuse.store.layout import Encoded, encode
from jfuse.store.results import ChunkId, ChunkInfo, ChunkMiss, Lookup, Verification
from jfuse.store.shelf import Shelf
from jfuse.store.tier import StoreError, Tier, Usage
from jfuse.store.urls import tier_at
from jfuse.types import Chunk, ChunkAnchors, LayerKV, Origin


class ChunkStore:
    """Chunk caches by content address; equal passages of equal fingerprint are stored once.

    Every tier offers the same: what is read is what was put, bit for bit, or a `ChunkMiss`. Safe for threads; a folder
    is safe for processes too. Least recently used chunks give way once `max_bytes` are reached.

    Example:
        >>> import numpy as np
        >>> fingerprint = Fingerprint("w", "c", "r", "none", "none", "none", (), 0, "float32")
        >>> store = ChunkStore.open("memory://", fingerprint)
        >>> half = np.ones((3, 2, 4), np.float32)
        >>> id = store.put(Chunk(np.arange(3), (LayerKV(half, half),), np.zeros((1, 3), np.float32)))
        >>> store.lookup([0, 1, 2]).hit, store.lookup([2, 1, 0]).reason
        (True, 'absent')
    """

    def __init__(
        self,
        tier: Tier,
        fingerprint: Fingerprint | None,
        *,
        anchor_ratio: float = 0.1,
        anchor_rule: AnchorRuleLike | None = None,
    ):
        self.fingerprint = fingerprint
        self.anchor_rule: Any = anchor_rule  # what missing chunks are to be encoded with; None: the model's default
        self.anchor_ratio = checked_ratio(anchor_ratio, name="anchor_ratio")
        self._tier = tier
        self._shelf = Shelf(tier)
        self._index = Index(tier)
        self._warned = False

    @classmethod
    def open(
        cls,
        url: str | PathLike[str],
        model: Any = None,
        *,
        anchor_rule: AnchorRuleLike | None = None,
        anchor_ratio: float = 0.1,
        max_bytes: int | None = None,
    ) -> "ChunkStore":
        """Opens a store, making its folder if it is missing.

        Args:
            url: `memory://`, `file://PATH`, or a path.
            model: the `Model` whose caches are stored, or their `Fingerprint`. None opens the store for `ids`,
                `inspect`, `verify`, `usage` and `clear` only.
            anchor_rule: the rule that scores the model's chunks; None is the default one, as in `encode_chunk`.
            anchor_ratio: share of each chunk that is kept a second time, compactly, for probes.
            max_bytes: hard cap on what the store takes, counting what it holds already. None: no cap.

        Raises:
            StoreError: unknown scheme, unusable folder, a cap below 1, or chunks of a newer format.
            ValueError: the model has no weights identity.
        """
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise StoreError(f"max_bytes is {max_bytes!r}; use a number of bytes >= 1, or None for no cap.")
        if model is None or isinstance(model, Fingerprint):
            fingerprint = model
        else:
            fingerprint = Fingerprint.of(model, anchor_rule=anchor_rule or default_rule(model))
        if fingerprint is not None and fingerprint.format_version != FORMAT_VERSION:
            raise StoreError(
                f"format_version is {fingerprint.format_version}; this jfuse writes {FORMAT_VERSION} only."
            )
        store = cls(tier_at(str(url), max_bytes), fingerprint, anchor_ratio=anchor_ratio, anchor_rule=anchor_rule)
        store._refresh(refuse_newer=True)
        store._tier.trim()
        return store

    @property
    def url(self) -> str:
        """Where the chunks lie."""
        return self._tier.url

    @property
    def num_bytes(self) -> int:
        """Bytes that count towards the cap."""
        return self._tier.usage().num_bytes

    def put(self, chunk: Chunk) -> ChunkId:
        """Stores a chunk and returns its address; one that is stored already is left as it is.

        A store that cannot take it (disk full, larger than the cap) says so once, as a warning, and goes on: the
        address is returned, and the chunk stays absent. Keep the chunk in hand until the request is done.

        Raises:
            ValueError: NaN or infinite keys or values, inconsistent shapes, another dtype than the fingerprint's, or a
                chunk that another model or anchor rule made.
        """
        fingerprint = self._fingerprint("put")
        tokens, kv, score = admitted(chunk, fingerprint)
        id = chunk_id(fingerprint, tokens)
        try:
            self._shelf.entry(id)
        except ChunkMiss:
            self._write(encode(fingerprint, tokens, kv, score, anchor_ratio=self.anchor_ratio))
        self._tier.touch(id)
        return id

    def lookup(self, tokens: Any) -> Lookup:
        """Whether the cache of these tokens can be served. Checks everything but the layers themselves.

        A miss names its reason: absent, damaged, not stored, or the fingerprint fields in which a stored cache of the
        same tokens differs.
        """
        ids = checked_tokens(tokens)
        fingerprint = self._fingerprint("lookup")
        id = chunk_id(fingerprint, ids)
        try:
            self._shelf.entry(id)
        except ChunkMiss as miss:
            if miss.reason == "absent":
                return self._explained(id, fingerprint, tokens_digest(ids))
            return Lookup(id, False, miss.reason, miss.fields)
        self._tier.touch(id)
        return Lookup(id, True)

    def read(self, ids: Sequence[ChunkId]) -> list[Chunk]:
        """Whole chunks, every layer verified.

        Raises:
            ChunkMiss: one of them cannot be served.
        """
        chunks = []
        for entry in self._used(ids):
            layers = tuple(self._layer(entry, l, values=True) for l in range(entry.num_layers))
            origin = Origin(entry.header.fingerprint.digest)
            chunks.append(Chunk(entry.tokens, layers, entry.anchor_score, origin))
        return chunks

    def tokens(self, ids: Sequence[ChunkId]) -> list[Int32[np.ndarray, " C"]]:
        """Token ids only. Raises `ChunkMiss` as `read` does."""
        return [entry.tokens for entry in self._used(ids)]

    def anchors(
        self, ids: Sequence[ChunkId], ratio: float | None = None, *, until: int | None = None
    ) -> list[ChunkAnchors]:
        """The anchors of each chunk: per layer the ceil(ratio * C) positions of highest score, ties to the lower one.

        The store's own ratio reads one compact range of each chunk, another one gathers rows from whole layers.

        Args:
            ratio: the share of each chunk; None is the store's own.
            until: only the first `until` layers; None reads all.

        Raises:
            ChunkMiss: one of them cannot be served.
        """
        ratio = self.anchor_ratio if ratio is None else checked_ratio(ratio, name="ratio")
        found = []
        for entry in self._used(ids):
            depth = entry.num_layers if until is None else until
            if not 0 <= depth <= entry.num_layers:
                raise ValueError(f"until is {until}; this store's chunks have {entry.num_layers} layers.")
            with self._shelf.guarded(entry):
                offsets, pairs = entry.anchors(ratio, depth)
            found.append(ChunkAnchors(offsets, tuple(LayerKV(k, v) for k, v in pairs)))
        return found

    def layer(self, ids: Sequence[ChunkId], l: int, *, values: bool = True) -> list[LayerKV]:
        """One layer of each chunk, keys un-rotated. Without `values` only keys are read and `v` has no rows.

        Raises:
            ChunkMiss: one of them cannot be served.
            ValueError: no such layer.
        """
        entries = [self._own(id) for id in ids]
        for entry in entries:
            if not 0 <= l < entry.num_layers:
                raise ValueError(f"layer is {l}; this store's chunks have layers 0..{entry.num_layers - 1}.")
        return [self._layer(entry, l, values=values) for entry in entries]

    @contextmanager
    def hold(self, ids: Sequence[ChunkId]) -> Iterator[None]:
        """Keeps these chunks readable inside the `with` block, whatever is evicted, cleared or put meanwhile.

        Raises:
            ChunkMiss: one of them cannot be served now.
        """
        with self._shelf.holding([self._own(id) for id in ids]):
            yield

    def ids(self) -> list[ChunkId]:
        """Addresses of the chunks under this store's fingerprint; of all chunks, if it was opened without a model."""
        self._refresh()
        chunks = self._index.chunks.items()
        return sorted(id for id, known in chunks if self.fingerprint in (None, known.fingerprint))

    def inspect(self, id: ChunkId) -> ChunkInfo:
        """What a chunk of any fingerprint says of itself.

        Raises:
            ChunkMiss: it is not stored, or damaged.
        """
        entry = self._shelf.entry(id)
        header = entry.header
        return ChunkInfo(id, header.fingerprint, header.shape, header.anchor_ratio, entry.num_bytes)

    def verify(self, ids: Sequence[ChunkId] | None = None) -> Verification:
        """Reads every byte of the given chunks again; damaged ones go to quarantine.

        Args:
            ids: None stands for all in the store, and reports those that were found damaged since it was opened, too.
        """
        if ids is None:
            self._refresh()
            ids = sorted({*self._tier.ids(), *self._shelf.damaged()})
        damaged = {}
        for id in ids:
            try:
                entry = self._shelf.entry(id)
                with self._shelf.guarded(entry):
                    entry.verify()
            except ChunkMiss as miss:
                if miss.reason != "absent":
                    damaged[id] = miss.reason
        return Verification(len(ids), damaged)

    def clear(self) -> None:
        """Removes every chunk, whatever its fingerprint, and everything in quarantine."""
        self._tier.clear()
        self._shelf.clear()
        self._index.clear()

    def usage(self) -> Usage:
        """Counts, bytes and evictions."""
        return self._tier.usage()

    def __contains__(self, id: object) -> bool:
        try:
            return isinstance(id, str) and self._own(id) is not None
        except (ChunkMiss, ValueError):
            return False

    def __len__(self) -> int:
        return len(self.ids())

    def __repr__(self) -> str:
        return f"ChunkStore({self.url!r}, {len(self)} chunks, {self.num_bytes / 1e6:.1f} MB)"

    def _fingerprint(self, what: str) -> Fingerprint:
        if self.fingerprint is None:
            raise StoreError(f"this store was opened without a model, so it cannot {what}; open it with one.")
        return self.fingerprint

    def _own(self, id: ChunkId) -> Entry:
        """The entry, if it may be used with this store's model."""
        fingerprint = self._fingerprint("serve chunks")
        entry = self._shelf.entry(id)
        if entry.header.fingerprint.digest != fingerprint.digest:
            fields = differing(entry.header.fingerprint, fingerprint)
            raise ChunkMiss(id, _mismatch(fields), fields)
        return entry

    def _used(self, ids: Sequence[ChunkId]) -> list[Entry]:
        entries = [self._own(id) for id in ids]
        for id in ids:
            self._tier.touch(id)
        return entries

    def _layer(self, entry: Entry, l: int, *, values: bool) -> LayerKV:
        with self._shelf.guarded(entry):
            return LayerKV(*entry.layer(l, values=values))

    def _refresh(self, *, refuse_newer: bool = False) -> None:
        damaged = self._index.refresh(refuse_newer=refuse_newer)
        for id, reason in damaged.items():
            self._shelf.note(id, reason)

    def _explained(self, id: ChunkId, fingerprint: Fingerprint, tokens_sha256: str) -> Lookup:
        self._refresh()
        fields = self._index.nearest(fingerprint, tokens_sha256)
        return Lookup(id, False, _mismatch(fields) if fields else "absent", fields)

    def _write(self, encoded: Encoded) -> None:
        try:
            self._tier.write(encoded.id, encoded.parts, encoded.num_bytes, keep=self._shelf.held())
        except OSError as error:
            self._shelf.note(encoded.id, f"not stored: {error.strerror}")
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.url} did not take a chunk ({error.strerror}); answers stay right, "
                    "but chunks that do not fit are encoded again each time.",
                    RuntimeWarning,
                    stacklevel=3,
                )
        else:
            self._shelf.note(encoded.id, None)
        self._shelf.prune()


def _mismatch(fields: tuple[str, ...]) -> str:
    return f"stored under another fingerprint: {', '.join(fields)} differ{'s' if len(fields) == 1 else ''}"
