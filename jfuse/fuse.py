"""Fusion: selected positions run again under the real context, and their keys and values replace the cached ones.

In come a stitched `ContextCache` and a `Selection`; out comes the fused cache. `fuse` gathers the selected rows and
runs only them; `soft_fuse` recomputes everything and mixes, which is slow, differentiable, and the definition that
`fuse` must equal at 0/1 weights: an unselected position's hidden state reaches nobody.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import Implementation, round_up
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model, Params, Rows, finish, make_rows, project, start
from jfuse.pallas.rotate import rotate
from jfuse.pallas.scatter_rows import scatter_rows
from jfuse.pallas.selective_attention import selective_attention
from jfuse.pallas.soft_attention import soft_attention
from jfuse.types import PAD_POSITION, PREFIX_SEGMENT, AnyArray, Begun, ContextCache, LayerKV, Selection
from jfuse.visible import Readable, gather, gathered_size, key_counts, readable


class Work(NamedTuple):
    """The static shape of a hard selection: what a fusion will run. Host values."""

    rows: tuple[int, ...]  # recomputed positions per layer, exact, not growing with depth
    restricted: bool  # whether recomputed rows see less than their whole prefix
    keys: tuple[int, ...] | None = None  # keys that the rows of a layer may read, if restricted and counted
    begun: int = 0  # first layers that the probe has run as this fusion would


def fusion_work(selection: Selection, segments: Int[AnyArray, " S"] | None = None, begun: Begun | None = None) -> Work:
    """Counts a hard selection. This is the one point where a fusion waits for the device.

    Args:
        segments: the context's. With them the keys of a restricted context are counted, so that they can be gathered.
        begun: the evidence's first layers. They count if the probe ran just the positions that the selection names
            there; of the last of them it may have run more.

    Raises:
        TypeError: a soft selection, whose weights `fuse` would have to round; use `soft_fuse`. Or a traced one, which
            cannot be counted.
        ValueError: target sets that are not nested in depth.
    """
    if isinstance(selection.recompute, Tracer):
        raise TypeError(
            "This selection is traced (inside jit, vmap or grad), so its rows cannot be counted; count it outside and "
            "give fuse(..., work=fusion_work(selection)), or use soft_fuse, which needs no count."
        )
    if selection.recompute.dtype != np.bool_:
        raise TypeError(
            f"fuse takes a boolean selection, got {selection.recompute.dtype} weights; "
            "use soft_fuse, or select with pick=top_k."
        )
    ran = None if begun is None else begun.ran
    counts, restricted, resurfacing, keys, other = jax.device_get(_count(selection, segments, ran))
    if resurfacing:
        raise ValueError(
            f"{resurfacing} positions are recomputed at a layer but not at the one before; a position must run through "
            "all earlier layers. Make `recompute` a reverse running maximum over layers."
        )
    keys = tuple(int(n) for n in keys) if restricted and keys is not None else None
    return Work(tuple(int(n) for n in counts), bool(restricted), keys, 0 if ran is None or other else len(ran))


@jax.jit
def _count(selection: Selection, segments: Int[AnyArray, " S"] | None, ran: Bool[AnyArray, "F S"] | None):
    recompute = selection.recompute
    keys = None if segments is None else key_counts(selection, segments)
    other = None
    if ran is not None:
        first = recompute[: len(ran)]
        other = (first[:-1] != ran[:-1]).any() | (first[-1] & ~ran[-1]).any()
    return recompute.sum(-1), ~selection.visible.all(), (recompute[1:] & ~recompute[:-1]).sum(), keys, other


def fuse(
    model: Model,
    context: ContextCache,
    selection: Selection,
    *,
    work: Work | None = None,
    begun: Begun | None = None,
    row_block: int = 1,
    donate: bool = False,
    implementation: Implementation = None,
) -> ContextCache:
    """The fused cache KV^Fuse(C): rows gathered, scattered before they attend, causal by position (QCFuse section 3.4).

    `context.kv` may be an iterator over layers that are still arriving. Rows start from token embeddings. A row that is
    not selected at the next layer needs only its keys and values here, so its attention and MLP are left out; that
    is so for every row at the last layer.

    Args:
        work: `fusion_work(selection, context.segments, begun)` if it is known already; needed inside a trace. It must
            be of this very selection, which is not checked again.
        begun: `evidence.begun`, so that layers which the probe has run are not run again. Only where `context` is the
            one that was probed.
        row_block: rows are padded to a multiple of this, so that similar budgets share one compilation; serving uses
            128.
        donate: overwrite the given layers in place. Only while serving: the caller's `context` is gone afterwards.

    Raises:
        TypeError: a soft selection.
        ValueError: target sets that are not nested in depth.
    """
    work = work or fusion_work(selection, jnp.asarray(context.segments), begun)
    layers = fuse_layers(
        model, context, selection, work, begun, row_block=row_block, donate=donate, implementation=implementation
    )
    return context._replace(kv=tuple(layers))


def fuse_layers(
    model: Model,
    context: ContextCache,
    selection: Selection,
    work: Work,
    begun: Begun | None = None,
    *,
    row_block: int = 1,
    donate: bool = False,
    implementation: Implementation = None,
) -> Iterator[LayerKV]:
    """The layers of `fuse` one by one, each as soon as its recomputation is dispatched."""
    segments = jnp.asarray(context.segments)
    sizes = [round_up(n, row_block) if n else 0 for n in (*work.rows, 0)]
    positions = jnp.asarray(context.positions, jnp.int32)
    state, blocks = None, model.layers
    rows_at = functools.partial(_gather, model.config, model.params, context.tokens, positions)
    for l, pic in enumerate(context.kv):
        if sizes[l] == 0:
            yield pic
            continue
        stay = None
        if begun is not None and l < work.begun:
            pic = _take(begun.kv[l], pic, selection.recompute[l])
            if l + 1 < work.begun or sizes[l + 1] == 0:
                yield pic
                continue
            state = rows_at(selection.recompute[l + 1], sizes[l + 1], begun.x)
        else:
            if state is None:
                state = rows_at(selection.recompute[0], sizes[l])
            if sizes[l + 1] == 0:
                write = _write_layer_donating if donate else write_layer
                yield write(model.config, blocks[l], state, pic, implementation=implementation)
                continue
            if work.rows[l + 1] != work.rows[l]:  # nested sets of one size are one set
                stay = _stay(state.place, selection.recompute[l + 1], sizes[l + 1])
        keys = None
        if work.restricted:
            size = gathered_size(work.keys[l], len(positions), row_block) if work.keys else None
            keys = readable(selection, l, segments, size)
        run = _fuse_layer_donating if donate else fuse_layer
        x, pic = run(
            model.config,
            blocks[l],
            state,
            pic,
            positions,
            stay,
            keys,
            selection.window,
            implementation=implementation,
        )
        state = state._replace(x=x) if stay is None else _compact(state, x, stay)
        yield pic


class FusionState(NamedTuple):
    """The rows under recomputation between two layers. Padding rows point past the end: gathers fill, scatters drop."""

    x: Float[Array, "R D"]
    place: Int[Array, " R"]  # index into the context, sorted
    rows: Rows


@functools.partial(jax.jit, static_argnames=("config", "size"))
def _gather(config, params, tokens, positions, recompute, size, x=None) -> FusionState:
    """The selected positions as rows: their token embeddings, or the states `x` of all positions at a later layer."""
    (index,) = jnp.nonzero(recompute, size=size, fill_value=recompute.shape[0])
    at = positions.at[index].get(mode="fill", fill_value=PAD_POSITION)
    if x is None:
        x, rows = start(config, params, jnp.asarray(tokens).at[index].get(mode="fill", fill_value=0), at)
    else:
        x, rows = x.at[index].get(mode="fill", fill_value=0), make_rows(config, at)
    return FusionState(x, _distinct(index, recompute.shape[0]), rows)


@jax.jit
def _take(fresh: LayerKV, pic: LayerKV, recompute: Bool[Array, " S"]) -> LayerKV:
    """The layer with what the probe has computed for the positions that are recomputed at it."""
    return jax.tree.map(lambda new, old: jnp.where(recompute[:, None, None], new, old), fresh, pic)


def _distinct(place: Int[Array, " R"], end: int | Int[Array, ""]) -> Int[Array, " R"]:
    """Padding places made different from each other, because the scatter is told that its indices are unique."""
    return jnp.where(place >= end, end + jnp.arange(place.shape[0]), place).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="size")
def _stay(index: Int[Array, " R"], recompute: Bool[Array, " S"], size: int) -> Int[Array, " r"]:
    """Which of the rows go on to the next layer; padding points past the end."""
    goes_on = recompute.at[index].get(mode="fill", fill_value=False)
    return jnp.nonzero(goes_on, size=size, fill_value=index.shape[0])[0].astype(jnp.int32)


@jax.jit
def _compact(state: FusionState, x: Float[Array, "r D"], stay: Int[Array, " r"]) -> FusionState:
    place = state.place.at[stay].get(mode="fill", fill_value=PAD_POSITION)
    return FusionState(x, _distinct(place, PAD_POSITION), _take_rows(state.rows, stay))


def _take_rows(rows: Rows, stay: Int[Array, " r"]) -> Rows:
    cos, sin = (table.at[stay].get(mode="fill", fill_value=0) for table in (rows.cos, rows.sin))
    return Rows(rows.positions.at[stay].get(mode="fill", fill_value=PAD_POSITION), cos, sin)


def _fuse_layer(
    config: ModelConfig,
    block: Params,
    state: FusionState,
    pic: LayerKV,
    positions: Int[Array, " S"],
    stay: Int[Array, " r"] | None,
    keys: Readable | None,
    window: Int[AnyArray, ""],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "r D"], LayerKV]:
    """One layer of fusion: project the rows, scatter their keys and values, then attend over the updated layer.

    Args:
        stay: rows that go on to the next layer; None when all do.
        keys: the restricted context; None when rows see everything before them.
    """
    x, rows = state.x, state.rows
    q, layer = _project_into(config, block, state, pic, implementation)
    if stay is not None:
        x, q = (a.at[stay].get(mode="fill", fill_value=0) for a in (x, q))
        rows = _take_rows(rows, stay)
    seen, at, visible = gather(layer, positions, keys)
    attended = selective_attention(
        rotate(q, rows.cos, rows.sin),
        seen.k,
        seen.v,
        rows.positions,
        key_positions=at,
        visible=visible,
        window=window,
        implementation=implementation,
    )
    return finish(config, block, x, attended), layer


def _write_layer(
    config: ModelConfig, block: Params, state: FusionState, pic: LayerKV, *, implementation: Implementation = None
) -> LayerKV:
    """The layer after which no row goes on: keys and values are written, attention and MLP are left out."""
    return _project_into(config, block, state, pic, implementation)[1]


def _project_into(
    config: ModelConfig, block: Params, state: FusionState, pic: LayerKV, implementation: Implementation
) -> tuple[Float[Array, "R N H"], LayerKV]:
    """Queries of the rows, not rotated, and the layer with the rows' keys and values in it."""
    q, k, v = project(config, block, state.x)
    new = LayerKV(rotate(k, state.rows.cos, state.rows.sin), v)
    return q, scatter_rows(pic, state.place, new, implementation=implementation)


fuse_layer = jax.jit(_fuse_layer, static_argnames=("config", "implementation"))
_fuse_layer_donating = jax.jit(_fuse_layer, static_argnames=("config", "implementation"), donate_argnames="pic")
write_layer = jax.jit(_write_layer, static_argnames=("config", "implementation"))
_write_layer_donating = jax.jit(_write_layer, static_argnames=("config", "implementation"), donate_argnames="pic")


@functools.partial(jax.jit, static_argnames="remat")
def soft_fuse(model: Model, context: ContextCache, selection: Selection, *, remat: bool = True) -> ContextCache:
    """The dense, differentiable fusion: at each layer w * KV^New + (1 - w) * KV^PIC, for all positions.

    `recompute` mixes new and cached entries; `visible` weighs each key inside the softmax, where a position always
    sees itself, its window and the prefix in full. Checkpointed per layer: only the hidden states [L, S, D] are kept
    for the backward pass.
    """
    config = model.config
    segments, positions = jnp.asarray(context.segments), jnp.asarray(context.positions, jnp.int32)
    x, rows = start(config, model.params, context.tokens, positions)
    pic = jax.tree.map(lambda *layers: jnp.stack(layers), *context.kv)
    visible = jnp.broadcast_to(selection.visible, selection.recompute.shape).astype(jnp.float32)
    visible = jnp.where(segments == PREFIX_SEGMENT, 1.0, visible)

    def body(x, layer):
        block, pic, weight, seen = layer
        q, k, v = project(config, block, x)
        weight = weight.astype(jnp.float32)[:, None, None]
        new = LayerKV(rotate(k, rows.cos, rows.sin), v)
        mixed = jax.tree.map(lambda n, p: _mix(weight, n, p), new, pic)
        attended = soft_attention(
            rotate(q, rows.cos, rows.sin), mixed.k, mixed.v, positions, weights=seen, window=selection.window
        )
        return finish(config, block, x, attended), mixed

    body = jax.checkpoint(body) if remat else body
    _, kv = jax.lax.scan(body, x, (model.params["blocks"], pic, selection.recompute, visible))
    return context._replace(kv=tuple(LayerKV(kv.k[l], kv.v[l]) for l in range(config.num_layers)))


def _mix(weight: Float[Array, "S 1 1"], new: Float[Array, "S K H"], pic: Float[Array, "S K H"]):
    return (weight * new.astype(jnp.float32) + (1 - weight) * pic.astype(jnp.float32)).astype(pic.dtype)


def cache_error(a: ContextCache, b: ContextCache) -> Float[Array, " L"]:
    """Relative L2 distance of two caches of one request per layer, keys and values together, over context positions."""
    real = (jnp.asarray(a.segments) >= 0)[:, None, None]

    def total(layer):
        return sum(jnp.where(real, values.astype(jnp.float32) ** 2, 0.0).sum() for values in layer)

    def one(ours: LayerKV, theirs: LayerKV):
        difference = jax.tree.map(lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), ours, theirs)
        square = total(difference)
        # The square root has no gradient at 0, where layer 0 always stands.
        root = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
        return root / jnp.sqrt(total(theirs))

    return jnp.stack([one(ours, theirs) for ours, theirs in zip(a.kv, b.kv, strict=True)])
