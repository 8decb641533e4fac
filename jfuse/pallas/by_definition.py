"""A kernel takes its gradient from the plain XLA definition that it implements."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def by_definition(kernel: Callable[..., Any], definition: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`kernel` of positional arrays, whose reverse derivative is that of `definition` at the same arguments.

    Args:
        static: settings that both take by keyword.
    """
    defined = functools.partial(definition, **static)
    if kernel is definition:
        return defined
    run = jax.custom_vjp(functools.partial(kernel, **static))

    def forward(*arguments):
        return run(*arguments), arguments

    def backward(arguments, cotangents):
        return jax.vjp(defined, *arguments)[1](cotangents)

    run.defvjp(forward, backward)
    return run
