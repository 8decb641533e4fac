"""What a place for chunks must offer, and its errors. `MemoryTier` and `FileTier` offer it.

A tier keeps byte strings under content addresses, up to a cap. It knows nothing of their layout. Nothing here imports
jax.
"""

from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8

Part = UInt8[np.ndarray, " _"]


class StoreError(Exception):
    """A store cannot be used as asked; the message is one line with the remedy."""


class Absent(Exception):
    """Nothing readable is stored under this address; the message says why."""


class NoRoom(OSError):
    """The entry would exceed the tier's cap, whatever was evicted."""


class Usage(NamedTuple):
    """How full a store is. Everything counts towards the cap, what earlier processes left included."""

    num_chunks: int
    num_bytes: int  # chunks, unfinished writes and quarantined files
    max_bytes: int | None
    num_quarantined: int
    evictions: int  # by this process


class Stamp(NamedTuple):
    """Tells whether what is stored under an address is still what was read there."""

    file: int  # another one: replaced as a whole, and bytes read earlier are untouched
    content: Hashable  # another one in the same file: changed in place, and bytes read earlier may have changed


class Stored(NamedTuple):
    """Bytes found under an address, read-only."""

    buffer: Part
    stamp: Stamp


@runtime_checkable
class Tier(Protocol):
    """A bounded place for byte strings, safe for many threads (and, on disk, many processes)."""

    url: str

    def write(self, id: str, parts: Iterable[Part], num_bytes: int, *, keep: Collection[str] = ()) -> None:
        """Stores the joined parts, or nothing at all. Evicts the least recently used beside `keep` to make room.

        Raises:
            OSError: it could not be stored, after one retry if the place was full.
        """
        ...

    def read(self, id: str) -> Stored:
        """The bytes, read-only and without a copy.

        Raises:
            Absent: nothing is there, or what is there is no chunk's file.
        """
        ...

    def stamp(self, id: str) -> Stamp | None:
        """The stamp that `read` would give, or None if nothing is there."""
        ...

    def head(self, id: str, num_bytes: int) -> tuple[bytes, int]:
        """The first bytes and the size of the whole. Raises `Absent` as `read` does."""
        ...

    def ids(self) -> list[str]:
        """Every stored address."""
        ...

    def touch(self, id: str) -> None:
        """Marks the entry as just used."""
        ...

    def quarantine(self, id: str, stamp: Stamp | None) -> None:
        """Takes the entry out of use and keeps its bytes for inspection, unless it was replaced since `stamp`."""
        ...

    def trim(self) -> None:
        """Brings what is stored under the cap."""
        ...

    def clear(self) -> None:
        """Removes every entry, quarantined ones too. Nothing else in the place is touched."""
        ...

    def usage(self) -> Usage:
        """How full the place is."""
        ...
