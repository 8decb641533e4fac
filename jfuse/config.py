"""Static settings of a request: what a selector must see, and how a fusion runs."""

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np

Implementation = Literal["xla", "pallas"] | None
TokenView = Literal["none", "query", "prefix", "anchors", "context"]
BudgetRule = Literal["floor_min1", "floor", "round_half_even_min1", "round_half_even", "ceil"]


@dataclass(frozen=True)
class View:
    """QCFuse's token view and layer view: what must be readable before positions can be selected.

    `tokens`: what the query is run over before its states score ("none": no probe at all; "query": the query alone;
    "prefix": system prefix; "anchors": prefix and per-chunk anchors; "context": prefix and whole stitched context).
    `layers`: 0-based layers whose context keys are scored; negative counts from the end; None means every layer.
    `values`: whether their values are scored too. `fresh`: how many first layers are recomputed for every position;
    `kept`: shares of the context that recomputation goes on with after layer 1, 2, ... of those (CacheBlend's filter).
    """

    tokens: TokenView = "none"
    layers: Sequence[int] | None = ()
    anchor_ratio: float | int = 0.1
    values: bool = False
    fresh: int = 0
    kept: Sequence[float] = ()

    def __post_init__(self):
        # A view is a static argument of jit; lists would not hash.
        object.__setattr__(self, "layers", None if self.layers is None else _integers("View.layers", self.layers))
        object.__setattr__(self, "kept", tuple(self.kept))
        check_choice("View.tokens", self.tokens, get_args(TokenView))
        if self.tokens != "none" and self.layers == ():
            raise ValueError(
                f"View.tokens is {self.tokens!r}, but View.layers is empty, so nothing would be scored; "
                "name the layers, or None for all."
            )
        checked_ratio(self.anchor_ratio, name="View.anchor_ratio")
        object.__setattr__(self, "anchor_ratio", float(self.anchor_ratio))
        if self.fresh < 0:
            raise ValueError(f"View.fresh is {self.fresh}; use a layer count >= 0.")
        for share in self.kept:
            checked_ratio(share, name="View.kept")

    def layer_indices(self, num_layers: int) -> tuple[int, ...]:
        """The view's layers as indices 0..num_layers-1, in the view's order.

        Raises:
            ValueError: a layer outside the model, or named twice; more fresh layers than the model has.
        """
        if self.fresh > num_layers:
            raise ValueError(f"View.fresh is {self.fresh}, but this model has {num_layers} layers; use fewer.")
        if self.layers is None:
            return tuple(range(num_layers))
        for layer in self.layers:
            if not -num_layers <= layer < num_layers:
                raise ValueError(
                    f"View.layers holds {layer}, but this model has layers 0..{num_layers - 1} "
                    f"(layers count from 0; negative counts from the end, down to {-num_layers})."
                )
        layers = tuple(layer % num_layers for layer in self.layers)
        if len(set(layers)) != len(layers):
            raise ValueError(f"View.layers {self.layers} names a layer twice; it would be counted twice. Drop one.")
        return layers


@dataclass(frozen=True)
class FusionConfig:
    """How one request is fused. Ratios count context positions only."""

    ratio: float | int | None = None  # None: the selector's own default
    pad_to: int = 512  # context bucket
    row_block: int = 128  # recomputed-row bucket
    ahead: int = 2  # layers in flight from the host; 0: each is read when it is needed, and waited for
    implementation: Implementation = None

    def __post_init__(self):
        if self.ratio is not None:
            object.__setattr__(self, "ratio", checked_ratio(self.ratio, name="FusionConfig.ratio"))
        for name, least in (("pad_to", 1), ("row_block", 1), ("ahead", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"FusionConfig.{name} is {value!r}; use an integer >= {least}.")
        if self.implementation not in (None, "xla", "pallas"):
            raise ValueError(f'FusionConfig.implementation is {self.implementation!r}; use None, "xla" or "pallas".')


def checked_ratio(ratio: float | int, *, name: str = "ratio") -> float:
    """`ratio` as a float in [0, 1].

    Raises:
        TypeError: not a real number (a string "0.3" is refused rather than converted).
        ValueError: outside [0, 1] or NaN.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real):
        raise TypeError(f"{name} is {ratio!r} of type {type(ratio).__name__}; use a number from 0 to 1.")
    if not 0.0 <= float(ratio) <= 1.0:
        raise ValueError(f"{name} is {ratio}; use a number from 0 (reuse) to 1 (full prefill).")
    return float(ratio)


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise TypeError(f"{name} is {values!r}; use a sequence of integers, such as (20, 21).") from None


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuses a setting outside its choices.

    Raises:
        ValueError: names the setting, the value and the choices.
    """
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(repr, allowed))}.")


def budget(rule: BudgetRule, ratio: float | int, n: int) -> int:
    """How many of `n` positions a ratio buys, exactly, by the method's own rounding rule (methods differ).

    The ratio is read as the fraction with denominator up to 10^6 that is nearest, so that 0.29 of 100 is 29 and 1/3
    of 3 is 1. The `_min1` rules give at least one position for a positive ratio. Selectors that count otherwise have
    no such rule: `budget_for` is right for all.

    >>> budget("floor_min1", 0.29, 100), budget("floor_min1", 1 / 3, 3), budget("floor_min1", 0.05, 9)
    (29, 1, 1)

    Raises:
        TypeError, ValueError: an unknown rule, or a ratio that is no number from 0 to 1.
    """
    check_choice("rule", rule, get_args(BudgetRule))
    exact = Fraction(checked_ratio(ratio)).limit_denominator(10**6) * n
    base, _, least = rule.partition("_min")
    count = {"floor": math.floor, "ceil": math.ceil, "round_half_even": round}[base](exact)
    at_least = int(least) if least and exact > 0 else 0
    return min(n, max(count, at_least))


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= n.

    >>> round_up(700, 512)
    1024
    """
    return -(-n // multiple) * multiple


def context_bucket(num_prefix: int, num_context: int, pad_to: int = 512) -> int:
    """Padded length of a context buffer. The prefix is padded apart, so that one prefix costs no extra variants."""
    return round_up(num_prefix, 64) + round_up(num_context, pad_to)


def anchor_bucket(num_prefix: int, num_context: int, ratio: float, num_anchors: int, pad_to: int = 512) -> int:
    """Padded length of an anchor cache: a function of the context bucket unless tiny chunks need more room."""
    usual = math.ceil(ratio * round_up(num_context, pad_to)) + 64
    return round_up(num_prefix, 64) + round_up(max(usual, num_anchors), 128)


def anchor_offsets(score: Any, ratio: float) -> np.ndarray:
    """The ceil(ratio * C) best positions of every layer, [L, C] to int32 [L, A], sorted; ties go to the lower one.

    >>> anchor_offsets([[0.1, 0.9, 0.5, 0.9]], 0.5).tolist()
    [[1, 3]]
    """
    score = np.asarray(score, np.float32)
    keep = budget("ceil", ratio, score.shape[1])
    return np.sort(np.argsort(-score, axis=1, kind="stable")[:, :keep], axis=1).astype(np.int32)


def query_bucket(num_query: int) -> int:
    """Padded length of a query."""
    return round_up(num_query, 64)


def chunk_bucket(num_tokens: int) -> int:
    """Padded length of a chunk: multiples of 128 up to 512, of 512 above."""
    return round_up(num_tokens, 128 if num_tokens <= 512 else 512)
