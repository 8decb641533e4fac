"""The one place that counts: rows, attention edges, FLOPs and bytes of every way to serve a request.

Conventions: 2 FLOPs for each weight a row meets, 4 * N * H for each attention edge (query row, key), one LM head. A
row whose last layer it is needs only its keys and values there; so do all rows but the last token's in a prefill's
last layer. Norms, RoPE, softmax and copies are left out: the figures are the limit that a measurement is held against.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jfuse.config import View, budget
from jfuse.models.config import ModelConfig
from jfuse.types import PREFIX_SEGMENT, ContextCache, Selection, Sizes


class Cost(NamedTuple):
    """What a pass does: rows that enter each layer, attention edges, FLOPs."""

    rows: tuple[int, ...]
    edges: int
    flops: int


class LayerWeights(NamedTuple):
    """Weights of one layer that a row meets."""

    keys_values: int
    rest: int  # queries, output, MLP


def layer_weights(config: ModelConfig) -> LayerWeights:
    """Matrix weights of one layer, biases and norms left out."""
    attention = config.num_heads * config.head_size
    return LayerWeights(
        keys_values=config.width * 2 * config.num_kv_heads * config.head_size,
        rest=config.width * attention * 2 + 3 * config.width * config.mlp_width,
    )


def cost(
    config: ModelConfig, entering: Sequence[int], leaving: Sequence[int], edges: Sequence[int], *, heads: int = 0
) -> Cost:
    """The cost of a pass, layer by layer.

    Args:
        entering: rows whose keys and values are computed.
        leaving: rows that attend and run the MLP, because the next layer or the head wants them.
        edges: keys read by the leaving rows, summed.
        heads: rows for which logits are computed.
    """
    weights = layer_weights(config)
    products = 2 * (sum(entering) * weights.keys_values + sum(leaving) * weights.rest)
    attention = 4 * config.num_heads * config.head_size * sum(edges)
    return Cost(
        tuple(entering), int(sum(edges)), int(products + attention + 2 * heads * config.width * config.vocab_size)
    )


def prefill_cost(config: ModelConfig, tokens: int, *, past: int = 0) -> Cost:
    """A prefill of `tokens` new tokens over `past` cached ones, to the logits of the last token."""
    L = config.num_layers
    inner = tokens * past + tokens * (tokens + 1) // 2
    leaving = [tokens] * (L - 1) + [1]
    return cost(config, [tokens] * L, leaving, [inner] * (L - 1) + [past + tokens], heads=1)


def fusion_cost(config: ModelConfig, context: ContextCache, selection: Selection) -> Cost:
    """The recomputation that a hard selection asks for, exactly, restricted context and window included."""
    recompute = np.asarray(selection.recompute)
    entering = recompute.sum(1)
    goes_on = np.concatenate([recompute[1:], np.zeros_like(recompute[:1])])
    edges = [int(seen[on].sum()) for seen, on in zip(keys_seen(context, selection), goes_on, strict=True)]
    return cost(config, entering.tolist(), goes_on.sum(1).tolist(), edges)


def begun_cost(config: ModelConfig, context: ContextCache, selection: Selection, layers: int) -> Cost:
    """The part of `fusion_cost` that the probe has done: a fusion that ends after so many layers."""
    recompute, visible = (np.asarray(part)[:layers] for part in (selection.recompute, selection.visible))
    return fusion_cost(config, context, selection._replace(recompute=recompute, visible=visible))


def keys_seen(context: ContextCache, selection: Selection) -> Int[np.ndarray, "L S"]:
    """Keys that each position would read at each layer if recomputed: itself, prefix, visible set, window."""
    segments, recompute = np.asarray(context.segments), np.asarray(selection.recompute)
    real = segments != -1
    visible = np.asarray(selection.visible).astype(bool) | (segments == PREFIX_SEGMENT)
    visible = np.broadcast_to(visible & real, recompute.shape)
    before = np.concatenate([np.zeros((len(recompute), 1), np.int64), np.cumsum(visible, 1)], axis=1)
    index = np.arange(len(segments))
    first_near = np.maximum(index - int(selection.window), 0)
    # Visible keys before the window, and every key from there to the row itself.
    return np.where(real, before[:, first_near] + (index - first_near + 1), 0)


def probe_cost(config: ModelConfig, view: View, sizes: Sizes) -> Cost:
    """What runs before a selector can choose: the query over its token view, scoring, and layers that run in full.

    Scoring multiplies queries with keys only, half of an attention edge. Layers that a view wants fresh run for prefix
    and context, the last of them up to its keys and values.
    """
    layers, query = view.layer_indices(config.num_layers), sizes.query
    everything = sizes.prefix + sizes.context
    triangle = everything * (everything + 1) // 2
    going_on = [1] * (view.fresh - 1) + [0] if view.fresh else []
    fresh = cost(
        config, [everything] * view.fresh, [everything * on for on in going_on], [triangle * on for on in going_on]
    )
    if view.tokens == "none" or not layers:
        return fresh
    depth = max(layers)
    inner = query * num_visible(view, sizes) + query * (query + 1) // 2
    run = cost(config, [query] * (depth + 1), [query] * depth, [inner] * depth)
    # The deepest layer's queries are needed too.
    queries = 2 * query * config.width * config.num_heads * config.head_size
    scoring = 2 * config.num_heads * config.head_size * query * sizes.context * len(layers)
    return Cost(run.rows + fresh.rows, run.edges + fresh.edges, run.flops + queries + scoring + fresh.flops)


class Halves(NamedTuple):
    """Which halves of a layer are meant."""

    keys: bool
    values: bool


WHOLE, KEYS = Halves(True, True), Halves(True, False)


def needed_layers(view: View, num_layers: int) -> dict[int, Halves]:
    """What must be read of which layer's context entries before a selector with this view can choose, in order of use.

    >>> needed_layers(View("anchors", (3, 1)), 4)
    {3: Halves(keys=True, values=False), 1: Halves(keys=True, values=False)}
    """
    layers = view.layer_indices(num_layers)
    if view.tokens == "context":
        return {l: WHOLE for l in range(max(layers, default=-1) + 1)}
    needed = {l: WHOLE if view.values else KEYS for l in layers}
    # A gradual filter compares, and carries on, both halves of the layers it runs over.
    filtered = range(view.fresh - 1 - len(view.kept), view.fresh) if view.kept else ()
    return needed | {l: WHOLE for l in filtered}


def num_anchors(view: View, sizes: Sizes) -> int:
    """Anchors of all chunks, ceil(r_a * C) of each."""
    return sum(budget("ceil", view.anchor_ratio, length) for length in sizes.chunks)


def num_visible(view: View, sizes: Sizes) -> int:
    """Cached entries that a probe's query attends to under a token view."""
    seen = {"anchors": num_anchors(view, sizes), "context": sizes.context}.get(view.tokens, 0)
    return seen + (sizes.prefix if view.tokens in ("prefix", "anchors", "context") else 0)


def selection_bytes(config: ModelConfig, view: View, sizes: Sizes, *, itemsize: int = 2) -> int:
    """Bytes of chunk caches that must be read before a selector can choose (methods differ here most).

    The anchors of all layers above the deepest, plus what the view's layers need. The prefix is never read again.
    """
    half = config.num_kv_heads * config.head_size * itemsize
    layers = needed_layers(view, config.num_layers)
    anchors = 2 * max(layers) * num_anchors(view, sizes) if view.tokens == "anchors" and layers else 0
    return half * (anchors + sizes.context * sum(sum(halves) for halves in layers.values()))


def realised_ratio(recompute: Bool[np.ndarray, "L S"], num_context: int) -> float:
    """Share of layer-token states that are recomputed, which a nominal ratio need not equal (RelaxKV, appendix)."""
    return float(np.asarray(recompute).sum() / (len(recompute) * max(num_context, 1)))
