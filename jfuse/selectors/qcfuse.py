"""QCFuse (2606.05875): the query is probed over compact anchors and scored on a few critical layers."""

import functools

from jfuse.config import View
from jfuse.selectors.base import Selector
from jfuse.selectors.score import Denominator, query_attention


@functools.cache
def qcfuse(layers: tuple[int, ...], *, anchor_ratio: float = 0.1, denominator: Denominator = "all") -> Selector:
    """QCFuse with the given critical layers (0-based), as `profile.critical_layers` finds them.

    Anchors differ by layer; the softmax runs over prefix, context and query; heads, rows and layers are averaged;
    the budget is floor(ratio * N), at least one. These are the settings of the authors' current code where the paper
    is silent.

    Raises:
        ValueError: no layers.
    """
    if not layers:
        raise ValueError("qcfuse needs at least one critical layer (0-based); profile.critical_layers finds them.")
    view = View("anchors", layers, anchor_ratio)
    return Selector(
        view, query_attention(denominator=denominator), name="qcfuse", source="2606.05875, sections 3.2-3.4"
    )
