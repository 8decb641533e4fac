"""EPIC / LegoLink (2410.15332): the first tokens of every chunk, which act as false sinks, are recomputed in place."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfuse.config import View
from jfuse.selectors import budgets
from jfuse.selectors.base import Selector
from jfuse.selectors.made_once import made_once
from jfuse.types import Evidence


@made_once
def epic(k: int | None = None, *, exempt_first: bool = True) -> Selector:
    """EPIC with the first k tokens of each chunk (LegoLink-k, the paper), or with a ratio of each chunk.

    Nothing need be loaded before the selection. A chunk shorter than k is recomputed whole, and k never reaches into
    the next one. How a ratio maps to k is not published; here it is the first floor(ratio * length) tokens of each
    chunk. LegoLink-0, which needs chunks encoded behind dummy tokens, is not offered.

    Args:
        k: tokens per chunk, whatever the ratio (the paper's choices are 0 to 64); None follows the ratio.
        exempt_first: leave out the request's first segment, as the paper does. It is the system prefix, or without
            one chunk 0, which is exact then. With a prefix, chunk 0 is not exempt.

    Raises:
        ValueError: a negative k.
    """
    if k is None:
        spend = budgets.each_chunk_but_first if exempt_first else budgets.each_chunk
        return Selector(
            View(), start_of_chunk(exempt_first), ratio=0.15, name="epic", source="2410.15332; ratio: ours", spend=spend
        )
    if k < 0:
        raise ValueError(f"k is {k}; use a number of tokens >= 0, or None for a ratio of each chunk.")
    spend = budgets.first_of_each_chunk(k, but_first=exempt_first)
    return Selector(
        View(), distance_from_start(exempt_first), ratio=0.0, name=f"epic_{k}", source="2410.15332", spend=spend
    )


@made_once
def start_of_chunk(exempt_first: bool):
    """Minus the share of its chunk that ends with a token: at ratio r, exactly floor(r * length) tokens exceed -r."""

    def score(evidence: Evidence, params: Any = None) -> Float[Array, "1 S"]:
        segments, offsets = jnp.asarray(evidence.segments), jnp.asarray(evidence.offsets)
        same = jnp.where(segments >= 0, segments, segments.shape[0])
        lengths = jnp.zeros(segments.shape[0] + 1, jnp.int32).at[same].add(1)[same]
        share = (offsets + 1).astype(jnp.float32) / lengths.astype(jnp.float32)
        return jnp.where(spared(evidence) & exempt_first, -2.0, -share)[None]

    return score


@made_once
def distance_from_start(exempt_first: bool):
    """Minus the offset inside the chunk: the first k tokens of every chunk are those above -k."""

    def score(evidence: Evidence, params: Any = None) -> Float[Array, "1 S"]:
        offsets = jnp.asarray(evidence.offsets).astype(jnp.float32)
        return jnp.where(spared(evidence) & exempt_first, -(2.0**30), -offsets)[None]

    return score


def spared(evidence: Evidence):
    """The first chunk if nothing precedes it."""
    segments = jnp.asarray(evidence.segments)
    return (segments == segments[0]) & (segments[0] >= 0)
