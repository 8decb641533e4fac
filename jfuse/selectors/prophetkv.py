"""ProphetKV (2602.02579): the query runs over the whole stitched cache and every layer scores."""

from typing import Literal, NamedTuple, get_args

from jfuse.config import BudgetRule, TokenView, View, check_choice
from jfuse.selectors.base import Selector
from jfuse.selectors.made_once import made_once
from jfuse.selectors.score import Denominator, Rows, query_attention

Preset = Literal["paper", "qcfuse", "ucm", "kvbench"]


class Settings(NamedTuple):
    """The switches in which the re-implementations disagree."""

    tokens: TokenView
    denominator: Denominator
    scoring: Rows
    rule: BudgetRule
    source: str


SETTINGS: dict[Preset, Settings] = {
    "paper": Settings("context", "context", "query", "floor_min1", "2602.02579"),
    "qcfuse": Settings("context", "all", "question", "floor_min1", "2602.02579 as run by 2606.05875"),
    "ucm": Settings("context", "prefix+context", "question", "floor", "2602.02579 as run by UCM"),
    "kvbench": Settings("query", "context", "query", "floor", "2602.02579 as run by KVBench"),
}


@made_once
def prophetkv(preset: Preset = "paper") -> Selector:
    """ProphetKV: attention of the query's rows, averaged over heads, rows and all layers; one set for all layers.

    What must be read before anything is selected is the whole cache. The paper's text was not open to us and three
    re-implementations disagree, so each is a preset. "paper", from notes on it, normalises over the context alone,
    which gives every layer, head and row the same weight, and lets all rows of the query score; "qcfuse" normalises
    over everything and "ucm" over prefix and context, and in both only the question's rows score; "kvbench" runs the
    query alone. Rounding is not published either; "paper" takes QCFuse's.

    Raises:
        ValueError: an unknown preset.
    """
    check_choice("preset", preset, get_args(Preset))
    chosen = SETTINGS[preset]
    return Selector(
        View(chosen.tokens, None),
        query_attention(denominator=chosen.denominator, scoring=chosen.scoring),
        rule=chosen.rule,
        ratio=0.2,
        name="prophetkv" if preset == "paper" else f"prophetkv_{preset}",
        source=chosen.source,
    )
