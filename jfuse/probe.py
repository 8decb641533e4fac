"""Runs the query over a view of the context and collects what a selector may look at.

In come the query and the view's caches; out comes `Evidence`. The query runs to the view's deepest layer and no
further: of that layer only the projections are needed. The context cache is read at the view's layers alone and
    never written.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import Implementation, View, budget, query_bucket
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import LayerOut, Model, Params, Past, Rows, finish, keys_values, layer, project, start
from jfuse.models.tokenizer import check_ids
from jfuse.pallas.rotate import rotate
from jfuse.pallas.selective_attention import selective_attention
from jfuse.selectors.score import squared_difference
from jfuse.selectors.topk import top_k
from jfuse.types import PAD_POSITION, AnchorCache, AnyArray, Begun, ContextCache, Evidence, LayerKV


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
        ValueError: an empty query or scoring span, ids outside the vocabulary, or a missing anchor cache.
    """
    query = check_ids(query, model.config.vocab_size, "query")
    scoring_rows = np.zeros(len(query), bool)
    scoring_rows[scoring] = True
    if not scoring_rows.any():
        raise ValueError(
            f"The scoring span {scoring} selects none of the {len(query)} query tokens; name the question."
        )
    layers = view.layer_indices(model.config.num_layers)
    padding = query_bucket(len(query)) - len(query) if pad else 0
    positions = np.arange(len(query), dtype=np.int32) + context.end
    query_positions = np.pad(positions, (0, padding), constant_values=PAD_POSITION)

    states: dict[int, LayerOut] = {}
    blocks = model.layers
    if view.tokens != "none" and layers:
        x, rows = start(model.config, model.params, np.pad(query, (0, padding)), query_positions)
        for l in range(max(layers) + 1):
            if l == max(layers):
                out = keys_values(model.config, blocks[l], x, rows)
            else:
                past = _past(view, anchors, context, l)
                out = layer(model.config, blocks[l], x, rows, past, implementation=implementation)
            x = out.x
            if l in layers:
                states[l] = out
    segments = np.asarray(context.segments)
    return Evidence(
        queries=tuple(states[l].q for l in layers if l in states),
        pic=tuple(context.kv[l] for l in layers),
        query=tuple(states[l].kv for l in layers if l in states),
        begun=_recompute_first(model, context, view, implementation),
        scoring_rows=np.pad(scoring_rows, (0, padding)),
        query_positions=query_positions,
        positions=np.asarray(context.positions),
        segments=segments,
        offsets=chunk_offsets(segments),
    )


def _past(view: View, anchors: AnchorCache | None, context: ContextCache, l: int) -> Past | None:
    """What the query attends to at layer l under the view's token choice."""
    if view.tokens == "query":
        return None
    if view.tokens == "context":
        return Past(context.kv[l], jnp.asarray(context.positions))
    if anchors is None:
        raise ValueError(f'The token view "{view.tokens}" needs an anchor cache; make one with stitch_anchors.')
    nothing = anchors.positions.shape[1] == 0  # neither prefix nor anchors
    return None if nothing else Past(anchors.kv[l], jnp.asarray(anchors.positions[l]))


def _recompute_first(model: Model, context: ContextCache, view: View, implementation: Implementation) -> Begun | None:
    """The first `view.fresh` layers, recomputed under the real context for every position.

    With `view.kept`, only that share of the context goes on after layer 1, 2, ...: those that deviate most, keys and
    values together. The others keep their cached entries from there on, so nothing of them deviates any more.
    """
    if not view.fresh:
        return None
    fresh: list[LayerKV] = []
    ran: list[Bool[Array, " S"]] = []
    real = jnp.asarray(context.segments) >= 0
    keep, blocks = jnp.ones(real.shape, bool), model.layers
    x, rows = start(model.config, model.params, context.tokens, context.positions)
    for l in range(view.fresh):
        first_check = view.fresh - 1 - len(view.kept)
        if l > first_check:
            deviation = squared_difference(fresh[-1], context.kv[l - 1], "both")
            count = budget("floor", view.kept[l - 1 - first_check], context.num_tokens)
            keep &= ~real | top_k(jnp.where(real & keep, deviation, -jnp.inf), count)
        x, kv = _mixed_layer(
            model.config,
            blocks[l],
            x,
            rows,
            context.kv[l] if l > first_check else None,
            keep,
            keys_only=l == view.fresh - 1,
            implementation=implementation,
        )
        fresh.append(kv)
        ran.append(keep & real)
    return Begun(tuple(fresh), x, jnp.stack(ran))


@functools.partial(jax.jit, static_argnames=("config", "keys_only", "implementation"))
def _mixed_layer(
    config: ModelConfig,
    block: Params,
    x: Float[Array, "S D"],
    rows: Rows,
    pic: LayerKV | None,
    keep: Bool[Array, " S"],
    *,
    keys_only: bool,
    implementation: Implementation = None,
) -> tuple[Float[Array, "S D"], LayerKV]:
    """A layer over all positions, in which those that are not kept read and leave their cached entries."""
    q, k, v = project(config, block, x)
    kv = LayerKV(rotate(k, rows.cos, rows.sin), v)
    if pic is not None:
        kv = jax.tree.map(lambda new, old: jnp.where(keep[:, None, None], new, old), kv, pic)
    if keys_only:
        return x, kv
    attended = selective_attention(
        rotate(q, rows.cos, rows.sin),
        kv.k,
        kv.v,
        rows.positions,
        key_positions=rows.positions,
        implementation=implementation,
    )
    return finish(config, block, x, attended), kv


def chunk_offsets(segments: Int[np.ndarray, " S"]) -> Int[np.ndarray, " S"]:
    """Position of every entry inside its own segment.

    >>> chunk_offsets(np.array([-2, -2, 0, 0, 0, 1, -1]))
    array([0, 1, 0, 1, 2, 0, 0], dtype=int32)
    """
    index = np.arange(len(segments), dtype=np.int32)
    first = np.r_[True, segments[1:] != segments[:-1]] if len(segments) else np.zeros(0, bool)
    return index - np.maximum.accumulate(np.where(first, index, 0)).astype(np.int32)
