"""What a ratio buys where it is not a plain share of the context: other populations, fixed counts, two budgets.

Each rule takes a ratio and the request's token counts and gives exact host integers. Its first line is what the
catalogue prints.
"""

from jfuse.config import BudgetRule, budget
from jfuse.selectors.made_once import made_once
from jfuse.types import Sizes


def prefix_and_context(ratio: float, sizes: Sizes) -> int:
    """floor(ratio * (prefix + context)), at most the context.

    CacheBlend's code counts everything before the question, the system prompt included, although a prefix that
    stands at position 0 never deviates.
    """
    return min(sizes.context, budget("floor", ratio, sizes.prefix + sizes.context))


def whole_request(ratio: float, sizes: Sizes) -> int:
    """floor(ratio * (prefix + context + query)), at most the context."""
    return min(sizes.context, budget("floor", ratio, sizes.prefix + sizes.context + sizes.query))


def each_chunk(ratio: float, sizes: Sizes) -> int:
    """Sum of floor(ratio * length) over the chunks."""
    return sum(budget("floor", ratio, length) for length in sizes.chunks)


def each_chunk_but_first(ratio: float, sizes: Sizes) -> int:
    """Sum of floor(ratio * length) over the chunks, without a first one that is exact."""
    return each_chunk(ratio, spare_first(sizes))


@made_once
def first_of_each_chunk(count: int, *, but_first: bool):
    """A rule that ignores the ratio: the first `count` tokens of every chunk, or all of a shorter one."""

    def rule(ratio: float, sizes: Sizes) -> int:
        return sum(min(count, length) for length in (spare_first(sizes) if but_first else sizes).chunks)

    rule.__doc__ = f"first {count} tokens of each chunk{', without a first one that is exact' if but_first else ''}."
    return rule


@made_once
def targets_and_context(targets: BudgetRule, context: BudgetRule, context_ratio: float | None = None):
    """Two budgets: of the targets, and of the sets whose union is the recomputation context.

    Args:
        context_ratio: fixed; None takes the request's ratio.
    """

    def rule(ratio: float, sizes: Sizes) -> tuple[int, int]:
        other = ratio if context_ratio is None else context_ratio
        return budget(targets, ratio, sizes.context), budget(context, other, sizes.context)

    share = "ratio" if context_ratio is None else f"{context_ratio:g}"
    rule.__doc__ = f"targets {in_words(targets)}; context sets {in_words(context, share)}."
    return rule


@made_once
def filter_shares(shares: tuple[float, ...]):
    """Budgets of a gradual filter: the last one first, then what each earlier check lets through (at least that)."""

    def rule(ratio: float, sizes: Sizes) -> tuple[int, ...]:
        last = prefix_and_context(ratio, sizes)
        return last, *(max(last, budget("floor", share, sizes.context)) if last else 0 for share in shares)

    rule.__doc__ = f"{first_line(prefix_and_context)[:-1]}; before that floor(share * N) for {shares}."
    return rule


def in_words(rule: BudgetRule, share: str = "ratio") -> str:
    """A rounding rule as a formula in N, the number of context positions."""
    base, _, least = rule.partition("_min")
    return f"{base.replace('_', ' ')}({share} * N)" + (f", at least {least}" if least else "")


def spare_first(sizes: Sizes) -> Sizes:
    """The sizes without chunk 0 if nothing precedes it: its cache is exact already."""
    return sizes if sizes.prefix else sizes._replace(chunks=sizes.chunks[1:])


def first_line(thing) -> str:
    """The first line of a docstring."""
    return (thing.__doc__ or "").strip().partition("\n")[0]
