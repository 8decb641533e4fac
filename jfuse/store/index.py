"""Which chunks a tier holds, of any fingerprint: rebuilt from the headers of self-describing files.

It serves listings and the reasons of misses; whether a chunk can be served is always asked of the tier itself.
"""

from contextlib import suppress
from typing import NamedTuple

from jfuse.fingerprint import Fingerprint, differing
from jfuse.store.layout import FORMAT_VERSION, Damaged, OtherFormat, header_length, read_header
from jfuse.store.tier import Absent, StoreError, Tier

HEADER_GUESS = 16 << 10  # most headers are shorter, so that one read serves


class Known(NamedTuple):
    """What is remembered of a stored chunk."""

    fingerprint: Fingerprint
    tokens_sha256: str


class Index:
    """Stored chunks by address. Safe for threads: every refresh replaces what it knows."""

    def __init__(self, tier: Tier):
        self.chunks: dict[str, Known] = {}
        self._tier = tier
        self._others: dict[str, OtherFormat] = {}
        self._fingerprints: dict[Fingerprint, Fingerprint] = {}  # thousands of chunks share a few

    def refresh(self, *, refuse_newer: bool = False) -> dict[str, str]:
        """Reads the headers of chunks that came since and forgets those that went; damaged ones go to quarantine.

        Returns:
            The damaged chunks with their reasons.

        Raises:
            StoreError: `refuse_newer`, and a chunk of a newer format version is stored.
        """
        chunks, others, damaged = {}, {}, {}
        for id in self._tier.ids():
            if id in self.chunks:
                chunks[id] = self.chunks[id]
                continue
            stamp = self._tier.stamp(id)
            try:
                chunks[id] = self._read(id)
            except Absent:
                continue
            except OtherFormat as other:
                others[id] = other
            except Damaged as error:
                with suppress(OSError):
                    self._tier.quarantine(id, stamp)
                damaged[id] = f"damaged: {error}"
        newest = max((other.version for other in others.values()), default=0)
        if refuse_newer and newest > FORMAT_VERSION:
            raise StoreError(
                f"{self._tier.url} holds chunks of format version {newest}, and this jfuse reads version "
                f"{FORMAT_VERSION}; update jfuse or use another folder."
            )
        self.chunks, self._others = chunks, others
        return damaged

    def clear(self) -> None:
        """Forgets everything."""
        self.chunks, self._others = {}, {}

    def nearest(self, fingerprint: Fingerprint, tokens_sha256: str) -> tuple[str, ...]:
        """The fewest fields in which a stored chunk of these tokens differs; empty if there is none."""
        same = [known.fingerprint for known in self.chunks.values() if known.tokens_sha256 == tokens_sha256]
        fields = [differing(stored, fingerprint) for stored in same]
        if not fields and any(other.tokens_sha256 == tokens_sha256 for other in self._others.values()):
            return ("format_version",)
        return min(fields, key=len, default=())

    def _read(self, id: str) -> Known:
        head, num_bytes = self._tier.head(id, HEADER_GUESS)
        needed = header_length(head, num_bytes) + 8
        if needed > len(head):
            head, num_bytes = self._tier.head(id, needed)
        header = read_header(head, num_bytes)
        if header.id != id:
            raise Damaged(f"it holds the chunk {header.id}")
        shared = self._fingerprints.setdefault(header.fingerprint, header.fingerprint)
        return Known(shared, header.tokens_sha256)
