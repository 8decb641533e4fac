"""The arrays that flow through jfuse, as NamedTuples: chunk caches, request caches, evidence, selections.

Axis legend, used by every signature of the package:
`L` layers · `Lv` layers in a view · `S` context positions (padded) · `C` chunk length · `T` tokens in ·
`U` query tokens · `R` recomputed rows · `A` anchors · `N` query heads · `K` KV heads · `H` head size ·
`D` model width · `V` vocabulary.

Small integer metadata (tokens, positions, segments) may live on the host as NumPy arrays, so that counting
never waits for the device.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

if TYPE_CHECKING:
    AnyArray: TypeAlias = Any  # NumPy and JAX arrays share no static protocol
else:
    AnyArray: TypeAlias = Array | np.ndarray

PAD_POSITION = 2**30
"""Position of padding: later than every real position, so that no real row ever sees it."""

PREFIX_SEGMENT = -2
PADDING_SEGMENT = -1


class LayerKV(NamedTuple):
    """Keys and values of one layer.

    In a `Chunk` the keys are un-rotated (after bias and q/k-norm, before RoPE); in a `ContextCache` they carry
    RoPE for the positions they stand at.
    """

    k: Float[AnyArray, "S K H"]
    v: Float[AnyArray, "S K H"]


KVCache: TypeAlias = tuple[LayerKV, ...]


@jax.tree_util.register_static
class Origin(str):
    """Digest of the `Fingerprint` of the model and anchor rule that made a chunk. No leaf of a pytree."""


class Chunk(NamedTuple):
    """A reusable passage and its position-independent cache (PIC), encoded alone from position 0 (QCFuse eq. 3)."""

    tokens: Int[AnyArray, " C"]
    kv: KVCache  # un-rotated keys; exactly C entries, no padding
    anchor_score: Float[AnyArray, "L C"]  # G(r) of the anchor rule (QCFuse eq. 14), higher means keep
    origin: Origin | None = None  # None where the model has no weights identity; a store refuses what others made


class ChunkAnchors(NamedTuple):
    """The anchors of one chunk: per layer the A = ceil(ratio * C) entries that its anchor rule keeps.

    Ranks differ by layer, counts do not (QCFuse stores the same compact block beside each chunk).
    """

    offsets: Int[AnyArray, "L A"]  # positions inside the chunk, sorted
    kv: KVCache  # L layers of A entries, un-rotated keys


class AnchorCache(NamedTuple):
    """The compact probe view of one request: system prefix and anchors at their request positions (QCFuse eq. 16)."""

    positions: Int[AnyArray, "La A"]  # may differ by layer; the same count on every layer; PAD_POSITION is padding
    kv: KVCache  # La layers, keys rotated


class Sizes(NamedTuple):
    """Token counts of the parts of a request, which budgets are reckoned from. Host integers."""

    prefix: int
    chunks: tuple[int, ...]
    query: int = 0

    @property
    def context(self) -> int:
        """Context tokens N: neither prefix nor query."""
        return sum(self.chunks)


class ContextCache(NamedTuple):
    """The cache of one request's system prefix and context, in any state: stitched, fused or full prefill.

    Entries stand in request order (prefix, chunks, padding), so that entry `i` of the unpadded part has position `i`.
    """

    tokens: Int[AnyArray, " S"]
    positions: Int[AnyArray, " S"]  # PAD_POSITION where padded
    segments: Int[AnyArray, " S"]  # chunk index; PREFIX_SEGMENT or PADDING_SEGMENT; budgets count >= 0
    kv: KVCache  # while serving also a mapping of layers (selection), or an iterator that brings each once (fusion)

    @property
    def num_tokens(self) -> int:
        """Context tokens N that a budget counts: neither prefix nor padding. Host metadata only."""
        return int((np.asarray(self.segments) >= 0).sum())

    @property
    def end(self) -> int:
        """Position after the last real entry, where the query starts. Host metadata only."""
        return int((np.asarray(self.segments) != PADDING_SEGMENT).sum())

    def sizes(self, num_query: int = 0) -> Sizes:
        """Token counts of prefix, chunks and a query of `num_query` tokens. Host metadata only."""
        segments = np.asarray(self.segments)
        lengths = np.bincount(segments[segments >= 0])
        return Sizes(int((segments == PREFIX_SEGMENT).sum()), tuple(int(n) for n in lengths), num_query)


class Begun(NamedTuple):
    """The first F layers of a fusion, which a probe has run already because its selector looks at them (CacheBlend)."""

    kv: KVCache  # what these layers hold then; the last of them was run up to its keys and values
    x: Float[Array, "S D"]  # hidden states that enter the last of them
    ran: Bool[AnyArray, "F S"]  # the context positions that were run at each


class Evidence(NamedTuple):
    """What a selector may look at: the layers of its view, in the view's order.

    Attributes:
        queries: query states at request positions, rotated, a layer each [U, N, H] (QCFuse eqs. 9, 17).
        pic: cached context entries at request positions, a layer each [S, K, H]; prefix and padding included.
        query: the query's own keys and values, for denominators that include them.
        begun: recomputed first layers, for views that ask for them (CacheBlend).
        scoring_rows: which query rows are the question proper, without the template; padding is False [U].
        query_positions: PAD_POSITION where padded [U].
        positions: PAD_POSITION where padded [S].
        segments: chunk of every entry, counted from 0; PREFIX_SEGMENT (-2) and PADDING_SEGMENT (-1) are never selected
            [S].
        offsets: position of every entry inside its own chunk [S].
    """

    queries: tuple[Float[Array, "U N H"], ...]
    pic: tuple[LayerKV, ...]
    query: tuple[LayerKV, ...]
    begun: Begun | None
    scoring_rows: Bool[AnyArray, " U"]
    query_positions: Int[AnyArray, " U"]
    positions: Int[AnyArray, " S"]
    segments: Int[AnyArray, " S"]
    offsets: Int[AnyArray, " S"]

    @property
    def fresh(self) -> KVCache:
        """Keys and values of the recomputed first layers."""
        return () if self.begun is None else self.begun.kv


class Selection(NamedTuple):
    """How much of each position to recompute at each layer, and which positions recomputed rows may see.

    Hard selections are bool, soft ones are floats in [0, 1]. `recompute` never grows with depth. A row always sees
    itself and the system prefix; the query always sees everything.
    """

    recompute: Shaped[AnyArray, "L S"]
    visible: Shaped[AnyArray, "Lc S"]  # Lc = 1 (one set for all layers) or L; all ones when unrestricted
    window: Int[AnyArray, ""]  # the `window` positions before each row are visible too
