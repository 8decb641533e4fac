"""The selector: data plus mathematics.

`view` says what must be visible, `score` rates positions, `allocate` spends the budget.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import BudgetRule, View
from jfuse.selectors.allocate import uniform
from jfuse.selectors.topk import top_k
from jfuse.types import AnyArray, Evidence, Selection

ScoreFn = Callable[[Evidence, Any], Float[Array, "Lv S"]]
AllocateFn = Callable[..., Selection]
PickFn = Callable[..., Any]


class Selector(NamedTuple):
    """A selection method. Hashable, hence a static argument of jit; build variants with `_replace`.

    `rule` and `ratio` are the method's own rounding rule and default ratio; `source` is the paper's section.
    """

    view: View
    score: ScoreFn
    allocate: AllocateFn = uniform
    rule: BudgetRule = "floor_min1"
    ratio: float = 0.5
    name: str = "custom"
    source: str = ""


def select(
    selector: Selector,
    evidence: Evidence,
    k: Int[AnyArray, ""] | int,
    *,
    num_layers: int,
    pick: PickFn = top_k,
    params: Any = None,
) -> Selection:
    """Chooses the positions to recompute. Compiled once per selector and bucket.

    Works inside a user's own jit, vmap or grad, where `pick` may close over traced values.

    Args:
        k: budget in context positions (`jfuse.budget` computes it exactly on the host).
        pick: `top_k`, or a soft pick such as `functools.partial(soft_top_k, temperature=0.1)`.
        params: parameters of a learned score; training-free scores ignore them.

    Raises:
        FloatingPointError: a score that is not finite, when called outside a trace.
    """
    selection, broken = _select(selector, evidence, k, num_layers, pick, params)
    if not isinstance(broken, jax.core.Tracer) and int(broken):
        raise FloatingPointError(
            f"{int(broken)} scores of selector {selector.name!r} are NaN or infinite, so the selection is arbitrary. "
            "Check the model's weights and the chunk caches (jfuse verify)."
        )
    return selection


def _select_fn(selector, evidence, k, num_layers, pick, params) -> tuple[Selection, Int[Array, ""]]:
    context = context_mask(evidence)
    scores = selector.score(evidence, params).astype(jnp.float32)
    broken = (~jnp.isfinite(scores) & context).sum()
    layers = selector.view.layer_indices(num_layers)
    selection = selector.allocate(jnp.where(context, scores, -jnp.inf), lambda s: pick(s, k), layers, num_layers)
    return selection._replace(
        recompute=jnp.where(context, selection.recompute, 0).astype(selection.recompute.dtype)
    ), broken


_select = jax.jit(_select_fn, static_argnames=("selector", "num_layers", "pick"))


def context_mask(evidence: Evidence) -> Bool[Array, " S"]:
    """Which positions a budget counts: neither prefix nor padding."""
    return jnp.asarray(evidence.segments) >= 0


def no_score(evidence: Evidence, params: Any = None) -> Float[Array, "1 S"]:
    """Equal scores for all positions, for methods that do not rank."""
    return jnp.zeros((1, evidence.segments.shape[0]), jnp.float32)
