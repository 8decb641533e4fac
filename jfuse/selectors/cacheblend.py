"""CacheBlend (2405.16444): the first layers run for every token, and those whose cache deviates most go on."""

from typing import Literal, NamedTuple, get_args

from jfuse.config import View, check_choice
from jfuse.selectors import budgets
from jfuse.selectors.allocate import AllocateFn, after_fresh, filtered
from jfuse.selectors.base import Selector, SpendFn
from jfuse.selectors.made_once import made_once
from jfuse.selectors.score import Deviation, kv_deviation

Preset = Literal["code", "lmcache", "paper"]


class Settings(NamedTuple):
    """What the versions of CacheBlend differ in."""

    of: Deviation
    kept_fresh: int  # layers whose recomputed entries are kept for every token, counted past layer 0
    spend: SpendFn
    ratio: float
    source: str


SETTINGS: dict[Preset, Settings] = {
    "code": Settings("values", 1, budgets.prefix_and_context, 0.15, "2405.16444, authors' code"),
    "lmcache": Settings("keys", 0, budgets.whole_request, 0.15, "2405.16444, LMCache v1"),
    "paper": Settings("both", 1, budgets.prefix_and_context, 0.15, "2405.16444, section 4"),
}


@made_once
def cacheblend(preset: Preset = "code", *, check_layer: int = 1, schedule: tuple[float, ...] = ()) -> Selector:
    """CacheBlend, query-independent.

    "code" (the authors' repository): squared value difference at layer 1; the recomputed entries of layers 0 and 1
    stay for every token. "lmcache": squared difference of rotated keys; at the check layer only the chosen tokens are
    written. "paper": keys and values together, layers 0 and 1 fresh, and a gradual filter over the check layers.
    The paper counts layers from 1 and names the first; there nothing deviates, so its first layer is our layer 1.

    A budget of 0 is plain reuse: then no layer is refreshed. The prefix is never chosen, but "code" and "lmcache"
    count it (and the query) as the authors do.

    Args:
        check_layer: where deviation is first measured; every token runs through the layers up to it.
        schedule: preset "paper": falling shares of the context that go on after the first, second, ... check layer;
            the request's ratio goes on after the last. The paper publishes no constants; () checks once.

    Raises:
        ValueError: an unknown preset, a check layer below 1, or a schedule that is not falling or not the paper's.
    """
    check_choice("preset", preset, get_args(Preset))
    if check_layer < 1:
        raise ValueError(f"check_layer is {check_layer}; use a layer >= 1. At layer 0 cached entries are exact.")
    if schedule and preset != "paper":
        raise ValueError(f'schedule is {schedule}, but preset {preset!r} checks once; use preset="paper".')
    if list(schedule) != sorted(schedule, reverse=True) or any(not 0 < share <= 1 for share in schedule):
        raise ValueError(f"schedule is {schedule}; use shares in (0, 1] that do not grow.")
    settings = SETTINGS[preset]
    layers = tuple(range(check_layer, check_layer + len(schedule) + 1))
    view = View(layers=layers, values=settings.of != "keys", fresh=layers[-1] + 1, kept=schedule)
    allocate: AllocateFn = filtered if schedule else after_fresh(check_layer + settings.kept_fresh)
    return Selector(
        view,
        kv_deviation(layers, of=settings.of),
        allocate,
        rule="floor",
        ratio=settings.ratio,
        name="cacheblend" if preset == "code" else f"cacheblend_{preset}",
        source=settings.source,
        spend=budgets.filter_shares(schedule) if schedule else settings.spend,
    )
