"""One request from chunks to text: the only file that knows both phases.

Read `serve` from top to bottom: lay out, probe over the view, select, fuse layer by layer while later layers are on
their way, prefill the query, first token. `answer` wraps it for a store and text, `full_prefill` is the reference on
exactly the same token ids.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.account import make_report
from jfuse.anchors import AnchorRule
from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig, Implementation, round_up
from jfuse.fuse import Work, fuse_layers, fusion_work
from jfuse.generate import decode, padded_query, prefill_query, stop_ids
from jfuse.host_tier import HostTier
from jfuse.incoming import Incoming
from jfuse.models.decoder import Model, Prefill, logits, prefill
from jfuse.models.tokenizer import check_ids
from jfuse.probe import probe
from jfuse.report import Compilations, Report
from jfuse.selectors.base import Selector, budget_for, select
from jfuse.sources import ResidentChunks as ResidentChunks
from jfuse.sources import Source, StoredChunks
from jfuse.stitch import Layout, make_layout, prefix_tokens
from jfuse.store import ChunkMiss, ChunkStore
from jfuse.timeline import Event
from jfuse.types import PAD_POSITION, PREFIX_SEGMENT, Chunk, ContextCache, KVCache, LayerKV, Selection


class Answer(NamedTuple):
    """What a request gives back."""

    text: str | None  # None without a tokenizer
    tokens: Int[np.ndarray, " M"]
    selection: Selection
    report: Report


class Question(NamedTuple):
    """The part of a request after the context."""

    tokens: Int[np.ndarray, " U"]
    scoring: slice = slice(None)  # the question proper


def encode_prefix(model: Model, tokens: Int[np.ndarray, " P"] | Sequence[int]) -> ContextCache:
    """The exact cache of a system prefix. Nothing precedes it, so it is reused as it is and never selected."""
    tokens = check_ids(tokens, model.config.vocab_size, "prefix")
    model.config.check_length(len(tokens))
    padding = round_up(len(tokens), 64) - len(tokens)
    positions = np.pad(np.arange(len(tokens), dtype=np.int32), (0, padding), constant_values=PAD_POSITION)
    segments = np.pad(np.full(len(tokens), PREFIX_SEGMENT, np.int32), (0, padding), constant_values=-1)
    padded = np.pad(tokens, (0, padding))
    return ContextCache(padded, positions, segments, prefill(model, padded, positions, hidden="none").kv)


class _Clock:
    """Seconds per stage on the host."""

    def __init__(self):
        self.stages: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Closes a stage."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now


class Served(NamedTuple):
    """The outcome of `serve` up to the first token."""

    first: Float[Array, " V"]
    context: ContextCache
    queried: Prefill
    selection: Selection
    rows: tuple[int, ...]
    budget: int
    stages: dict[str, float]


def serve(
    model: Model,
    source: Source,
    question: Question,
    selector: Selector,
    config: FusionConfig = FusionConfig(),
    *,
    prefix: ContextCache | None = None,
    params: object = None,
) -> Served:
    """Fuses one request and computes the logits of its first answer token. Checked input only; `answer` checks."""
    clock = _Clock()
    layout = make_layout(source.tokens, prefix_tokens(prefix), pad_to=config.pad_to)
    write = layer_writer(layout, model.config.rope)

    def layer(l: int) -> LayerKV:
        return write(source.layer(l), None if prefix is None else prefix.kv[l])

    view = selector.view
    seen = _LayersOnDemand(layer, model.config.num_layers)  # a selector's view is all that is read before it chooses
    context = ContextCache(layout.tokens, layout.positions, layout.segments, cast(KVCache, seen))
    anchors = _view_anchors(model, source, layout, selector, config, prefix)
    evidence = probe(
        model, question.tokens, anchors, context, view, scoring=question.scoring, implementation=config.implementation
    )
    k = budget_for(selector, config.ratio, context.sizes(len(question.tokens)))
    selection = select(selector, evidence, k, num_layers=model.config.num_layers, params=params)
    work = fusion_work(selection, layout.segments)  # waits for the device
    clock.lap("select")

    del evidence  # its layers are fused in place now
    layers = prefetch((seen.pop(l) for l in range(model.config.num_layers)), ahead=config.ahead, put=lambda x: x)
    fused = fuse(
        model,
        context._replace(kv=cast(KVCache, layers)),
        selection,
        work=work,
        row_block=config.row_block,
        donate=True,
        implementation=config.implementation,
    )
    jax.block_until_ready(fused.kv)
    clock.lap("fuse")
    first, queried = prefill_query(model, fused, question.tokens, implementation=config.implementation)
    first.block_until_ready()
    clock.lap("query")
    targets = k[0] if isinstance(k, tuple) else k
    return Served(first, fused, queried, selection, work.rows, targets, clock.stages)


def _view_anchors(
    model: Model,
    source: Source,
    layout: Layout,
    selector: Selector,
    config: FusionConfig,
    prefix: ContextCache | None,
) -> AnchorCache | None:
    """The compact cache that the selector's token view asks for. The view's deepest layer attends to nothing."""
    view = selector.view
    if view.tokens not in ("prefix", "anchors"):
        return None
    depth = max(view.layer_indices(model.config.num_layers))
    blocks = source.anchors(view.anchor_ratio, depth) if view.tokens == "anchors" else []
    return stitch_anchors(
        blocks,
        model.config.rope,
        layout,
        prefix=prefix,
        ratio=view.anchor_ratio,
        pad_to=config.pad_to,
        layers=range(depth),
    )


class Prefilled(NamedTuple):
    """The outcome of a full prefill up to the first token, split as `serve` splits it."""

    first: Float[Array, " V"]
    context: ContextCache
    queried: Prefill
    stages: dict[str, float]


def full_prefill(
    model: Model, layout: Layout, question: Question, *, implementation: Implementation = None
) -> Prefilled:
    """The reference: one causal pass over exactly the token ids of the fused request, prefix and query included."""
    clock = _Clock()
    query, positions = padded_query(question.tokens, layout.end)
    out = prefill(
        model,
        np.concatenate([layout.tokens, query]),
        np.concatenate([layout.positions, positions]),
        hidden="last",
        implementation=implementation,
    )
    first = logits(model.config, model.params, out.hidden)[0].block_until_ready()
    clock.lap("prefill")
    size = len(layout.tokens)
    before, after = (
        tuple(LayerKV(kv.k[part], kv.v[part]) for kv in out.kv) for part in (slice(None, size), slice(size, None))
    )
    context = ContextCache(layout.tokens, layout.positions, layout.segments, before)
    return Prefilled(first, context, Prefill(out.hidden, after), clock.stages)


def answer(
    model: Model,
    store: ChunkStore,
    chunks: Sequence[str | Int[np.ndarray, " _"]],
    query: str | Question,
    selector: Selector,
    config: FusionConfig = FusionConfig(),
    *,
    prefix: ContextCache | None = None,
    max_new_tokens: int = 32,
    params: object = None,
) -> Answer:
    """Answers one question over retrieved chunks: the serving door.

    Args:
        chunks: in retrieved order, each an id that `store.put` returned or the passage's token ids. Passages that
            the store cannot serve are encoded now and put; empty ones are left out; the report says which and why.
        query: the text after the context, or its tokens with the span that scores. Text scores in full.
        prefix: the exact cache of the system prefix, from `encode_prefix`.
        params: parameters of a learned selector.

    Raises:
        ValueError: nothing to ask or to read, ids outside the vocabulary, or more positions than the model serves.
        ChunkMiss: an id whose chunk is gone or damaged; ids alone cannot be recomputed, passages can.
    """
    with Compilations() as compiled:
        question = _question(model, query)
        after_chunks = len(question.tokens) + max_new_tokens + (0 if prefix is None else prefix.end)
        given = sum(len(chunk) for chunk in chunks if not isinstance(chunk, str))
        model.config.check_length(given + after_chunks)  # before anything is encoded
        ids, computed, missed, skipped = _find(model, store, chunks)
        with store.hold([id for i, id in enumerate(ids) if i not in computed]):
            source = StoredChunks(store, ids, computed)
            model.config.check_request(sum(len(tokens) for tokens in source.tokens) + after_chunks)
            selector.view.layer_indices(model.config.num_layers)
            served = serve(model, source, question, selector, config, prefix=prefix, params=params)
        stop = stop_ids(model)
        clock = _Clock()
        tokens = np.asarray(
            list(
                decode(
                    model,
                    served.context,
                    served.queried,
                    served.first,
                    len(question.tokens),
                    max_new_tokens,
                    stop,
                    config.implementation,
                )
            ),
            np.int32,
        )
        clock.lap("decode")
    report = make_report(
        model,
        selector,
        config,
        served,
        len(question.tokens),
        hits=len(ids) - len(missed),
        missed=missed,
        skipped=skipped,
        compilations=compiled.count,
        decode=clock.stages["decode"],
    )
    text = model.tokenizer.decode(tokens) if model.tokenizer is not None else None
    return Answer(text, tokens, served.selection, report)


def make_report(
    model: Model,
    selector: Selector,
    config: FusionConfig,
    served: Served,
    num_query: int,
    *,
    hits: int = 0,
    missed: dict[int, str] | None = None,
    skipped: tuple[int, ...] = (),
    compilations: int = 0,
    decode: float = 0.0,
) -> Report:
    """The account of a served request."""
    context, view = served.context, selector.view
    num_prefix = int((np.asarray(context.segments) == PREFIX_SEGMENT).sum())
    num_context, itemsize = context.num_tokens, np.dtype(model.dtype).itemsize
    fusion = costs.fusion_cost(model.config, context, served.selection)
    query = costs.prefill_cost(model.config, num_query, past=context.end)
    visible = costs.num_visible(view, num_prefix, num_context)
    probed = costs.probe_cost(model.config, view, num_query=num_query, num_visible=visible, num_context=num_context)
    return Report(
        selector=selector.name,
        ratio=selector.ratio if config.ratio is None else config.ratio,
        realised_ratio=costs.realised_ratio(np.asarray(served.selection.recompute), num_context),
        budget=served.budget,
        num_prefix=num_prefix,
        num_context=num_context,
        num_query=num_query,
        rows=served.rows,
        edges=fusion.edges,
        flops=fusion.flops + query.flops + probed.flops,
        full_flops=costs.prefill_cost(model.config, context.end + num_query).flops,
        hits=hits,
        missed=missed or {},
        skipped=skipped,
        selection_bytes=costs.selection_bytes(
            model.config, view, num_prefix=num_prefix, num_context=num_context, itemsize=itemsize
        ),
        total_bytes=num_context * model.config.kv_bytes_per_token(itemsize),
        stages=served.stages | {"decode": decode},
        ttft=sum(served.stages.values()),
        compilations=compilations,
    )


def _question(model: Model, query: str | Question) -> Question:
    if isinstance(query, Question):
        return query._replace(tokens=check_ids(query.tokens, model.config.vocab_size, "query"))
    if model.tokenizer is None:
        raise ValueError("This model has no tokenizer; give the query as Question(token_ids).")
    return Question(check_ids(model.tokenizer.encode(query), model.config.vocab_size, "query"))


def _find(
    model: Model, store: ChunkStore, chunks: Sequence[str | Int[np.ndarray, " _"]]
) -> tuple[list[str], dict[int, Chunk], dict[int, str], tuple[int, ...]]:
    """Ids of all chunks in order; those that had to be computed, with the reason; indices of empty ones."""
    ids: list[str] = []
    computed: dict[int, Chunk] = {}
    missed: dict[int, str] = {}
    skipped = []
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, str):
            ids.append(chunk)
            continue
        if len(chunk) == 0:
            skipped.append(index)
            continue
        found = store.lookup(check_ids(chunk, model.config.vocab_size, f"chunk {index}"))
        if not found.hit:
            missed[len(ids)] = found.reason
            made = encode_chunk(model, chunk)
            store.put(made)
            if found.id not in store:
                computed[len(ids)] = made
        ids.append(found.id)
    if not ids:
        raise ValueError(f"The request has no chunk with tokens (got {len(chunks)}); give at least one passage.")
    return ids, computed, missed, tuple(skipped)
