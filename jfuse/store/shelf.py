"""The chunks that are open: each checked once, watched for changes, and taken out of use when found damaged.

Addresses go in; `Entry` objects or a `ChunkMiss` with its reason come out. Nothing here imports jax.
"""

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from jfuse.store.entry import Entry
from jfuse.store.layout import Damaged, OtherFormat
from jfuse.store.results import ChunkId, ChunkMiss
from jfuse.store.tier import Absent, Stamp, Tier

MAX_OPEN = 128  # files kept mapped between calls; a mapping costs a descriptor
MAX_REASONS = 4096
CHUNK_ID = re.compile(r"[0-9a-f]{64}")


class Shelf:
    """Open entries of one tier. Safe for threads."""

    def __init__(self, tier: Tier):
        self._tier = tier
        self._lock = threading.Lock()
        self._open: OrderedDict[ChunkId, Entry] = OrderedDict()
        self._held: dict[ChunkId, Entry] = {}
        self._holds: Counter[ChunkId] = Counter()
        self._reasons: dict[ChunkId, str] = {}  # why chunks are not there, where more is known than their absence

    def entry(self, id: ChunkId) -> Entry:
        """The chunk under this address, of whatever fingerprint.

        Raises:
            ChunkMiss: it is absent, damaged (and in quarantine now), or of another format version.
            ValueError: not an address; names of files and paths never are.
        """
        if id not in self._open and not CHUNK_ID.fullmatch(id):
            raise ValueError(f"{id!r} is not a chunk's address; use the 64 hex digits that put or lookup returned.")
        stamp = self._tier.stamp(id)
        with self._lock:
            if (held := self._held.get(id)) is not None and _untouched(held.stamp, stamp):
                return held
            if (known := self._open.get(id)) is not None and known.stamp == stamp:
                self._open.move_to_end(id)
                return known
            self._open.pop(id, None)
        entry = self._read(id)
        self.note(id, None)
        with self._lock:
            self._open[id] = entry
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return entry

    @contextmanager
    def guarded(self, entry: Entry) -> Iterator[None]:
        """Turns damage that is found inside the `with` block into quarantine and a `ChunkMiss`."""
        try:
            yield
        except Damaged as error:
            self._condemn(entry.id, entry.stamp, error)

    @contextmanager
    def holding(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Serves these entries inside the `with` block even when they are no longer stored."""
        with self._lock:
            for entry in entries:
                self._held.setdefault(entry.id, entry)
                self._holds[entry.id] += 1
        try:
            yield
        finally:
            with self._lock:
                for entry in entries:
                    self._holds[entry.id] -= 1
                    if not self._holds[entry.id]:
                        del self._holds[entry.id]
                        self._held.pop(entry.id, None)

    def note(self, id: ChunkId, reason: str | None) -> None:
        """Remembers why a chunk is not there; None forgets it. Only the latest reasons are kept."""
        with self._lock:
            self._reasons.pop(id, None)
            if reason is not None:
                self._reasons[id] = reason
            while len(self._reasons) > MAX_REASONS:
                del self._reasons[next(iter(self._reasons))]

    def damaged(self) -> list[ChunkId]:
        """Chunks that were found damaged and have not been stored anew."""
        with self._lock:
            return [id for id, reason in self._reasons.items() if reason.startswith("damaged")]

    def held(self) -> set[ChunkId]:
        """The chunks that must not be evicted."""
        with self._lock:
            return set(self._holds)

    def prune(self) -> None:
        """Closes entries that were evicted or replaced, so that the system can free their bytes."""
        with self._lock:
            for id, entry in list(self._open.items()):
                if self._tier.stamp(id) != entry.stamp:
                    del self._open[id]

    def clear(self) -> None:
        """Closes everything that is not held."""
        with self._lock:
            self._open.clear()
            self._reasons.clear()

    def _read(self, id: ChunkId) -> Entry:
        stamp = None
        try:
            buffer, stamp = self._tier.read(id)
            return Entry(id, buffer, stamp)
        except Absent as absent:
            reason = str(absent)
            raise ChunkMiss(id, self._reasons.get(id, reason) if reason == "absent" else reason) from None
        except OtherFormat as other:
            raise ChunkMiss(id, str(other), ("format_version",)) from None
        except Damaged as error:
            self._condemn(id, stamp, error)

    def _condemn(self, id: ChunkId, stamp: Stamp | None, error: Damaged) -> NoReturn:
        with suppress(OSError):  # it is never served, whether it can be moved or not
            self._tier.quarantine(id, stamp)
        with self._lock:
            self._open.pop(id, None)
            self._held.pop(id, None)
        reason = f"damaged: {error}"
        self.note(id, reason)
        raise ChunkMiss(id, reason) from error


def _untouched(then: Stamp | None, now: Stamp | None) -> bool:
    """Whether bytes read earlier are still whole: a removed or replaced file stays as it was for its readers."""
    return then is None or now is None or then.file != now.file or then == now
