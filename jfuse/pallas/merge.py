"""Attention over disjoint sets of keys, joined by the log-sum-exp of each: one cache after another, or split keys."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

NEGATIVE = -1e30  # the log-sum-exp of no keys; finite, so that a row that sees nothing gives zeros and not NaN


def merge(parts: Sequence[tuple[Float[Array, "R N H"], Float[Array, "R N"]]]) -> Float[Array, "R N H"]:
    """Attention over a union of disjoint key sets, from the partial result and log-sum-exp over each."""
    return merge_partial(parts)[0].astype(parts[0][0].dtype)


def merge_partial(
    parts: Sequence[tuple[Float[Array, "R N H"], Float[Array, "R N"]]],
) -> tuple[Float[Array, "R N H"], Float[Array, "R N"]]:
    """`merge` in float32, with the log-sum-exp over the union."""
    top = functools.reduce(jnp.maximum, [lse for _, lse in parts])
    weights = [jnp.exp(lse - top) for _, lse in parts]
    total = functools.reduce(jnp.add, weights)
    outs = [out.astype(jnp.float32) for out, _ in parts]
    shares = [out * (weight / total)[..., None] for out, weight in zip(outs, weights, strict=True)]
    return functools.reduce(jnp.add, shares), top + jnp.log(total)
