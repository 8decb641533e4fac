"""QCFuse (2606.05875): the query is probed over compact anchors and scored on a few critical layers."""

from typing import Literal

from jfuse.config import View
from jfuse.pallas.attention_mass import Reduce
from jfuse.selectors.allocate import layerwise, restricted, union
from jfuse.selectors.base import Selector
from jfuse.selectors.made_once import made_once
from jfuse.selectors.score import Denominator, query_attention


@made_once
def qcfuse(
    layers: tuple[int, ...],
    *,
    anchor_ratio: float | int = 0.1,
    denominator: Denominator = "all",
    heads: Reduce = "mean",
    rows: Reduce = "mean",
) -> Selector:
    """QCFuse with the given critical layers (0-based), as `profile.critical_layers` finds them.

    The budget is floor(ratio * N), at least one. Where the paper is silent, these are the settings of the authors'
    current code: the softmax runs over prefix, context and query; only the question's rows score; heads, rows and
    layers are averaged (in June 2026 heads and rows were maximised). Anchors differ by layer, as in the code; the
    paper's one set per chunk is a property of the chunks: encode them with `anchors.shared(rule)`.

    Raises:
        ValueError: no layers.
    """
    if not layers:
        raise ValueError("qcfuse needs at least one critical layer (0-based); profile.critical_layers finds them.")
    return Selector(
        View("anchors", layers, anchor_ratio),
        query_attention(denominator=denominator, heads=heads, rows=rows),
        name="qcfuse",
        source="2606.05875, sections 3.2-3.4",
    )


@made_once
def qcfuse_demo(layer: int, *, tokens: Literal["anchors", "query"] = "anchors") -> Selector:
    """The earlier QCFuse system (2604.08585): one critical layer, anchors optional, ratio 0.3.

    Its scoring kernel is not public; QCFuse's stands in. The published layers (0-based) are 20 for Qwen3-8B, 13 for
    Llama-3.1-8B and 16 for Mistral-7B-v0.3.

    Args:
        tokens: "query" is the demo runner's default, in which the question sees no anchors.
    """
    return Selector(View(tokens, (layer,)), query_attention(), ratio=0.3, name="qcfuse_demo", source="2604.08585")


@made_once
def qcfuse_layerwise(layers: tuple[int, ...], *, anchor_ratio: float | int = 0.1) -> Selector:
    """QCFuse's view with RelaxKV's targets: each critical layer has its own set, and nothing else need be scored.

    A layer that is not critical takes the set of its nearest critical layer. Our combination, in neither paper.
    """
    return qcfuse(layers, anchor_ratio=anchor_ratio)._replace(
        allocate=layerwise, rule="round_half_even_min1", ratio=0.15, name="qcfuse_layerwise", source="ours"
    )


@made_once
def qcfuse_relaxkv(layers: tuple[int, ...], *, anchor_ratio: float | int = 0.1, window: int = 32) -> Selector:
    """`qcfuse_layerwise` with RelaxKV's recomputation context: rows see the union of the sets and a window.

    Without a window, rows lose their neighbours and quality falls below plain reuse on needle tasks.
    Our combination, in neither paper.
    """
    return qcfuse_layerwise(layers, anchor_ratio=anchor_ratio)._replace(
        allocate=restricted(layerwise, union, window), name="qcfuse_relaxkv"
    )
