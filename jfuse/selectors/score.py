"""Scores: evidence to importance, one row per view layer, higher means recompute. Float32 throughout."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jfuse.config import check_choice
from jfuse.pallas.attention_mass import Reduce, attention_mass, log_mass
from jfuse.selectors.made_once import made_once
from jfuse.types import PAD_POSITION, PADDING_SEGMENT, Evidence, LayerKV

Denominator = Literal["all", "prefix+context", "context"]
Rows = Literal["question", "query"]
Deviation = Literal["values", "keys", "both"]


@made_once
def query_attention(
    *,
    denominator: Denominator = "all",
    heads: Reduce = "mean",
    rows: Reduce = "mean",
    scoring: Rows = "question",
):
    """The attention that the query's rows pay to each context position (QCFuse eqs. 10 and 18).

    These are three of the four scoring switches; the other one, the query states, is the view's token choice.

    Args:
        denominator: the softmax set: context alone; prefix and context; or both and the query itself, causally.
        heads: how query heads are reduced. Sum and mean rank alike, maximum does not.
        rows: how scoring rows are reduced, after the heads.
        scoring: which rows score: the question proper, or the whole query with its template head and tail.

    Raises:
        ValueError: a setting that is not one of the above.
    """
    check_choice("denominator", denominator, get_args(Denominator))
    check_choice("heads", heads, get_args(Reduce))
    check_choice("rows", rows, get_args(Reduce))
    check_choice("scoring", scoring, get_args(Rows))

    def score(evidence: Evidence, params: Any = None) -> Float[Array, "Lv S"]:
        return per_layer_attention(evidence, denominator, scoring_rows(evidence, scoring), heads, rows)

    return score


def per_layer_attention(
    evidence: Evidence,
    denominator: Denominator,
    scoring: Bool[Array, " U"],
    heads: Reduce | Literal["each"],
    over_rows: Reduce,
) -> Float[Array, "Lv S"] | Float[Array, "Lv N S"]:
    """Softmax mass of every view layer, in the view's order; "each" keeps the heads apart."""
    segments = jnp.asarray(evidence.segments)
    counted = segments >= 0 if denominator == "context" else segments != PADDING_SEGMENT
    at, positions = jnp.asarray(evidence.query_positions), jnp.asarray(evidence.positions)
    layers = zip(evidence.queries, evidence.pic, evidence.query, strict=True)
    own = denominator == "all"
    return jnp.stack(
        [
            _layer_attention(q, pic.k, query.k if own else None, at, positions, scoring, counted, heads, over_rows)
            for q, pic, query in layers
        ]
    )


# Compiled apart, so that a selector over all layers is traced for one of them.
@functools.partial(jax.jit, static_argnames=("heads", "over_rows"))
def _layer_attention(q, k, own, at, positions, scoring, counted, heads, over_rows):
    """Mass on the keys `k`; the query's `own` keys, if given, stand in the denominator alone."""
    others = None if own is None else log_mass(q, own, at, key_positions=at)
    return attention_mass(
        q,
        k,
        at,
        key_positions=positions,
        rows=scoring,
        counted=counted,
        others=others,
        heads=heads,
        over_rows=over_rows,
    )


def scoring_rows(evidence: Evidence, scoring: Rows) -> Bool[Array, " U"]:
    """The rows that score; padding never does."""
    chosen = evidence.scoring_rows if scoring == "question" else evidence.query_positions < PAD_POSITION
    return jnp.asarray(chosen)


@made_once
def min_max(score: Callable[..., Float[Array, "Lv S"]]):
    """A score scaled to [0, 1] per layer over the context (RelaxKV, section 3); a constant layer gives zeros.

    The order within a layer stays; what changes is how much each layer weighs in a mean over layers.
    """

    def scaled(evidence: Evidence, params: Any = None) -> Float[Array, "Lv S"]:
        raw, real = score(evidence, params), (jnp.asarray(evidence.segments) >= 0)[None]
        low = jnp.where(real, raw, jnp.inf).min(-1, keepdims=True)
        span = jnp.where(real, raw, -jnp.inf).max(-1, keepdims=True) - low
        # Compared with 0 rather than > 0, so that NaN stays NaN and is found.
        return jnp.where(real & (span != 0), (raw - low) / jnp.where(span == 0, 1.0, span), 0.0)

    return scaled


@made_once
def kv_deviation(layers: tuple[int, ...] = (1,), *, of: Deviation = "values"):
    """How far recomputed entries lie from cached ones: the sum of squared differences over KV heads and channels.

    Query-independent (CacheBlend, 2405.16444, section 4.2). In float32; the authors' code sums in the working dtype.

    Args:
        layers: the view's layers, as indices into the recomputed ones.
        of: values (the authors' code), keys after RoPE (LMCache), or both (the paper).

    Raises:
        ValueError: layer 0, where cached entries are exact and every difference is rounding noise.
    """
    check_choice("of", of, get_args(Deviation))
    if not layers or min(layers) < 1:
        raise ValueError(
            f"kv_deviation compares layers {layers}; use layers >= 1. At layer 0 keys and values depend on the token "
            "alone, so cached ones are exact."
        )

    def score(evidence: Evidence, params: Any = None) -> Float[Array, "Lv S"]:
        return jnp.stack([squared_difference(evidence.fresh[l], evidence.pic[i], of) for i, l in enumerate(layers)])

    return score


def squared_difference(fresh: LayerKV, pic: LayerKV, of: Deviation) -> Float[Array, " S"]:
    """Squared distance of two versions of one layer, per position."""
    names = {"values": ("v",), "keys": ("k",), "both": ("k", "v")}[of]
    pairs = [(getattr(fresh, name), getattr(pic, name)) for name in names]
    wide = [(jnp.asarray(new, jnp.float32), jnp.asarray(old, jnp.float32)) for new, old in pairs]
    return jax.tree.reduce(jnp.add, [jnp.square(new - old).sum((1, 2)) for new, old in wide])
