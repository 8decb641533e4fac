"""Moves layers between host and device ahead of their use: the only place that names transfers."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax

Layer = TypeVar("Layer")


def prefetch(
    layers: Iterable[Layer], *, ahead: int = 2, put: Callable[[Layer], Layer] = jax.device_put
) -> Iterator[Layer]:
    """Yields each layer on the device while the `ahead` layers after it are already on their way.

    Args:
        put: starts the transfer of one layer and returns at once; injected by tests.
    """
    source = iter(layers)
    queue = collections.deque(put(layer) for layer in itertools.islice(source, ahead))
    for layer in source:
        queue.append(put(layer))
        yield queue.popleft()
    yield from queue
