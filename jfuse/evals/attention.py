"""What the question's attention says without any label: where its mass lies, and how much of it a fused cache recovers.

In come a model, a question and a context cache in any state; out come masses per layer and position, and figures made
of them (QCFuse section 2.3, Fig. 5).
"""

import jax
import numpy as np
from jaxtyping import Bool, Float

from jfuse.config import View, budget
from jfuse.models.decoder import Model
from jfuse.pipeline import Question
from jfuse.probe import probe
from jfuse.selectors.score import query_attention
from jfuse.types import AnyArray, ContextCache

_attention = jax.jit(query_attention())


def question_mass(model: Model, context: ContextCache, question: Question) -> Float[np.ndarray, "L N"]:
    """The attention that the question pays to each context position at every layer, over this state of the cache.

    Mean over heads and question rows, softmax over prefix, context and question; prefix and padding are left out.
    """
    evidence = probe(model, question.tokens, None, context, View("context", None), scoring=question.scoring)
    return np.asarray(_attention(evidence))[:, np.asarray(context.segments) >= 0]


def attention_recovery(full: Float[AnyArray, "L N"], other: Float[AnyArray, "_ _"]) -> Float[np.ndarray, " L"]:
    """Share of full prefill's question attention that another cache puts where full prefill puts it, per layer.

    The sum over positions of the smaller of the two masses, each layer's scaled to sum to one: one less their total
    variation. 1 where they agree.

    Raises:
        ValueError: masses of different shapes, or a layer without mass.
    """
    full, other = np.asarray(full, np.float64), np.asarray(other, np.float64)
    if full.shape != other.shape:
        raise ValueError(f"The masses have shapes {full.shape} and {other.shape}; give those of one request.")
    totals = full.sum(-1, keepdims=True), other.sum(-1, keepdims=True)
    if not all((total > 0).all() for total in totals):
        raise ValueError("A layer pays no attention to the context; there is nothing to recover.")
    return np.minimum(full / totals[0], other / totals[1]).sum(-1)


def mass_curve(mass: Float[AnyArray, " N"], shares: Float[AnyArray, " P"]) -> Float[np.ndarray, " P"]:
    """Share of the mass that the best `shares` of the positions hold (QCFuse Fig. 5, left).

    Between whole positions the curve is linear, so that it is concave and ends at 1.

    >>> mass_curve(np.array([1.0, 6.0, 3.0, 0.0]), np.array([0.25, 0.5, 1.0])).tolist()
    [0.6, 0.9, 1.0]
    """
    ranked = np.sort(np.asarray(mass, np.float64))[::-1]
    reached = np.concatenate([[0.0], np.cumsum(ranked)]) / ranked.sum()
    return np.interp(np.asarray(shares, np.float64) * len(ranked), np.arange(len(reached)), reached)


def layer_overlap(mass: Float[AnyArray, "L N"], share: float = 0.1) -> Float[np.ndarray, " L"]:
    """Share of the best positions over all layers that each layer ranks best too (QCFuse Fig. 5, right).

    Both sets hold floor(share * N) positions; those over all layers are ranked by the sum.

    Raises:
        ValueError: too few positions for a set of one.
    """
    mass = np.asarray(mass, np.float64)
    k = budget("floor", share, mass.shape[-1])
    if k < 1:
        raise ValueError(f"A share of {share} of {mass.shape[-1]} positions is none; use a longer context.")
    best = _top(mass.sum(0), k)
    return np.array([(_top(layer, k) & best).sum() / k for layer in mass])


def _top(scores: Float[np.ndarray, " N"], k: int) -> Bool[np.ndarray, " N"]:
    """The k best positions; ties go to the lower one."""
    chosen = np.zeros(len(scores), bool)
    chosen[np.argsort(-scores, kind="stable")[:k]] = True
    return chosen
