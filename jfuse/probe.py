"""Runs the query over a view of the context and collects what a selector may look at.

In come the query and the view's caches; out comes `Evidence`. The query runs to the view's deepest layer and no
further: of that layer only the projections are needed. The context cache is read at the view's layers alone and
    never written.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jfuse.config import Implementation, View, query_bucket
from jfuse.models.decoder import LayerOut, Model, Past, keys_values, layer, start
from jfuse.types import PAD_POSITION, AnchorCache, AnyArray, ContextCache, Evidence, LayerKV


def probe(
    model: Model,
    query: Int[AnyArray, " U"],
    anchors: AnchorCache | None,
    context: ContextCache,
    view: View,
    *,
    scoring: slice = slice(None),
    pad: bool = True,
    implementation: Implementation = None,
) -> Evidence:
    """Conditioned query states and the context entries of the view's layers (QCFuse eqs. 9, 17).

    Args:
        query: token ids after the context, template head and tail included.
        anchors: the compact cache for the token views "prefix" and "anchors", at least down to the deepest layer.
        context: `kv` needs the view's layers only (a mapping will do), all of them for the token view "context".
        scoring: which query tokens are the question proper; only their rows score.
        pad: pad the query to its bucket, so that lengths share one compilation.

    Raises:
        ValueError: an empty query or scoring span, or a missing anchor cache.
    """
    query = np.asarray(query, np.int32)
    scoring_rows = np.zeros(len(query), bool)
    scoring_rows[scoring] = True
    if not len(query):
        raise ValueError("The query has no tokens; a request needs at least one.")
    if not scoring_rows.any():
        raise ValueError(
            f"The scoring span {scoring} selects none of the {len(query)} query tokens; name the question."
        )
    layers = view.layer_indices(model.config.num_layers)
    padding = query_bucket(len(query)) - len(query) if pad else 0
    positions = np.arange(len(query), dtype=np.int32) + context.end
    query_positions = np.pad(positions, (0, padding), constant_values=PAD_POSITION)

    states: dict[int, LayerOut] = {}
    if view.tokens != "none" and layers:
        past = _past_of(view, anchors, context)
        x, rows = start(model.config, model.params, np.pad(query, (0, padding)), query_positions)
        for l in range(max(layers) + 1):
            if l == max(layers):
                out = keys_values(model.config, model.layers[l], x, rows)
            else:
                out = layer(model.config, model.layers[l], x, rows, past(l), implementation=implementation)
            x = out.x
            if l in layers:
                states[l] = out
    segments = np.asarray(context.segments)
    return Evidence(
        queries=tuple(states[l].q for l in layers if l in states),
        pic=tuple(context.kv[l] for l in layers),  # type: ignore[index]
        query=tuple(states[l].kv for l in layers if l in states),
        fresh=_recompute_first(model, context, view.fresh, implementation),
        scoring_rows=np.pad(scoring_rows, (0, padding)),
        query_positions=query_positions,
        positions=np.asarray(context.positions),
        segments=segments,
        offsets=chunk_offsets(segments),
    )


def _past_of(view: View, anchors: AnchorCache | None, context: ContextCache):
    """What the query attends to at layer l under the view's token choice."""
    if view.tokens == "query":
        return lambda l: None
    if view.tokens == "context":
        at = jnp.asarray(context.positions)
        return lambda l: Past(context.kv[l], at)
    if anchors is None:
        raise ValueError(f'The token view "{view.tokens}" needs an anchor cache; make one with stitch_anchors.')
    return lambda l: Past(anchors.kv[l], jnp.asarray(anchors.positions[l]))


def _recompute_first(model: Model, context: ContextCache, count: int, implementation) -> tuple[LayerKV, ...]:
    """Keys and values of the first `count` layers recomputed for every position, as CacheBlend's check layers ask."""
    fresh = []
    if count:
        x, rows = start(model.config, model.params, context.tokens, context.positions)
    for l in range(count):
        if l == count - 1:
            out = keys_values(model.config, model.layers[l], x, rows)
        else:
            out = layer(model.config, model.layers[l], x, rows, implementation=implementation)
        x = out.x
        fresh.append(out.kv)
    return tuple(fresh)


def chunk_offsets(segments: Int[np.ndarray, " S"]) -> Int[np.ndarray, " S"]:
    """Position of every entry inside its own segment.

    >>> chunk_offsets(np.array([-2, -2, 0, 0, 0, 1, -1]))
    array([0, 1, 0, 1, 2, 0, 0], dtype=int32)
    """
    index = np.arange(len(segments), dtype=np.int32)
    first = np.r_[True, segments[1:] != segments[:-1]] if len(segments) else np.zeros(0, bool)
    return index - np.maximum.accumulate(np.where(first, index, 0)).astype(np.int32)
