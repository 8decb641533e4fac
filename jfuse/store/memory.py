"""The `memory://` tier: chunks in this process's memory, gone with the store that holds them."""

import errno
import itertools
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np

from jfuse.store.layout import ALIGNMENT
from jfuse.store.tier import Absent, NoRoom, Part, Stamp, Stored, Usage


class MemoryTier:
    """A dictionary of byte strings in order of use."""

    url = "memory://"

    def __init__(self, max_bytes: int | None = None):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # least recently used first
        self._quarantined: list[Part] = []
        self._used = 0
        self._evictions = 0
        self._stamps = itertools.count()

    def write(self, id: str, parts: Iterable[Part], num_bytes: int, *, keep: Collection[str] = ()) -> None:
        """Copies the parts into one aligned, read-only buffer."""
        padded = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -padded.ctypes.data % ALIGNMENT
        buffer, filled = padded[start : start + num_bytes], 0
        for part in parts:
            buffer[filled : filled + len(part)] = part
            filled += len(part)
        if filled != num_bytes:
            raise OSError(errno.EIO, f"{filled} bytes came instead of {num_bytes}")
        buffer.flags.writeable = False
        with self._lock:
            self._make_room(num_bytes, keep={*keep} - {id})
            self._remove(id)
            self._stored[id] = Stored(buffer, Stamp(next(self._stamps), None))
            self._used += num_bytes

    def read(self, id: str) -> Stored:
        """The buffer that `write` made."""
        with self._lock:
            if id not in self._stored:
                raise Absent("absent")
            return self._stored[id]

    def stamp(self, id: str) -> Stamp | None:
        """Serial number of the write."""
        with self._lock:
            return self._stored[id].stamp if id in self._stored else None

    def head(self, id: str, num_bytes: int) -> tuple[bytes, int]:
        """The first bytes and the size of the whole."""
        buffer = self.read(id).buffer
        return buffer[:num_bytes].tobytes(), len(buffer)

    def ids(self) -> list[str]:
        """Every stored address."""
        with self._lock:
            return list(self._stored)

    def touch(self, id: str) -> None:
        """Moves the entry to the end of the order of use."""
        with self._lock:
            if id in self._stored:
                self._stored.move_to_end(id)

    def quarantine(self, id: str, stamp: Stamp | None) -> None:
        """Sets the entry aside."""
        with self._lock:
            if id in self._stored and self._stored[id].stamp == stamp:
                self._quarantined.append(self._stored.pop(id).buffer)

    def trim(self) -> None:
        """Nothing to do: no write ever exceeds the cap."""

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._stored.clear()
            self._quarantined.clear()
            self._used = 0

    def usage(self) -> Usage:
        """How full the tier is."""
        with self._lock:
            return Usage(len(self._stored), self._used, self._max_bytes, len(self._quarantined), self._evictions)

    def _remove(self, id: str) -> None:
        if id in self._stored:
            self._used -= len(self._stored.pop(id).buffer)

    def _make_room(self, num_bytes: int, *, keep: Collection[str]) -> None:
        if self._max_bytes is None:
            return
        kept = sum(len(self._stored[id].buffer) for id in keep if id in self._stored)
        if kept + num_bytes > self._max_bytes:
            raise NoRoom(errno.ENOSPC, f"{num_bytes} bytes do not fit under the cap of {self._max_bytes}")
        while self._quarantined and self._used + num_bytes > self._max_bytes:
            self._used -= len(self._quarantined.pop(0))
        victims = iter([]) if self._used + num_bytes <= self._max_bytes else iter(list(self._stored))
        while self._used + num_bytes > self._max_bytes:
            if (victim := next(victims)) not in keep:
                self._remove(victim)
                self._evictions += 1
