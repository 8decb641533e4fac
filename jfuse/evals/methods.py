"""What is compared: a selector with its settings at one ratio, named by a short text such as `relaxkv:window=32`.

In go such texts and a model; out come `Method`s. Full prefill and plain reuse are methods too, and always there: they
are the ends of the scale on which the others are placed.
"""

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jfuse.config import checked_ratio
from jfuse.models.decoder import Model
from jfuse.profile import load_profile
from jfuse.selectors import by_name
from jfuse.selectors.base import Selector
from jfuse.selectors.listing import ignores_ratio
from jfuse.selectors.parse import needs_layers, parse_selector

FULL, REUSE = "full prefill", "reuse"


class Method(NamedTuple):
    """One row of a comparison; no selector means full prefill."""

    name: str  # what results call it: the selector's name with its settings
    ratio: float
    selector: Selector | None = None

    @property
    def key(self) -> str:
        """Name and ratio in one text, unique within a run."""
        return f"{self.name}@{self.ratio:g}"


def ends() -> tuple[Method, Method]:
    """Full prefill and reuse."""
    return Method(FULL, 1.0), Method(REUSE, 0.0, by_name(REUSE))


def make_methods(
    names: Iterable[str],
    ratios: Sequence[float],
    *,
    layers: Sequence[int] = (),
    selectors: Mapping[str, Selector] | None = None,
    num_layers: int | None = None,
) -> list[Method]:
    """Both ends, then every named selector at every ratio; one that ignores the ratio is taken once.

    >>> [method.key for method in make_methods(["epic", "epic_16"], [0.1, 0.3])]
    ['full prefill@1', 'reuse@0', 'epic@0.1', 'epic@0.3', 'epic_16@0']

    Args:
        names: as `selectors.parse` reads them: `selector` or `selector:setting=value,setting=value`.
        layers: critical layers for the selectors that need them.
        selectors: selectors of your own, by the name that `names` uses.
        num_layers: of the model that they are for, if it is known; their layers are checked then.

    Raises:
        ValueError: what `parse_selector` refuses, a ratio outside [0, 1], or a layer that the model does not have.
    """
    methods = {method.key: method for method in ends()}
    for name in names:
        if name in (FULL, "full", "recompute_all", REUSE):
            continue
        selector = (selectors or {}).get(name) or parse_selector(name, layers=layers)
        if num_layers is not None:
            selector.view.layer_indices(num_layers)
        for ratio in (0.0,) if ignores_ratio(selector) else ratios:
            method = Method(name, checked_ratio(ratio, name="ratios"), selector)
            methods[method.key] = method
    return list(methods.values())


def needed_layers(
    names: Iterable[str], model: Model, *, layers: Sequence[int] = (), profile: str | Path | None = None
) -> tuple[int, ...]:
    """Critical layers for selectors of these names: the given ones, or if some are needed, those of a profile.

    Args:
        layers: what is given; it is not looked for then.
        profile: a file that `save_profile` wrote; by default the profile that ships for the model.

    Raises:
        LookupError: layers are needed, and jfuse ships no profile of the model.
        ValueError: the file's profile is of another model, or of one with fewer layers than are critical.
    """
    if layers or not any(map(needs_layers, names)):
        return tuple(layers)
    return load_profile(model, profile).critical_layers()


def describe(selector: Selector) -> dict[str, str]:
    """What tells a selector of the user's own from a former one of its name: view, rule, and its functions' text."""
    described = {"view": repr(selector.view), "rule": selector.rule}
    for name in ("score", "allocate"):
        try:
            text = inspect.getsource(inspect.unwrap(getattr(selector, name)))
        except (OSError, TypeError):  # typed into a prompt, or no Python function
            text = ""
        described[f"{name}_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return described
