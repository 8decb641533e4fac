"""The two ends and the control: recompute nothing, everything, or positions drawn at random."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jfuse.config import View
from jfuse.selectors.allocate import everything, nothing
from jfuse.selectors.base import Selector, no_score
from jfuse.selectors.made_once import made_once
from jfuse.types import Evidence


@made_once
def reuse() -> Selector:
    """Direct reuse of the stitched cache; only the query is computed."""
    return Selector(View(), no_score, nothing, ratio=0.0, name="reuse", source="direct PIC reuse")


@made_once
def recompute_all() -> Selector:
    """Every context position recomputed: full prefill through the fusion path, the quality reference."""
    return Selector(View(), no_score, everything, ratio=1.0, name="recompute_all", source="full prefill")


@made_once
def random(seed: int = 0) -> Selector:
    """Positions drawn uniformly, the control that every selector must beat.

    The draw depends on seed and position alone, so padding changes nothing.
    """

    def noise(evidence: Evidence, params=None) -> Float[Array, "1 S"]:
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(jnp.arange(evidence.segments.shape[0]))
        return jax.vmap(jax.random.uniform)(keys)[None]

    return Selector(View(), noise, name="random", source="control")
