"""What is compared: a selector with its settings at one ratio, named by a short text such as `relaxkv:window=32`.

In go such texts and a model; out come `Method`s. Full prefill and plain reuse are methods too, and always there: they
are the ends of the scale on which the others are placed.
"""

import ast
import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jfuse.config import checked_ratio
from jfuse.selectors import by_name
from jfuse.selectors.base import Selector
from jfuse.selectors.listing import NAMED, ignores_ratio, layer_argument

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
) -> list[Method]:
    """Both ends, then every named selector at every ratio; one that ignores the ratio is taken once.

    >>> [method.key for method in make_methods(["epic", "epic_16"], [0.1, 0.3])]
    ['full prefill@1', 'reuse@0', 'epic@0.1', 'epic@0.3', 'epic_16@0']

    Args:
        names: `selector` or `selector:setting=value,setting=value`, with the settings of the selector's function.
        layers: critical layers for the selectors that need them.
        selectors: selectors of your own, by the name that `names` uses.

    Raises:
        ValueError: an unknown selector or setting, or a ratio outside [0, 1].
    """
    methods = {method.key: method for method in ends()}
    for name in names:
        if name in (FULL, "full", "recompute_all", REUSE):
            continue
        selector = (selectors or {}).get(name) or parse_selector(name, layers=layers)
        for ratio in (0.0,) if ignores_ratio(selector) else ratios:
            method = Method(name, checked_ratio(ratio, name="ratios"), selector)
            methods[method.key] = method
    return list(methods.values())


def parse_selector(text: str, *, layers: Sequence[int] = ()) -> Selector:
    """The selector that a text such as `relaxkv:window=32` names.

    Raises:
        ValueError: an unknown selector or setting, or a setting that is no Python literal.
    """
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} in {text!r} is not a setting; write {name}:setting=value.")
        settings[key.strip()] = _literal(value.strip())
    try:
        return by_name(name, layers=tuple(layers), **settings)
    except TypeError as error:
        raise ValueError(f"{text!r} names a setting that selector {name!r} does not have: {error}.") from error


def _literal(text: str) -> Any:
    """A number, truth value or tuple; anything else is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


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


def needs_layers(name: str) -> bool:
    """Whether a selector's text names one that needs critical layers."""
    base = name.partition(":")[0]
    return base in NAMED and layer_argument(NAMED[base][0]) is not None
