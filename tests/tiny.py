"""Tiny models of every family and the requests that the core tests share, each built once per process."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jfuse.anchors import chunk_anchors
from jfuse.chunks import encode_chunk
from jfuse.config import View, round_up
from jfuse.models.decoder import Model, prefill
from jfuse.models.rope import Rope, default_rope
from jfuse.models.tiny import tiny_model
from jfuse.pipeline import encode_prefix
from jfuse.probe import probe
from jfuse.selectors.base import Selector, budget_for, select
from jfuse.stitch import make_layout, stitch, stitch_anchors
from jfuse.types import AnchorCache, Chunk, ContextCache, Evidence, Selection
from tests.reference import Reference, restricted_mask

SIZE = 192  # one context bucket for nearly all tests, so that they share what is compiled
LENGTHS = (21, 1, 34, 13)
FACTORS = np.array([1.0, 1.1, 1.7, 2.5, 3.0, 4.5])

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_layers": 3, "num_heads": 6, "num_kv_heads": 3, "head_size": 12},
    "qwen2": {"num_layers": 3, "tied": True},
    "qwen3": {"num_layers": 3, "num_kv_heads": 1},
    "phi3-longrope-biases": {
        "num_layers": 3,  # and partial rotary: 12 of 16 dimensions
        "out_bias": True,
        "mlp_bias": True,
        "rope": Rope("longrope", tuple((np.array(default_rope(12, 1e4).inv_freq) / FACTORS).tolist()), 1.19),
    },
}


class Request(NamedTuple):
    """One request with everything that its phases need, and the dense reference of the same weights."""

    model: Model
    reference: Reference
    chunks: tuple[Chunk, ...]
    prefix: ContextCache | None
    query: np.ndarray
    pad_to: int
    context: ContextCache  # stitched

    @property
    def num_prefix(self) -> int:
        return 0 if self.prefix is None else self.prefix.end

    @property
    def num_context(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def end(self) -> int:
        return self.num_prefix + self.num_context

    @property
    def ids(self) -> np.ndarray:
        """Prefix, chunks and query, exactly as they stand side by side."""
        prefix = [] if self.prefix is None else [self.prefix.tokens[: self.num_prefix]]
        return np.concatenate([*prefix, *(chunk.tokens for chunk in self.chunks), self.query])

    def full(self) -> ContextCache:
        """The library's own full prefill of the context."""
        kv = prefill(self.model, self.context.tokens, self.context.positions, hidden="none").kv
        return self.context._replace(kv=kv)

    def anchors(self, ratio: float = 0.1, *, blocks: bool = True) -> AnchorCache:
        """Prefix and anchors; the prefix alone without `blocks`."""
        pieces = [chunk.tokens for chunk in self.chunks]
        prefix = None if self.prefix is None else self.prefix.tokens[: self.num_prefix]
        return stitch_anchors(
            [chunk_anchors(chunk, ratio) for chunk in self.chunks] if blocks else [],
            self.model.config.rope,
            make_layout(pieces, prefix, pad_to=self.pad_to),
            prefix=self.prefix,
            ratio=ratio,
            pad_to=self.pad_to,
            layers=range(self.model.config.num_layers),
        )

    def view_cache(self, view: View) -> AnchorCache | None:
        if view.tokens not in ("anchors", "prefix"):
            return None
        return self.anchors(view.anchor_ratio, blocks=view.tokens == "anchors")

    def stale(self) -> tuple[np.ndarray, np.ndarray]:
        """Stitched keys and values by the reference [L, T, K, H]; zeros where prefix and query stand."""
        k, v = self.reference.stitch([np.asarray(chunk.tokens) for chunk in self.chunks], self.num_prefix)
        pad = ((0, 0), (self.num_prefix, len(self.query)), (0, 0), (0, 0))
        return np.pad(k, pad), np.pad(v, pad)

    def oracle(self, recompute, *, visible=None, window=0):
        """Prefix, context and query in one dense pass of the reference, in which only `recompute` [L, S] is fresh."""
        c, ids, first, last = self.model.config, self.ids, self.num_prefix, self.end
        fresh = np.ones((c.num_layers, len(ids)), bool)
        fresh[:, first:last] = np.asarray(recompute)[:, first:last]
        at = np.arange(len(ids))
        mask = np.broadcast_to(at[None, :] <= at[:, None], (c.num_layers, len(ids), len(ids))).copy()
        if visible is not None:
            segments, visible = np.asarray(self.context.segments)[:last], np.asarray(visible)
            for l in range(c.num_layers):
                seen = visible[min(l, len(visible) - 1)][:last]
                mask[l, first:last, :last] = restricted_mask(at[:last], segments, seen, window)[first:]
        return self.reference.run(ids, mask=mask, stale=self.stale(), fresh=fresh)

    def probed(self, view: View, anchors=None):
        """The query over what a view shows, in one dense pass: stale context, of which each layer shows some.

        Args:
            anchors: [L, N], the anchors of each layer among the context, for the token view "anchors".
        """
        num_layers, ids, first, last = self.model.config.num_layers, self.ids, self.num_prefix, self.end
        shown = {"query": (False, False), "prefix": (True, False), "anchors": (True, anchors), "context": (True, True)}
        at = np.arange(len(ids))
        mask = np.broadcast_to(at[None, :] <= at[:, None], (num_layers, len(ids), len(ids))).copy()
        mask[:, last:, :first] = shown[view.tokens][0]
        mask[:, last:, first:last] = np.atleast_2d(shown[view.tokens][1])[:, None, :]
        fresh = np.ones((num_layers, len(ids)), bool)
        fresh[:, first:last] = False
        return self.reference.run(ids, mask=mask, stale=self.stale(), fresh=fresh)

    def rows(self, *picked: int) -> np.ndarray:
        """A recompute set [L, S] with these context indices (prefix not counted) at every layer."""
        recompute = np.zeros((self.model.config.num_layers, len(self.context.segments)), bool)
        recompute[:, np.asarray(picked, int) + self.num_prefix] = True
        return recompute


def look(request: Request, selector: Selector) -> Evidence:
    """What the selector sees of the request."""
    return probe(request.model, request.query, request.view_cache(selector.view), request.context, selector.view)


def choose(request: Request, selector: Selector, ratio: float, **options) -> Selection:
    """Probe and select, as a request does."""
    evidence = look(request, selector)
    k = budget_for(selector, ratio, request.context.sizes(len(request.query)))
    return select(selector, evidence, k, num_layers=request.model.config.num_layers, **options)


@functools.cache
def build_model(name: str = "llama") -> Model:
    return tiny_model(jax.random.key(len(name)), name.partition("-")[0], **FAMILIES[name])


@functools.cache
def build_chunk(name: str, length: int, seed: int) -> Chunk:
    ids = np.random.default_rng([length, seed]).integers(0, 128, length).astype(np.int32)
    return encode_chunk(build_model(name), ids)


@functools.cache
def build_request(
    name: str = "llama",
    lengths: tuple[int, ...] = LENGTHS,
    *,
    prefix: int = 9,
    query: int = 11,
    pad_to: int | None = None,
    seed: int = 0,
) -> Request:
    """A request of 192 padded positions, whatever its prefix, unless `pad_to` says otherwise."""
    pad_to = pad_to or SIZE - round_up(prefix, 64)
    model, rng = build_model(name), np.random.default_rng([seed, 7])
    chunks = tuple(build_chunk(name, length, seed + i) for i, length in enumerate(lengths))
    head = encode_prefix(model, rng.integers(0, 128, prefix).astype(np.int32)) if prefix else None
    context = stitch(chunks, model.config.rope, prefix=head, pad_to=pad_to)
    tail = rng.integers(0, 128, query).astype(np.int32)
    return Request(model, Reference(model.config, model.params), chunks, head, tail, pad_to, context)
