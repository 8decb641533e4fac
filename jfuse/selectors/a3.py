"""A^3 (2511.17560): attention of the query's rows at layer 1, smoothed along the sequence."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jfuse.config import View, check_choice
from jfuse.selectors import budgets
from jfuse.selectors.allocate import after_fresh
from jfuse.selectors.base import Selector
from jfuse.selectors.made_once import made_once
from jfuse.selectors.score import per_layer_attention, scoring_rows
from jfuse.types import PADDING_SEGMENT, Evidence

Products = Literal["softmax", "raw"]


@made_once
def a3(*, products: Products = "softmax", pool: int = 5) -> Selector:
    """A^3's selection: layers 0 and 1 run for every token, then the query's attention at layer 1 decides.

    Products are added up over heads and all rows of the query and averaged over `pool` neighbours, across chunk
    borders, zeros past the ends. Recomputation is CacheBlend's. Known to us from an analysis of the code, which leaves
    open whether the products pass through a softmax: here they do by default.

    Args:
        products: "raw" adds up the scaled dot products themselves.
        pool: width of the average, odd, so that scores keep their positions.

    Raises:
        ValueError: unknown products, or a width that is even or below 1.
    """
    check_choice("products", products, get_args(Products))
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"pool is {pool}; use an odd width >= 1.")

    def score(evidence: Evidence, params: Any = None) -> Float[Array, "1 S"]:
        fresh = evidence._replace(pic=(evidence.fresh[1],))
        if products == "softmax":
            mass = per_layer_attention(fresh, "all", scoring_rows(evidence, "query"), "mean", "mean")
        else:
            mass = mean_products(fresh)
        real = jnp.asarray(evidence.segments) != PADDING_SEGMENT
        return smooth(jnp.where(real[None], mass, 0.0), pool)

    view = View("context", (1,), fresh=2)
    return Selector(
        view,
        score,
        after_fresh(2),
        rule="floor",
        ratio=0.15,
        name="a3",
        source="2511.17560",
        spend=budgets.prefix_and_context,
    )


def mean_products(evidence: Evidence) -> Float[Array, "1 S"]:
    """Scaled dot products averaged over heads and query rows: heads of one group share their key."""
    q, k = evidence.queries[0].astype(jnp.float32), evidence.pic[0].k.astype(jnp.float32)
    rows = scoring_rows(evidence, "query").astype(jnp.float32)
    q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2]).mean(2)
    return jnp.einsum("U,UKH,SKH->S", rows, q, k)[None] / (rows.sum() * k.shape[1] * jnp.sqrt(jnp.float32(k.shape[2])))


def smooth(scores: Float[Array, "B S"], width: int) -> Float[Array, "B S"]:
    """Average over `width` neighbours, "same"-padded with zeros, so that every score keeps its position."""
    total = jax.lax.reduce_window(scores, 0.0, jax.lax.add, (1, width), (1, 1), "SAME")
    return total / width
