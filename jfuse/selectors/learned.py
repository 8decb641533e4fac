"""A learned score: non-negative weights of layers and heads over the logarithm of their attention.

The training-free selectors trust all heads of a layer alike. Here each head has a weight, fitted so that the tokens
which hold the answer stand out: a listwise softmax over the context, which is convex in the head weights. Sums of
attention itself do not train (they fall for whichever layer is most diffuse); logarithms, scaled per head, do.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jfuse.config import TokenView, View
from jfuse.selectors.base import Selector
from jfuse.selectors.made_once import made_once
from jfuse.selectors.score import Denominator, per_layer_attention, scoring_rows
from jfuse.types import AnyArray, Evidence

FLOOR = 1e-6  # attention below this counts as none


class ScoreWeights(NamedTuple):
    """Parameters of a learned score, one row per view layer, in the view's order."""

    layer: Float[AnyArray, " Lv"]  # >= 0
    head: Float[AnyArray, "Lv N"]  # >= 0
    scale: Float[AnyArray, "Lv N"]  # spread of each head's feature over the training set


@made_once
def learned(
    layers: tuple[int, ...] | None = None,
    *,
    tokens: TokenView = "anchors",
    anchor_ratio: float | int = 0.1,
    denominator: Denominator = "all",
) -> Selector:
    """QCFuse's evidence under learned weights, given to `select` as `params`; without them all heads weigh alike.

    `train.fit` finds the weights; a selection with them is hard or soft like any other. Ours, in neither paper.

    Args:
        layers: the view's layers; None reads every layer.
        tokens: the token view; "context" gives the sharpest scores and reads the whole cache.
    """
    view = View(tokens, layers, anchor_ratio)
    return Selector(view, log_attention(denominator), ratio=0.5, name="learned", source="ours")


@made_once
def log_attention(denominator: Denominator = "all"):
    """The score: log-attention of every head, weighted and added up."""

    def score(evidence: Evidence, params: Any = None) -> Float[Array, "Lv S"]:
        seen = features(evidence, denominator)
        weights = equal_weights(*seen.shape[:2]) if params is None else ScoreWeights(*params)
        return weighted(weights, seen).sum(1)

    return score


def equal_weights(num_layers: int, num_heads: int) -> ScoreWeights:
    """Every head of every view layer with the same weight: where training starts."""
    ones = jnp.ones((num_layers, num_heads), jnp.float32)
    return ScoreWeights(jnp.ones(num_layers, jnp.float32), ones / ones.size, ones)


def features(evidence: Evidence, denominator: Denominator = "all") -> Float[Array, "Lv N S"]:
    """log(attention + 1e-6) of every head, averaged over the question's rows first, centred over the context."""
    mass = per_layer_attention(evidence, denominator, scoring_rows(evidence, "question"), "each", "mean")
    real = (jnp.asarray(evidence.segments) >= 0)[None, None]
    raw = jnp.where(real, jnp.log(mass + FLOOR), 0.0)
    return jnp.where(real, raw - raw.sum(-1, keepdims=True) / real.sum().astype(raw.dtype), 0.0)


def weighted(weights: ScoreWeights, seen: Float[Array, "Lv N S"]) -> Float[Array, "Lv N S"]:
    """Each head's share of the score."""
    factor = jnp.asarray(weights.layer)[:, None] * jnp.asarray(weights.head) / jnp.asarray(weights.scale)
    return factor[..., None] * seen


def span_loss(
    weights: ScoreWeights,
    seen: Float[Array, "Lv N S"],
    span: Bool[AnyArray, " S"],
    context: Bool[AnyArray, " S"],
) -> Float[Array, ""]:
    """Listwise cross-entropy: a softmax over the context should point at the answer's tokens, each alike."""
    scores = jnp.where(jnp.asarray(context), weighted(weights, seen).sum((0, 1)), -1e30)
    log_share = jax.nn.log_softmax(scores)
    span = jnp.asarray(span)
    return -jnp.where(span, log_share, 0.0).sum() / span.sum().astype(jnp.float32)
