"""Picks: scores to weights under a budget. Hard picks give {0, 1}, soft ones (0, 1)."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jfuse.selectors.made_once import made_once
from jfuse.types import AnyArray

Count = Int[AnyArray, ""] | Float[AnyArray, ""] | int
"""A budget. It is a float where it is itself a sum of soft weights."""


def top_k(scores: Float[Array, "*B S"], k: Count) -> Bool[Array, "*B S"]:
    """Marks the k largest scores of each row; ties go to the lower position, NaN ranks last, as -inf does.

    The count is exact by rank, so k may be traced and a ratio sweep compiles once.

    >>> top_k(jnp.array([1.0, 3.0, 3.0, 2.0]), 2)
    Array([False,  True,  True, False], dtype=bool)
    """
    order = jnp.argsort(jnp.where(jnp.isnan(scores), jnp.inf, -scores), axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    k = jnp.asarray(k)
    return rank.astype(k.dtype) < k


def soft_top_k(
    scores: Float[Array, "*B S"], k: Count, *, temperature: Float[AnyArray, ""] | float | int = 0.1
) -> Float[Array, "*B S"]:
    """Differentiable top-k: sigmoid((score - threshold) / temperature), the threshold such that weights sum to k.

    The threshold is found by bisection outside the gradient; one differentiable Newton step then gives exactly the
    implicit gradient. Scores of -inf weigh nothing. At k = 0 and k = all the weights are the hard ones, gradient zero.

    Raises:
        ValueError: a temperature, known outside a trace, that is not above 0; use `top_k` for the limit.
    """
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature is {temperature}; use a number above 0, or top_k for hard weights.")
    real = scores > -jnp.inf
    safe = jnp.where(real, scores, 0.0).astype(jnp.float32)
    count = real.sum(-1, keepdims=True).astype(jnp.float32)
    k = jnp.asarray(k, jnp.float32)

    def weights(values, threshold):
        return jnp.where(real, jax.nn.sigmoid((values - threshold) / temperature), 0.0)

    def bisect(values, low, high):
        def halve(_, ends):
            low, high = ends
            middle = (low + high) / 2
            too_many = weights(values, middle).sum(-1, keepdims=True) > k
            return jnp.where(too_many, middle, low), jnp.where(too_many, high, middle)

        return jax.lax.stop_gradient(jax.lax.fori_loop(0, 64, halve, (low, high)))

    fixed = jax.lax.stop_gradient(safe)
    reach = 40.0 * jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))  # sigmoid(40) is 1 in float32
    low = jnp.where(real, fixed, jnp.inf).min(-1, keepdims=True) - reach
    high = jnp.where(real, fixed, -jnp.inf).max(-1, keepdims=True) + reach
    low, high = bisect(fixed, low, high)
    # Large scores leave float32 few steps per temperature; counted from the threshold, they leave as many as needed.
    near, gap = safe - high, low - high
    threshold = bisect(jax.lax.stop_gradient(near), gap, jnp.zeros_like(gap))[1]
    at = weights(near, threshold)
    spread = jax.lax.stop_gradient((at * (1 - at)).sum(-1, keepdims=True))
    # d(sum of weights)/d(threshold) = -spread / temperature; where all are saturated there is nothing to correct.
    correction = (at.sum(-1, keepdims=True) - k) * temperature / jnp.maximum(spread, 1e-6)
    threshold = threshold + jnp.where(spread > 1e-6, correction, 0.0)
    inner = (k > 0) & (k < count)
    ends = jnp.where(real & (k >= count), 1.0, 0.0)
    return jnp.where(inner, weights(near, threshold), ends)


@made_once
def straight_through(temperature: float = 0.1):
    """A pick that is hard forward and soft backward: the weights of `top_k`, the gradient of `soft_top_k`."""

    def pick(scores: Float[Array, "*B S"], k: Count) -> Float[Array, "*B S"]:
        soft = soft_top_k(scores, k, temperature=temperature)
        hard = top_k(scores, k).astype(soft.dtype)
        return hard + (soft - jax.lax.stop_gradient(soft))

    return pick


def perturbed(key: Array, *, sigma: float = 0.1, num_samples: int = 100):
    """A pick by `optax.perturbations`: the mean of `top_k` under Gumbel noise, with its Monte-Carlo gradient.

    Weights sum to k. Every call gives a new pick, and a pick is a static argument of jit: make it once.

    Args:
        key: of the noise; the same key gives the same weights.
        sigma: scale of the noise, in units of the score.
    """

    def pick(scores: Float[Array, "*B S"], k: Count) -> Float[Array, "*B S"]:
        rows = scores.reshape(-1, scores.shape[-1])
        weights = jax.vmap(smooth, (0, 0, None))(jax.random.split(key, len(rows)), rows, k)
        return weights.reshape(scores.shape)

    def smooth(key, scores, k):
        real = scores > -jnp.inf

        def hard(noisy):
            return (top_k(jnp.where(real, noisy, -jnp.inf), k) & real).astype(jnp.float32)

        # optax takes differences of scores, which -inf has none of.
        finite = jnp.where(real, scores, 0.0).astype(jnp.float32)
        return jnp.asarray(optax.perturbations.make_perturbed_fun(hard, num_samples, sigma)(key, finite))

    return pick
