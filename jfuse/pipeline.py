"""One request from chunks to text: the only file that knows both phases.

Read `serve` from top to bottom: lay out, probe over the view, select, fuse layer by layer while later layers are on
their way, prefill the query, first token. `answer` wraps it for a store and text, `full_prefill` is the reference on
exactly the same token ids.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.account import Served, make_report
from jfuse.anchors import default_rule
from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig, Implementation, round_up
from jfuse.fingerprint import Fingerprint, differing
from jfuse.fuse import Work, fuse_layers, fusion_work
from jfuse.generate import check_new_tokens, decode, padded_query, prefill_query, stop_ids
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
from jfuse.types import PAD_POSITION, PREFIX_SEGMENT, Begun, Chunk, ContextCache, KVCache, LayerKV, Selection


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


def begin(
    model: Model,
    source: Source,
    selector: Selector,
    config: FusionConfig = FusionConfig(),
    *,
    prefix: ContextCache | None = None,
    put: Callable[[Any], Any] | None = None,
) -> Incoming:
    """Lays out a request and plans its loading; `serve` starts that, or `start` does, while the request still waits.

    Args:
        put: starts moving arrays to the device; injected by tests.
    """
    return Incoming(
        model,
        source,
        make_layout(source.tokens, prefix_tokens(prefix), pad_to=config.pad_to),
        selector.view,
        encode=lambda tokens: encode_chunk(model, tokens, anchor_rule=source.anchor_rule),
        prefix=prefix,
        pad_to=config.pad_to,
        ahead=config.ahead,
        put=put,
    )


def serve(
    model: Model,
    source: Source,
    question: Question,
    selector: Selector,
    config: FusionConfig = FusionConfig(),
    *,
    prefix: ContextCache | None = None,
    params: object = None,
    incoming: Incoming | None = None,
) -> Served:
    """Fuses one request and computes the logits of its first answer token. Checked input only; `answer` checks.

    Args:
        incoming: what `begin` returned for this request, if loading has begun.

    Raises:
        Stopped: `incoming` was stopped meanwhile.
    """
    clock = _Clock()
    with begin(model, source, selector, config, prefix=prefix) if incoming is None else incoming as incoming:
        timeline, context = incoming.timeline, incoming.context
        began = timeline.now
        anchors = incoming.anchors()
        evidence = probe(
            model,
            question.tokens,
            anchors,
            context,
            selector.view,
            scoring=question.scoring,
            implementation=config.implementation,
        )
        k = budget_for(selector, config.ratio, context.sizes(len(question.tokens)))
        selection = select(selector, evidence, k, num_layers=model.config.num_layers, params=params)
        begun = evidence.begun
        work = fusion_work(selection, context.segments, begun)  # waits for the device
        timeline.add(Event("select", None, began, timeline.now))
        clock.lap("select")

        del evidence, anchors  # the view's layers are fused in place now
        fused = _fuse_arriving(model, incoming, selection, work, begun, config)
        clock.lap("fuse")
        began = timeline.now
        first, queried = prefill_query(model, fused, question.tokens, implementation=config.implementation)
        first.block_until_ready()
        timeline.add(Event("query", None, began, timeline.now))
        clock.lap("query")
    targets = k[0] if isinstance(k, tuple) else k
    return Served(first, fused, queried, selection, work, targets, clock.stages, timeline.events(), dict(incoming.lost))


def _fuse_arriving(
    model: Model, incoming: Incoming, selection: Selection, work: Work, begun: Begun | None, config: FusionConfig
) -> ContextCache:
    """Fuses layers as they come in. Layers are handed out only `ahead` beyond the last one that is done."""
    fused: list[LayerKV] = []

    def arriving() -> Iterator[LayerKV]:
        for l in range(model.config.num_layers):
            if l > config.ahead:
                jax.block_until_ready(fused[l - config.ahead - 1])
            yield incoming.pop(l)

    layers = fuse_layers(
        model,
        incoming.context._replace(kv=cast(KVCache, arriving())),
        selection,
        work,
        begun,
        row_block=config.row_block,
        donate=True,
        implementation=config.implementation,
    )
    for l, layer in enumerate(layers):
        fused.append(layer)
        if work.rows[l]:
            dispatched = incoming.timeline.now
            incoming.timeline.follow(Event("fuse", l, dispatched, dispatched), layer)
    jax.block_until_ready(fused)
    return incoming.context._replace(kv=tuple(fused))


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
    host: HostTier | None = None,
) -> Answer:
    """Answers one question over retrieved chunks: the serving door.

    Args:
        chunks: in retrieved order, each an id that `store.put` returned or the passage's token ids. Passages that
            the store cannot serve are encoded now and stored once the answer is there; empty ones are left out; the
            report says which and why.
        query: the text after the context, or its tokens with the span that scores. Text scores in full.
        prefix: the exact cache of the system prefix, from `encode_prefix`.
        params: parameters of a learned selector.
        host: chunks of this store that lie in host memory; the others are read from the store.

    Raises:
        ValueError: nothing to ask or to read, ids outside the vocabulary, more positions than the model serves, a
            negative count of new tokens, or a store or host tier that holds another model's caches.
        ChunkMiss: an id whose chunk is gone or damaged; ids alone cannot be recomputed, passages can. A chunk that is
            found damaged later, while it is read, is encoded again.
    """
    clock = _Clock()
    with Compilations() as compiled, ExitStack() as held:
        check_new_tokens(max_new_tokens)
        _check_owner(model, store, host)
        question = _question(model, query)
        after_chunks = len(question.tokens) + max_new_tokens + (0 if prefix is None else prefix.end)
        given = sum(len(chunk) for chunk in chunks if not isinstance(chunk, str))
        model.config.check_length(given + after_chunks)  # before anything is encoded
        selector.view.layer_indices(model.config.num_layers)
        found = _find(model, store, chunks, held, host)
        source = StoredChunks(store, found.ids, found.computed, host=host)
        model.config.check_request(sum(len(tokens) for tokens in source.tokens) + after_chunks)
        incoming = begin(model, source, selector, config, prefix=prefix)
        clock.lap("find")
        served = serve(model, source, question, selector, config, prefix=prefix, params=params, incoming=incoming)
        served = served._replace(stages=clock.stages | served.stages)
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
                    stop_ids(model),
                    config.implementation,
                )
            ),
            np.int32,
        )
        clock.lap("decode")
    for chunk in {id(chunk): chunk for chunk in source.computed.values()}.values():
        store.put(chunk)
    lost = {found.ids[i]: reason for i, reason in served.lost.items()}
    missed = found.missed | {i: lost[id] for i, id in enumerate(found.ids) if id in lost}
    report = make_report(
        model,
        selector,
        config,
        served,
        len(question.tokens),
        hits=len(found.ids) - len(missed),
        missed=missed,
        skipped=found.skipped,
        compilations=compiled.count,
        decode=clock.stages["decode"],
    )
    text = model.tokenizer.decode(tokens) if model.tokenizer is not None else None
    return Answer(text, tokens, served.selection, report)


def _question(model: Model, query: str | Question) -> Question:
    if isinstance(query, Question):
        return query._replace(tokens=check_ids(query.tokens, model.config.vocab_size, "query"))
    if model.tokenizer is None:
        raise ValueError("This model has no tokenizer; give the query as Question(token_ids).")
    return Question(check_ids(model.tokenizer.encode(query), model.config.vocab_size, "query"))


def _check_owner(model: Model, store: ChunkStore, host: HostTier | None) -> None:
    """Refuses a store or a host tier whose chunks this model did not make."""
    rule = default_rule(model) if store.anchor_rule is None else store.anchor_rule
    own = Fingerprint.of(model, anchor_rule=rule)
    for what, held in (("store", store), ("host tier", None if host is None else host.store)):
        if held is None or held.fingerprint is None:
            continue
        if fields := differing(held.fingerprint, own):
            raise ValueError(
                f"The {what} holds caches of another model or anchor rule: {', '.join(fields)} differ. "
                "Open it with this model and this rule (ChunkStore.open(url, model, anchor_rule=...))."
            )
        if held.anchor_ratio != store.anchor_ratio:
            raise ValueError(
                f"The host tier keeps anchors at {held.anchor_ratio} and the store at {store.anchor_ratio}; "
                "make the tier from this store."
            )


class _Found(NamedTuple):
    """What became of the chunks that were asked for."""

    ids: list[str]  # in order, empty ones left out
    computed: dict[int, Chunk]  # those that the store could not serve
    missed: dict[int, str]  # why
    skipped: tuple[int, ...]  # empty ones, by their place in the request


def _find(
    model: Model,
    store: ChunkStore,
    chunks: Sequence[str | Int[np.ndarray, " _"]],
    held: ExitStack,
    host: HostTier | None,
) -> _Found:
    """Finds every chunk or encodes it. Found ones are held from that moment on, so that none is evicted meanwhile."""
    ids: list[str] = []
    computed: dict[int, Chunk] = {}
    missed: dict[int, str] = {}
    skipped = []
    encoded: dict[str, Chunk] = {}
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, str):
            if host is None or host.get(chunk) is None:
                held.enter_context(store.hold([chunk]))
            ids.append(chunk)
            continue
        if len(chunk) == 0:
            skipped.append(index)
            continue
        found = store.lookup(check_ids(chunk, model.config.vocab_size, f"chunk {index}"))
        id, reason = found.id, found.reason
        if found.hit:
            try:
                held.enter_context(store.hold([id]))
            except ChunkMiss as miss:  # it went between the two looks
                reason = miss.reason
        if reason and (host is None or host.get(id) is None):
            if id not in encoded:
                encoded[id] = encode_chunk(model, chunk, anchor_rule=store.anchor_rule)
            missed[len(ids)], computed[len(ids)] = reason, encoded[id]
        ids.append(id)
    if not ids:
        raise ValueError(f"The request has no chunk with tokens (got {len(chunks)}); give at least one passage.")
    return _Found(ids, computed, missed, tuple(skipped))
