"""Rotary position embedding: one table of angles, shared by prefill and by the re-placement of cached keys.

Phases are float32 whatever the model's dtype. Pairs are half-split (dimension i with i + rotary_size / 2), the
layout of Hugging Face checkpoints. `jfuse.models.rope_scaling` makes the table from a checkpoint's settings.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.types import AnyArray


@dataclass(frozen=True)
class Rope:
    """Inverse frequencies of one model, after any scaling. Hashable, so it can be a static argument."""

    kind: str
    inv_freq: tuple[float, ...]  # rotary_size / 2 entries
    attention_factor: float = 1.0  # multiplies cos and sin, hence queries and keys once each (yarn, longrope)


@dataclass(frozen=True)
class LongRope:
    """Both factor sets of a longrope model (LongRoPE, 2024, section 3); the request's length says which one holds."""

    short: Rope
    long: Rope
    boundary: int  # requests of up to this many positions use the short set

    def at(self, total: int) -> Rope:
        """The set for a request of `total` positions."""
        return self.long if total > self.boundary else self.short


def default_rope(rotary_size: int, theta: float) -> Rope:
    """Unscaled RoPE over the leading `rotary_size` dimensions of a head (RoFormer, 2021, section 3.2).

    >>> default_rope(4, 10_000.0).inv_freq
    (1.0, 0.01)
    """
    exponents = np.arange(0, rotary_size, 2) / rotary_size
    return Rope("default", tuple((1.0 / theta**exponents).tolist()))


def angles(rope: Rope, positions: Int[AnyArray, " T"]) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """Cosine and sine of position times inverse frequency, float32, times the attention factor."""
    phase = jnp.asarray(positions, jnp.float32)[:, None] * jnp.asarray(rope.inv_freq, jnp.float32)[None, :]
    return jnp.cos(phase) * rope.attention_factor, jnp.sin(phase) * rope.attention_factor
