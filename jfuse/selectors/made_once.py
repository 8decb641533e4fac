"""Factories of static objects: equal arguments, however they are spelled, give the same object."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def made_once(factory: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` by the values of the arguments: defaults written out or not, by keyword or in place.

    What a factory makes is a static argument of jit, where another object means another compilation. A list counts as
    a tuple.
    """
    signature = inspect.signature(factory)

    @functools.cache
    def make(arguments):
        return cast(Callable[..., T], factory)(**dict(arguments))

    @functools.wraps(factory)
    def canonical(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = (tuple(value) if isinstance(value, list) else value for value in bound.arguments.values())
        return make(tuple(zip(bound.arguments, values, strict=True)))

    canonical.cache_info = make.cache_info  # type: ignore[attr-defined]
    return canonical
