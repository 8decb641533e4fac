"""RelaxKV (2609.33503): every layer has its own targets, which see only the union of all layers' targets.

With it come the controls of its paper, which take the two ideas apart. All score alike and differ in allocation.
"""

from jfuse.config import View
from jfuse.selectors import budgets
from jfuse.selectors.allocate import (
    as_many_as_union,
    capacity,
    layerwise,
    restricted,
    strongest_overall,
    strongest_per_layer,
    uniform,
    union,
    union_of_second,
)
from jfuse.selectors.base import Selector
from jfuse.selectors.made_once import made_once
from jfuse.selectors.score import Denominator, Rows, min_max, query_attention

ROUND = "round_half_even_min1"


@made_once
def relaxkv(*, window: int = 0, scoring: Rows = "query") -> Selector:
    """RelaxKV: k = max(1, round(ratio * N)) positions per layer, by attention scaled to [0, 1] within the layer.

    U is the union over layers; a target runs from layer 0 to the deepest layer that chose it, sees U and itself, and
    stays in U with its cached entries after that. The realised share of layer-token states is far above the nominal
    ratio. The paper is silent about the prefix (here always visible), the softmax set (here everything, as in a
    forward pass) and ties (lower position first); `round` is half to even.

    Args:
        window: positions before each row that it sees too; 0 is the paper's.
        scoring: all rows of the query score in the paper; "question" leaves the template out.

    Raises:
        ValueError: a negative window.
    """
    return Selector(
        View("context", None),
        min_max(query_attention(denominator="all", scoring=scoring)),
        restricted(layerwise, union, window),
        rule=ROUND,
        ratio=0.15,
        name="relaxkv",
        source="2609.33503, section 3",
    )


@made_once
def relaxkv_full_prefix() -> Selector:
    """Control: RelaxKV's targets, which see everything before them."""
    return relaxkv()._replace(allocate=layerwise, ratio=0.2, name="relaxkv_full_prefix", source="2609.33503, table 5")


@made_once
def relaxkv_g(*, denominator: Denominator = "context", window: int = 0) -> Selector:
    """Control: ProphetKV's global targets in RelaxKV's context, the union of layer-wise sets at the same ratio.

    A target need not lie in the context; it sees itself all the same. Targets and context are ranked by one score,
    ProphetKV's by default, so that with the whole prefix visible this is `prophetkv` exactly.
    """
    return relaxkv()._replace(
        score=query_attention(denominator=denominator, scoring="query"),
        allocate=restricted(uniform, union_of_second, window),
        rule="floor_min1",
        ratio=0.2,
        name="relaxkv_g",
        source="2609.33503, table 1",
        spend=budgets.targets_and_context("floor_min1", ROUND),
    )


@made_once
def global_sparse(*, window: int = 0) -> Selector:
    """Control: RelaxKV's targets; the context is the |U| positions of largest mean score."""
    return relaxkv()._replace(
        allocate=restricted(layerwise, strongest_overall, window), name="global_sparse", source="2609.33503, table 3"
    )


@made_once
def layerwise_sparse(*, window: int = 0) -> Selector:
    """Control: RelaxKV's targets; at each layer the context is its own |U| positions of largest score."""
    return relaxkv()._replace(
        allocate=restricted(layerwise, strongest_per_layer, window),
        name="layerwise_sparse",
        source="2609.33503, table 3",
    )


@made_once
def target_capacity(*, context_ratio: float = 0.2, window: int = 0) -> Selector:
    """Control: one global target set of min(floor(ratio * N), |U|) positions in the union of layer-wise sets.

    The ratio is the paper's r_g; only the count is capped by |U|, the set is not cut to it. At ratio 1 this is
    `target_union`, not full prefill.

    Args:
        context_ratio: share of each layer's set, from which U is made; fixed while the ratio varies.
    """
    return relaxkv()._replace(
        allocate=restricted(capacity, union_of_second, window),
        rule="floor",
        ratio=0.2,
        name="target_capacity",
        source="2609.33503, tables 7-8",
        spend=budgets.targets_and_context("floor", ROUND, context_ratio),
    )


@made_once
def target_union(*, window: int = 0) -> Selector:
    """Control: one global target set of |U| positions, U the union of layer-wise sets; the set is not U itself."""
    return relaxkv()._replace(
        allocate=restricted(as_many_as_union, union, window),
        ratio=0.2,
        name="target_union",
        source="2609.33503, tables 7-8",
    )
