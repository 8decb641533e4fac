"""The selector: data plus mathematics.

`view` says what must be visible, `score` rates positions, `allocate` spends the budget.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import BudgetRule, View, budget, checked_ratio
from jfuse.selectors.allocate import AllocateFn, BudgetedPick, uniform
from jfuse.selectors.topk import top_k
from jfuse.types import AnyArray, Evidence, Selection, Sizes

ScoreFn = Callable[[Evidence, Any], Float[Array, "Lv S"]]
SpendFn = Callable[[float, Sizes], int | tuple[int, ...]]
PickFn = Callable[..., Any]


class Selector(NamedTuple):
    """A selection method. Hashable, hence a static argument of jit; build variants with `_replace`.

    `score(evidence, params)` rates every position on each layer of the view, [Lv, S], or on all of them together,
    [1, S]; prefix and padding are never chosen, whatever they score.

    `rule` and `ratio` are the method's own rounding rule and default ratio; `source` is the paper's section. `spend`
    stands in for `rule` where a method counts other tokens than the context's, or has a second budget.
    """

    view: View
    score: ScoreFn
    allocate: AllocateFn = uniform
    rule: BudgetRule = "floor_min1"
    ratio: float = 0.5
    name: str = "custom"
    source: str = ""
    spend: SpendFn | None = None


def budget_for(selector: Selector, ratio: float | int | None, sizes: Sizes) -> int | tuple[int, ...]:
    """What `ratio` buys under the selector's own rule, exactly: the `k` of `select`. Host integers.

    >>> from jfuse import selectors
    >>> budget_for(selectors.epic(), 0.3, Sizes(prefix=0, chunks=(9, 9, 9)))  # chunk 0 is exact: 2 of 9 twice
    4

    Args:
        ratio: None takes the selector's default.
        sizes: `context.sizes(num_query)`.

    Raises:
        TypeError, ValueError: a ratio that is no number from 0 to 1.
    """
    ratio = checked_ratio(selector.ratio if ratio is None else ratio)
    return selector.spend(ratio, sizes) if selector.spend else budget(selector.rule, ratio, sizes.context)


def select(
    selector: Selector,
    evidence: Evidence,
    k: Int[AnyArray, ""] | int | tuple[Int[AnyArray, ""] | int, ...],
    *,
    num_layers: int,
    pick: PickFn = top_k,
    params: Any = None,
) -> Selection:
    """Chooses the positions to recompute. Compiled once per selector and bucket.

    Works inside a user's own jit, vmap or grad, where `pick` may close over traced values.

    Args:
        k: budget in context positions, as `budget_for` computes it exactly on the host; several for the selectors
            that have more than one.
        pick: `top_k`, or a soft pick such as `functools.partial(soft_top_k, temperature=0.1)`.
        params: parameters of a learned score; training-free scores ignore them.

    Raises:
        FloatingPointError: a score that is not finite, when called outside a trace.
        ValueError: evidence of other layers than the selector's view has, as far as their number tells.
    """
    found, wanted = len(evidence.pic), len(selector.view.layer_indices(num_layers))
    # Scores that come from elsewhere need no layers, and those that look at none can do with any.
    if (found and wanted and found != wanted) or len(evidence.fresh) < selector.view.fresh:
        raise ValueError(
            f"The evidence holds {found} layers, {len(evidence.fresh)} recomputed, and the view of selector "
            f"{selector.name!r} has {wanted}, {selector.view.fresh} recomputed; probe with this selector's view: "
            "probe(..., selector.view)."
        )
    selection, broken = _select(selector, evidence, k, num_layers, pick, params)
    if not isinstance(broken, Tracer):
        check_scores(selector, int(broken))
    return selection


def check_scores(selector: Selector, broken: int) -> None:
    """Refuses a selection of which `broken` scores were not finite.

    Raises:
        FloatingPointError: there are any.
    """
    if broken:
        raise FloatingPointError(
            f"{broken} scores of selector {selector.name!r} are NaN or infinite, so the selection is arbitrary. "
            "Check the model's weights and the chunk caches (jfuse verify)."
        )


def select_and_count(
    selector: Selector, evidence: Evidence, k: Any, num_layers: int, pick: PickFn = top_k, params: Any = None
) -> tuple[Selection, Int[Array, ""]]:
    """The definition of `select`, with the number of scores that are not finite beside it; for traces of your own."""
    context = context_mask(evidence)
    scores = selector.score(evidence, params).astype(jnp.float32)
    broken = (~jnp.isfinite(scores) & context[None]).sum()
    layers = selector.view.layer_indices(num_layers)
    budgeted = BudgetedPick(pick, k if isinstance(k, tuple) else (k,))
    chosen = selector.allocate(jnp.where(context[None], scores, -jnp.inf), budgeted, layers, num_layers)
    return Selection(
        jnp.where(context[None], chosen.recompute, jnp.zeros_like(chosen.recompute)),
        jnp.where(context[None], chosen.visible, jnp.ones_like(chosen.visible)),
        chosen.window,
    ), broken


_select = jax.jit(select_and_count, static_argnames=("selector", "num_layers", "pick"))


def context_mask(evidence: Evidence) -> Bool[Array, " S"]:
    """Which positions a budget counts: neither prefix nor padding."""
    return jnp.asarray(evidence.segments) >= 0


def no_score(evidence: Evidence, params: Any = None) -> Float[Array, "1 S"]:
    """Equal scores for all positions, for methods that do not rank."""
    return jnp.zeros((1, evidence.segments.shape[0]), jnp.float32)
