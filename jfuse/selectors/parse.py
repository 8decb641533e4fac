"""From a text such as `relaxkv:window=32` to a selector: a name of the catalogue and settings of its function.

Settings read like the keywords of a Python call, `cacheblend_paper:schedule=(0.5, 0.3)`. Values are literals; what is
none is text, so that words need no quotes. Nothing is evaluated.
"""

import ast
import inspect
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jfuse.selectors.base import Selector
from jfuse.selectors.listing import NAMED, by_name, layer_argument


def parse_selector(text: str, *, layers: Sequence[int] = ()) -> Selector:
    """The selector that a text names; if the text has settings, it is the selector's name from then on.

    >>> parse_selector("relaxkv:window=32").name
    'relaxkv:window=32'

    Args:
        layers: critical layers (0-based) for the selectors that need them; others ignore them.

    Raises:
        ValueError: an unknown selector or setting, a value that the setting does not take, or a selector that needs
            layers and got none.
    """
    name, _, rest = text.partition(":")
    settings = _keywords(text, rest)
    if name in NAMED:
        _check(name, settings)
    selector = by_name(name, layers=tuple(layers), **settings)
    return selector._replace(name=text) if settings else selector


def needs_layers(text: str) -> bool:
    """Whether a text names a selector that needs critical layers."""
    name = text.partition(":")[0]
    return name in NAMED and layer_argument(NAMED[name][0]) is not None


def _keywords(text: str, rest: str) -> dict[str, Any]:
    """The settings in `rest`, read as what stands between the parentheses of a call."""
    source = f"_({rest})"
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):  # ValueError: a null byte
        call = None
    match call:  # a parenthesis of the text's own may close the call early, and then the whole is no such call
        case ast.Call(ast.Name(), [], keywords) if all(keyword.arg for keyword in keywords):
            settings = {str(keyword.arg): _value(source, keyword.value) for keyword in keywords}
        case _:
            raise ValueError(f"The settings in {text!r} cannot be read; write selector:setting=value,setting=value.")
    if len(settings) < len(keywords):
        raise ValueError(f"{text!r} names a setting twice; leave one out.")
    return settings


def _value(source: str, node: ast.expr) -> Any:
    """A literal's value, or the text as it stands."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # TypeError: a set of lists, for example
        return ast.get_source_segment(source, node)


def _check(name: str, settings: dict[str, Any]) -> None:
    """Refuses settings that the selector's function does not have or whose types it does not take."""
    parameters = inspect.signature(NAMED[name][0]).parameters
    known = {key: one.annotation for key, one in parameters.items() if key not in ("layers", "layer")}
    for setting, value in settings.items():
        if setting not in known:
            others = f"use some of {', '.join(known)}" if known else "it has none"
            raise ValueError(f"Selector {name!r} has no setting {setting!r}; {others}.")
        if not _takes(known[setting], value):
            raise ValueError(f"{setting} of selector {name!r} is {value!r}; use {_in_words(known[setting])}.")


def _takes(kind: Any, value: Any) -> bool:
    """Whether a value is of an annotated kind, exactly: True is no integer."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_takes(part, value) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return type(value) is tuple and all(_takes(parts[0], one) for one in value)
    return value is None if kind is None else type(value) is kind


def _in_words(kind: Any) -> str:
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else inspect.formatannotation(kind)
