"""Picks: scores to weights under a budget. Hard picks give {0, 1}, soft ones (0, 1)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jfuse.types import AnyArray


def top_k(scores: Float[Array, "*B S"], k: Int[AnyArray, ""] | int) -> Bool[Array, "*B S"]:
    """Marks the k largest scores of each row; ties go to the lower position, NaN ranks last.

    The count is exact by rank, so k may be traced and a ratio sweep compiles once.

    >>> top_k(jnp.array([1.0, 3.0, 3.0, 2.0]), 2)
    Array([False,  True,  True, False], dtype=bool)
    """
    order = jnp.argsort(jnp.where(jnp.isnan(scores), jnp.inf, -scores), axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    return rank < k


def soft_top_k(
    scores: Float[Array, "*B S"], k: Int[AnyArray, ""] | int, *, temperature: Float[AnyArray, ""] | float = 0.1
) -> Float[Array, "*B S"]:
    """Differentiable top-k: sigmoid((score - threshold) / temperature), the threshold such that weights sum to k.

    The threshold is found by bisection outside the gradient; one differentiable Newton step then gives exactly the
    implicit gradient. Scores of -inf weigh nothing. At k = 0 and k = all the weights are the hard ones, gradient zero.
    """
    real = scores > -jnp.inf
    safe = jnp.where(real, scores, 0.0).astype(jnp.float32)
    count = real.sum(-1, keepdims=True)
    k = jnp.asarray(k, jnp.float32)

    def weights(threshold):
        return jnp.where(real, jax.nn.sigmoid((safe - threshold) / temperature), 0.0)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        too_many = weights(middle).sum(-1, keepdims=True) > k
        return jnp.where(too_many, middle, low), jnp.where(too_many, high, middle)

    fixed = jax.lax.stop_gradient(safe)
    reach = 40.0 * jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))  # sigmoid(40) is 1 in float32
    low = jnp.where(real, fixed, jnp.inf).min(-1, keepdims=True) - reach
    high = jnp.where(real, fixed, -jnp.inf).max(-1, keepdims=True) + reach
    low, high = jax.lax.stop_gradient(jax.lax.fori_loop(0, 64, halve, (low, high)))
    threshold = (low + high) / 2
    at = weights(threshold)
    slope = jax.lax.stop_gradient((at * (1 - at)).sum(-1, keepdims=True)) / temperature
    # d(sum of weights)/d(threshold) = -slope; where all weights are saturated there is nothing to correct.
    correction = (at.sum(-1, keepdims=True) - k) / jnp.maximum(slope, 1e-12)
    threshold = threshold + jnp.where(slope > 1e-6, correction, 0.0)
    inner = (k > 0) & (k < count)
    ends = jnp.where(real & (k >= count), 1.0, 0.0)
    return jnp.where(inner, weights(threshold), ends)
