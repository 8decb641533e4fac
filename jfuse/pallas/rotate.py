"""The rotation of RoPE itself: one definition for prefill and for the re-placement of stored keys."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(x: Float[Array, "T n H"], cos: Float[Array, "T F"], sin: Float[Array, "T F"]) -> Float[Array, "T n H"]:
    """Rotates the leading 2F dimensions of every head; dimensions past the rotary part stay bit-identical.

    Pairs are half-split (dimension i with i + F), the layout of Hugging Face checkpoints. Computed in float32.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, x[..., 2 * half :]], axis=-1)
