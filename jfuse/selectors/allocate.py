"""Allocators: scores and a pick become a `Selection` over the model's layers.

Two things are chosen: the targets (which positions run again, layer by layer) and the recomputation context (what
they may see). Every rule here means the same for weights {0, 1} and for weights in (0, 1): a maximum is a union.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jfuse.selectors.made_once import made_once
from jfuse.selectors.topk import Count
from jfuse.types import Selection

BoundPick = Callable[..., Shaped[Array, "*B S"]]
AllocateFn = Callable[..., Selection]


class BudgetedPick(NamedTuple):
    """A pick with its budgets: `pick(scores)` spends the first of them, `pick(scores, k)` any other count."""

    pick: Callable[..., Shaped[Array, "*B S"]]
    budgets: tuple[Count, ...]

    def __call__(self, scores: Float[Array, "*B S"], k: Count | None = None) -> Shaped[Array, "*B S"]:
        """Weights of the scores under budget k."""
        return self.pick(scores, self.budgets[0] if k is None else k)

    def budget(self, index: int) -> Count:
        """One of the budgets.

        Raises:
            ValueError: the selector spends more budgets than it was given.
        """
        if index >= len(self.budgets):
            raise ValueError(
                f"This selector spends {index + 1} or more budgets, but k holds {len(self.budgets)}; "
                "compute k with budget_for(selector, ratio, context.sizes(num_query))."
            )
        return self.budgets[index]


def uniform(scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """One set for all layers, from the sum of the view layers' scores (QCFuse eq. 11)."""
    return same_everywhere(pick(scores.sum(0)), num_layers)


def nothing(scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """No position at any layer: plain reuse."""
    return same_everywhere(jnp.zeros(scores.shape[-1], bool), num_layers)


def everything(scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """Every context position at every layer: full prefill."""
    return same_everywhere(scores[0] > -jnp.inf, num_layers)


def layerwise(scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """RelaxKV's targets (2609.33503, section 3): each layer's own set S_l, carried down to it from layer 0.

    R_l is the union of S_l and all deeper sets: to refresh a position at layer l, it must have run through every
    layer before. A model layer outside the view takes the set of its nearest view layer.
    """
    return seen_in_full(nested(at_every_layer(pick(scores), layers, num_layers)))


@made_once
def after_fresh(full: int) -> AllocateFn:
    """CacheBlend's staircase: every position at the first `full` layers, one set from there on; nothing at k = 0."""

    def allocate(scores, pick, layers, num_layers):
        chosen = pick(scores.sum(0))
        rows = [everyone(scores, pick, chosen.dtype)] * min(full, num_layers)
        return seen_in_full(jnp.stack(rows + [chosen] * (num_layers - len(rows))))

    return allocate


def filtered(scores: Float[Array, "Lv S"], pick: BudgetedPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """CacheBlend's gradual filter (2405.16444, section 4.3): each check layer lets fewer of the last ones go on.

    Budget 0 is what the last check layer lets through; budgets 1, 2, ... are those of the check layers before it.
    """
    kept, sets = jnp.ones(scores.shape[-1], scores.dtype), []
    for row, index in zip(scores, (*range(1, len(layers)), 0), strict=True):
        behind = jnp.where(row > -jnp.inf, row - (1.0 - kept) * (1.0 + jnp.where(row > -jnp.inf, row, 0.0).max()), row)
        sets.append(pick(behind, pick.budget(index)))
        kept = sets[-1].astype(scores.dtype)
    first = [everyone(scores, pick, sets[0].dtype)] * (layers[0] + 1)
    deeper = [sets[max(i for i, check in enumerate(layers) if check < l)] for l in range(layers[0] + 1, num_layers)]
    return seen_in_full(nested(jnp.stack((first + deeper)[:num_layers])))


def capacity(scores: Float[Array, "Lv S"], pick: BudgetedPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """One set for all layers, at most as large as the context that the second budget makes (RelaxKV, table 7)."""
    room = union_of_second(scores, pick, layers, num_layers).sum()
    return same_everywhere(pick(scores.mean(0), jnp.minimum(jnp.asarray(pick.budget(0), room.dtype), room)), num_layers)


def as_many_as_union(
    scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int
) -> Selection:
    """One set for all layers with as many positions as the union of the layers' sets, though not the same ones."""
    return same_everywhere(pick(scores.mean(0), union(scores, pick, layers, num_layers).sum()), num_layers)


@made_once
def restricted(targets: AllocateFn, context: Callable[..., Shaped[Array, "Lc S"]], window: int = 0) -> AllocateFn:
    """The given targets, which see the recomputation context and the `window` positions before each of them only.

    Raises:
        ValueError: a negative window.
    """
    if window < 0:
        raise ValueError(f"window is {window}; use a number of positions >= 0 (0 leaves a row only itself).")

    def allocate(scores, pick, layers, num_layers):
        visible = context(scores, pick, layers, num_layers)
        return targets(scores, pick, layers, num_layers)._replace(visible=visible, window=jnp.int32(window))

    return allocate


def union(
    scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int
) -> Shaped[Array, "1 S"]:
    """RelaxKV's shared context U: what any layer's own set holds."""
    return pick(scores).max(0, keepdims=True)


def union_of_second(
    scores: Float[Array, "Lv S"], pick: BudgetedPick, layers: tuple[int, ...], num_layers: int
) -> Shaped[Array, "1 S"]:
    """The same, with the second budget for each layer's set."""
    return pick(scores, pick.budget(1)).max(0, keepdims=True)


def strongest_overall(
    scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int
) -> Shaped[Array, "1 S"]:
    """The |U| positions of largest mean score (RelaxKV's control "Global Sparse")."""
    return pick(scores.mean(0), union(scores, pick, layers, num_layers).sum())[None]


def strongest_per_layer(
    scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int
) -> Shaped[Array, "L S"]:
    """At each layer its own |U| positions of largest score (RelaxKV's control "Layerwise Sparse")."""
    size = union(scores, pick, layers, num_layers).sum()
    return at_every_layer(pick(scores, size), layers, num_layers)


def same_everywhere(weights: Shaped[Array, " S"], num_layers: int) -> Selection:
    """A selection with one target set for all layers and the whole prefix visible."""
    return seen_in_full(jnp.broadcast_to(weights, (num_layers, weights.shape[0])))


def seen_in_full(recompute: Shaped[Array, "L S"]) -> Selection:
    """A selection whose rows see everything before them."""
    return Selection(recompute, jnp.ones((1, recompute.shape[1]), recompute.dtype), jnp.int32(0))


@jax.jit  # outside of a trace, the scan's many small steps would be compiled one by one
def nested(targets: Shaped[Array, "L S"]) -> Shaped[Array, "L S"]:
    """Each layer's targets and all deeper ones: the running maximum from the last layer up."""
    return jax.lax.associative_scan(jnp.maximum, targets, reverse=True)


def at_every_layer(rows: Shaped[Array, "Lv S"], layers: tuple[int, ...], num_layers: int) -> Shaped[Array, "L S"]:
    """One row per model layer: that of its nearest view layer, of two equally near ones the shallower."""
    order = sorted(range(len(layers)), key=lambda i: layers[i])
    return rows[np.array([min(order, key=lambda i: abs(layers[i] - l)) for l in range(num_layers)])]


def everyone(scores: Float[Array, "Lv S"], pick: BudgetedPick, dtype) -> Shaped[Array, " S"]:
    """Every context position, unless the budget is 0."""
    return ((scores[0] > -jnp.inf) & (jnp.asarray(pick.budget(0)) > 0)).astype(dtype)
