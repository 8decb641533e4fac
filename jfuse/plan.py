"""What a request would cost before anything runs: full prefill, reuse and every selector on given hardware.

Time is the larger of arithmetic and memory traffic for each pass, and of loading and recomputation where they overlap;
the counts are those of `costs`. Figures of the hardware are what it achieves, not what its data sheet says.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jfuse import costs
from jfuse.config import round_up
from jfuse.hardware import Hardware
from jfuse.models.config import ModelConfig
from jfuse.selectors.base import BudgetedPick, Selector, budget_for
from jfuse.stitch import make_layout
from jfuse.types import ContextCache, Selection, Sizes

FULL = "full prefill"
AGREEMENT = 0.65
"""Correlation of a position's stand-in scores between layers, for selectors that choose per layer. A ratio of 0.15 then
realises 0.49 of 40 layers' states, and 0.60 of the context is in some layer's set; RelaxKV reports 0.43 and 0.63
(2609.33503, Qwen3-14B, RULER at 8k)."""


class Row(NamedTuple):
    """One way to serve a request: seconds, and what they come from."""

    method: str
    ratio: float
    realised_ratio: float  # share of layer-token states that are recomputed
    ttft: float
    selection: float  # reading and probing before anything can be recomputed
    fusion: float  # recomputation, with the loading that overlaps it
    query: float
    selection_bytes: int
    rows: tuple[int, ...]  # recomputed positions per layer
    edges: int  # keys read by recomputed positions, summed
    flops: int
    speed_up: float = 1.0  # over full prefill
    fastest: bool = False


def plan(
    config: ModelConfig,
    hardware: Hardware,
    sizes: Sizes,
    selectors: Sequence[Selector],
    *,
    ratio: float | int | None = None,
    itemsize: int = 2,
) -> list[Row]:
    """Full prefill and every selector, fastest first.

    Args:
        sizes: token counts of prefix, chunks and query.
        ratio: for all selectors; None takes each one's own.
        itemsize: bytes of a number in weights and caches.

    Raises:
        ValueError: a view that the model does not have, or a ratio outside [0, 1].
    """
    full = full_prefill_row(config, hardware, sizes, itemsize=itemsize)
    rows = [full] + [fusion_row(config, hardware, sizes, s, ratio=ratio, itemsize=itemsize) for s in selectors]
    rows = sorted(rows, key=lambda row: row.ttft)
    return [row._replace(speed_up=full.ttft / row.ttft, fastest=i == 0) for i, row in enumerate(rows)]


def full_prefill_row(config: ModelConfig, hardware: Hardware, sizes: Sizes, *, itemsize: int = 2) -> Row:
    """One causal pass over prefix, context and query."""
    tokens = sizes.prefix + sizes.context + sizes.query
    cost = costs.prefill_cost(config, tokens)
    seconds = _seconds(hardware, cost.flops, _weight_bytes(config, config.num_layers, itemsize)) + hardware.overhead
    return Row(FULL, 1.0, 1.0, seconds, 0.0, seconds, 0.0, 0, cost.rows, cost.edges, cost.flops)


def fusion_row(
    config: ModelConfig,
    hardware: Hardware,
    sizes: Sizes,
    selector: Selector,
    *,
    ratio: float | int | None = None,
    itemsize: int = 2,
) -> Row:
    """A fused request: what the view needs is read and probed first, then layers load while others are recomputed.

    A probe over the whole context runs while the context loads; one over anchors runs after they are there. Selectors
    that choose per layer are reckoned with layers that agree as far as `AGREEMENT` says.
    """
    view, whole = selector.view, sizes.context * config.kv_bytes_per_token(itemsize)
    context, selection = _stand_in(config, sizes, selector, ratio)
    first = costs.selection_bytes(config, view, sizes, itemsize=itemsize)
    again = 2 * _half(config, itemsize) * _anchor_layers(config, selector) * costs.num_anchors(view, sizes)
    probe, fuse = costs.probe_cost(config, view, sizes), costs.fusion_cost(config, context, selection)
    begun = costs.begun_cost(config, context, selection, view.fresh).flops
    query = costs.prefill_cost(config, sizes.query, past=sizes.prefix + sizes.context)

    depth = max(costs.needed_layers(view, config.num_layers), default=-1) + 1
    probing = _seconds(hardware, probe.flops, _weight_bytes(config, depth, itemsize)) if probe.flops else 0.0
    reading = first / hardware.load
    selecting = max(reading, probing) if view.tokens == "context" else reading + probing
    rest = (whole - (first - again)) / hardware.load
    layers = sum(count > 0 for count in fuse.rows[max(view.fresh - 1, 0) :])
    fusing = _seconds(hardware, fuse.flops - begun, _weight_bytes(config, layers, itemsize)) if fuse.flops else 0.0
    asking = _seconds(hardware, query.flops, _weight_bytes(config, config.num_layers, itemsize) + whole)
    overlapped = max(rest, fusing)
    return Row(
        selector.name,
        selector.ratio if ratio is None else ratio,
        costs.realised_ratio(selection.recompute, sizes.context),
        selecting + overlapped + asking + hardware.overhead,
        selecting,
        overlapped,
        asking,
        first,
        fuse.rows,
        fuse.edges,
        probe.flops + fuse.flops - begun + query.flops,
    )


def break_even(
    config: ModelConfig,
    hardware: Hardware,
    selector: Selector,
    *,
    ratio: float | int | None = None,
    chunk_tokens: int = 512,
    num_prefix: int = 32,
    num_query: int = 64,
    itemsize: int = 2,
    longest: int | None = None,
) -> int | None:
    """The fewest context tokens, in whole chunks, from which on the selector beats full prefill; None: never.

    Args:
        longest: where to stop looking; the model's positions by default.
    """
    most = max(0, ((longest or config.max_positions) - num_prefix - num_query) // chunk_tokens)

    def wins(chunks: int) -> bool:
        sizes = Sizes(num_prefix, (chunk_tokens,) * chunks, num_query)
        own = fusion_row(config, hardware, sizes, selector, ratio=ratio, itemsize=itemsize)
        return own.ttft < full_prefill_row(config, hardware, sizes, itemsize=itemsize).ttft

    # The cost per token of a full prefill grows with N, so there is one crossing.
    loses, winner = 0, min(1, most)
    while winner > loses and not wins(winner):
        loses, winner = winner, min(2 * winner, most)
    if winner == loses:
        return None
    while winner - loses > 1:
        middle = (loses + winner) // 2
        loses, winner = (loses, middle) if wins(middle) else (middle, winner)
    return winner * chunk_tokens


def _stand_in(
    config: ModelConfig, sizes: Sizes, selector: Selector, ratio: float | int | None
) -> tuple[ContextCache, Selection]:
    """A context of these sizes without caches, and what the selector's allocation makes of random scores.

    Padded to powers of two: a search over lengths then meets few shapes, and each is compiled once.
    """
    tokens = [np.zeros(length, np.int32) for length in sizes.chunks]
    padded = 1 << (round_up(sizes.context, 512) - 1).bit_length()
    layout = make_layout(tokens, np.zeros(sizes.prefix, np.int32), pad_to=padded)
    context = ContextCache(layout.tokens, layout.positions, layout.segments, ())
    layers = selector.view.layer_indices(config.num_layers)
    k = budget_for(selector, ratio, sizes)
    draw, real = np.random.default_rng(0).standard_normal, layout.segments >= 0
    shared, own = draw(len(real), np.float32), draw((max(len(layers), 1), len(real)), np.float32)
    scores = np.float32(AGREEMENT**0.5) * shared + np.float32((1 - AGREEMENT) ** 0.5) * own
    pick = BudgetedPick(_largest, k if isinstance(k, tuple) else (k,))
    chosen = selector.allocate(jnp.asarray(np.where(real, scores, -np.inf)), pick, layers, config.num_layers)
    return context, Selection(np.asarray(chosen.recompute) & real, np.asarray(chosen.visible), chosen.window)


def _largest(scores: Float[Array, "*B S"], k: Any) -> Bool[Array, "*B S"]:
    """`top_k` for random scores, which never tie; many times as fast on a CPU."""
    chosen = np.argpartition(-np.asarray(scores), min(int(k), scores.shape[-1] - 1), axis=-1)[..., : int(k)]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, chosen, True, axis=-1)
    return jnp.asarray(mask)


def _seconds(hardware: Hardware, flops: int, num_bytes: int) -> float:
    return max(flops / hardware.flops, num_bytes / hardware.memory)


def _weight_bytes(config: ModelConfig, layers: int, itemsize: int) -> int:
    return layers * sum(costs.layer_weights(config)) * itemsize


def _half(config: ModelConfig, itemsize: int) -> int:
    return config.num_kv_heads * config.head_size * itemsize


def _anchor_layers(config: ModelConfig, selector: Selector) -> int:
    layers = selector.view.layer_indices(config.num_layers)
    return max(layers) if selector.view.tokens == "anchors" and layers else 0
