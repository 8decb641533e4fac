"""What a chunk store answers beside arrays: a lookup's outcome, why a chunk was missed, what a chunk says of itself.

Nothing here imports jax.
"""

from typing import NamedTuple, TypeAlias

from jfuse.fingerprint import Fingerprint
from jfuse.store.layout import Shape

ChunkId: TypeAlias = str


class ChunkMiss(LookupError):
    """A chunk cannot be served: it is not stored, belongs to another fingerprint, or was found damaged."""

    def __init__(self, id: ChunkId, reason: str, fields: tuple[str, ...] = ()):
        super().__init__(f"chunk {id[:12]}... missed: {reason}")
        self.id = id
        self.reason = reason
        self.fields = fields


class Lookup(NamedTuple):
    """Whether a passage's cache can be served, and if not, why."""

    id: ChunkId
    hit: bool
    reason: str = ""  # of a miss
    fields: tuple[str, ...] = ()  # fingerprint fields that differ from those of a stored cache of the same tokens


class ChunkInfo(NamedTuple):
    """What a stored chunk says of itself."""

    id: ChunkId
    fingerprint: Fingerprint
    shape: Shape
    anchor_ratio: float
    num_bytes: int


class Verification(NamedTuple):
    """What `verify` found."""

    num_checked: int
    damaged: dict[ChunkId, str]  # reasons; these chunks are in quarantine now
