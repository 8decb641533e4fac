"""Allocators: scores and a pick become a `Selection` over the model's layers."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jfuse.types import Selection

BoundPick = Callable[[Float[Array, "*B S"]], Shaped[Array, "*B S"]]


def uniform(scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """One set for all layers, from the sum of the view layers' scores (QCFuse eq. 11)."""
    return same_everywhere(pick(scores.sum(0)), num_layers)


def nothing(scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """No position at any layer: plain reuse."""
    return same_everywhere(jnp.zeros(scores.shape[-1], bool), num_layers)


def everything(scores: Float[Array, "Lv S"], pick: BoundPick, layers: tuple[int, ...], num_layers: int) -> Selection:
    """Every context position at every layer: full prefill."""
    return same_everywhere(scores[0] > -jnp.inf, num_layers)


def same_everywhere(weights: Shaped[Array, " S"], num_layers: int) -> Selection:
    """A selection with one target set for all layers and the whole prefix visible."""
    recompute = jnp.broadcast_to(weights, (num_layers, weights.shape[0]))
    return Selection(recompute, jnp.ones((1, weights.shape[0]), weights.dtype), jnp.int32(0))
