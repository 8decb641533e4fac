"""The catalogue: every named selector, built by name, and the table of them that README and command line print."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from jfuse.config import View
from jfuse.selectors import budgets
from jfuse.selectors.a3 import a3
from jfuse.selectors.allocate import everything, nothing
from jfuse.selectors.base import Selector, budget_for
from jfuse.selectors.baselines import random, recompute_all, reuse
from jfuse.selectors.cacheblend import cacheblend
from jfuse.selectors.epic import epic
from jfuse.selectors.fusionrag import fusionrag
from jfuse.selectors.learned import learned
from jfuse.selectors.prophetkv import prophetkv
from jfuse.selectors.qcfuse import qcfuse, qcfuse_demo, qcfuse_layerwise, qcfuse_relaxkv
from jfuse.selectors.relaxkv import (
    global_sparse,
    layerwise_sparse,
    relaxkv,
    relaxkv_full_prefix,
    relaxkv_g,
    target_capacity,
    target_union,
)
from jfuse.types import Sizes

Factory = Callable[..., Selector]

LEFT_OUT: dict[str, str] = {
    "KVShare": "its choice of tokens has no public definition",
    "KVLink": "it needs weights trained with link tokens",
    "Cache-Craft": "its chunks are encoded behind others, whose attention it keeps; here each chunk is encoded alone",
}
"""Methods that the papers compare and jfuse does not offer, with the reason."""

NAMED: dict[str, tuple[Factory, dict[str, Any]]] = {
    "reuse": (reuse, {}),
    "recompute_all": (recompute_all, {}),
    "random": (random, {}),
    "epic": (epic, {}),
    "epic_16": (epic, {"k": 16}),
    "cacheblend": (cacheblend, {}),
    "cacheblend_lmcache": (cacheblend, {"preset": "lmcache"}),
    "cacheblend_paper": (cacheblend, {"preset": "paper"}),
    "a3": (a3, {}),
    "fusionrag": (fusionrag, {}),
    "fusionrag_qcfuse": (fusionrag, {"preset": "qcfuse"}),
    "prophetkv": (prophetkv, {}),
    "prophetkv_qcfuse": (prophetkv, {"preset": "qcfuse"}),
    "prophetkv_ucm": (prophetkv, {"preset": "ucm"}),
    "prophetkv_kvbench": (prophetkv, {"preset": "kvbench"}),
    "qcfuse": (qcfuse, {}),
    "qcfuse_demo": (qcfuse_demo, {}),
    "relaxkv": (relaxkv, {}),
    "relaxkv_full_prefix": (relaxkv_full_prefix, {}),
    "relaxkv_g": (relaxkv_g, {}),
    "global_sparse": (global_sparse, {}),
    "layerwise_sparse": (layerwise_sparse, {}),
    "target_capacity": (target_capacity, {}),
    "target_union": (target_union, {}),
    "qcfuse_layerwise": (qcfuse_layerwise, {}),
    "qcfuse_relaxkv": (qcfuse_relaxkv, {}),
    "learned": (learned, {}),
}


class Row(NamedTuple):
    """One line of the catalogue."""

    name: str
    token_view: str
    layer_view: str
    loaded_first: str
    ratio: str
    rounding: str
    paper: str


def by_name(name: str, *, layers: tuple[int, ...] = (), **settings: Any) -> Selector:
    """The selector of that name.

    Args:
        layers: critical layers (0-based) for the selectors that need them; others ignore them.
        settings: keyword arguments of the selector's function, over those that the name stands for.

    Raises:
        ValueError: an unknown name, or a selector that needs layers and got none.
    """
    if name not in NAMED:
        raise ValueError(f"There is no selector {name!r}; choose one of {', '.join(NAMED)}.")
    factory, preset = NAMED[name]
    needed = layer_argument(factory)
    if needed and not layers:
        raise ValueError(f"Selector {name!r} needs critical layers (0-based); profile.critical_layers finds them.")
    given = {"layers": {"layers": layers}, "layer": {"layer": (*layers, 0)[0]}, None: {}}[needed]
    return factory(**{**preset, **given, **settings})


def layer_argument(factory: Factory) -> str | None:
    """The name of a factory's argument for critical layers, if it has one without default."""
    parameters = inspect.signature(factory).parameters
    found = [name for name in ("layers", "layer") if name in parameters]
    return found[0] if found and parameters[found[0]].default is inspect.Parameter.empty else None


def catalogue() -> list[Row]:
    """Every named selector: what it must see, what of that must be loaded first, its ratio, rounding and paper."""
    rows = []
    for name, (factory, _) in NAMED.items():
        selector = by_name(name, layers=(0,))
        layers = {"layers": "critical", "layer": "one critical"}.get(layer_argument(factory) or "")
        layers = layers or layers_in_words(selector.view)
        ratio = "-" if ignores_ratio(selector) else f"{selector.ratio:g}"
        loaded = loaded_first(selector.view, layers)
        rows.append(Row(name, selector.view.tokens, layers, loaded, ratio, rounding(selector), selector.source))
    return rows


def layers_in_words(view: View) -> str:
    """The view's layers."""
    if view.layers is None:
        return "all"
    return "last" if view.layers == (-1,) else ", ".join(map(str, view.layers)) or "none"


def loaded_first(view: View, layers: str) -> str:
    """What of the cached keys and values must be readable before positions can be chosen, from the view alone."""
    kind = "keys and values" if view.values else "keys"
    named = {"critical": "the critical layers", "one critical": "the critical layer", "all": "all layers"}
    where = (named | {"last": "the last layer"}).get(layers, f"layer {layers}")
    return {
        "none": f"{kind} of {where}" if view.fresh else "nothing",
        "query": f"{kind} of {where}",
        "prefix": f"{kind} of {where}",
        "anchors": f"anchors down to the deepest layer, {kind} of {where}",
        "context": "keys and values of " + (where if view.layers is None else f"layers 0 to {layers}"),
    }[view.tokens]


def ignores_ratio(selector: Selector) -> bool:
    """Whether ratio 0 and ratio 1 buy the same."""
    sizes = Sizes(0, (1, 100, 100), 1)
    return selector.allocate in (nothing, everything) or budget_for(selector, 0, sizes) == budget_for(
        selector, 1, sizes
    )


def rounding(selector: Selector) -> str:
    """How a ratio becomes a count."""
    if selector.allocate in (nothing, everything):
        return "none or all"
    if selector.spend:
        line = budgets.first_line(selector.spend).rstrip(".")
        return line[:1].lower() + line[1:]
    return budgets.in_words(selector.rule)
