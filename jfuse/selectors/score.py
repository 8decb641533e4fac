"""Scores: evidence to importance, one row per view layer, higher means recompute. Float32 throughout."""

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jfuse.pallas.attention_mass import Reduce, attention_mass, log_mass
from jfuse.types import PADDING_SEGMENT, Evidence

Denominator = Literal["all", "prefix+context", "context"]


@functools.cache
def query_attention(*, denominator: Denominator = "all", heads: Reduce = "mean", rows: Reduce = "mean"):
    """The attention that the question's rows pay to each context position (QCFuse eqs. 10 and 18).

    The first of the four scoring switches, the query states, is the view's token choice; which rows score is the
    evidence's `scoring_rows`; the other two are here.

    Args:
        denominator: the softmax set: context alone; prefix and context; or both and the query itself, causally.
        heads: how query heads are reduced. Sum and mean rank alike, maximum does not.
        rows: how question rows are reduced.
    """
    if denominator not in ("all", "prefix+context", "context"):
        raise ValueError(f'denominator is {denominator!r}; use "all", "prefix+context" or "context".')

    def score(evidence: Evidence, params=None) -> Float[Array, "Lv S"]:
        segments = jnp.asarray(evidence.segments)
        counted = segments >= 0 if denominator == "context" else segments != PADDING_SEGMENT
        at = jnp.asarray(evidence.query_positions)

        def one(q, pic, own):
            others = log_mass(q, own.k, at, key_positions=at) if denominator == "all" else None
            return attention_mass(
                q,
                pic.k,
                at,
                key_positions=jnp.asarray(evidence.positions),
                rows=jnp.asarray(evidence.scoring_rows),
                counted=counted,
                others=others,
                heads=heads,
                over_rows=rows,
            )

        return jnp.stack([one(*layer) for layer in zip(evidence.queries, evidence.pic, evidence.query, strict=True)])

    return score
