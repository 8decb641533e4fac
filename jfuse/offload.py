"""Moves arrays between host and device ahead of their use: the only place that names transfers and memory kinds.

Transfers start at once and end by themselves; whoever computes on a moved array waits for it on the device, not here.
"""

import collections
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

Layer = TypeVar("Layer")
Device: TypeAlias = Any  # jax.Device, which type checkers take for a variable

PINNED = "pinned_host"
ALIGNMENT = 64  # of host arrays that a CPU device may use in place
_noticed: set[str] = set()


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


def device_of(tree: Any) -> Device:
    """The device that a pytree of arrays lies on: that of its first array, the default one if it has none."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    first = next(arrays, None)
    return jax.devices()[0] if first is None else min(first.devices(), key=lambda device: device.id)


def to_device(tree: Any, device: Device) -> Any:
    """Starts moving a pytree to the device. What lies there already is left alone; aligned arrays may be aliased.

    Inside a jitted function it moves operands that were placed in pinned host memory.
    """

    def move(leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array):
            with jax.default_device(device):  # uncommitted, as everything else of a request is
                return jax.device_put(leaf)
        return leaf if _lies_on(leaf, device) else jax.device_put(leaf, SingleDeviceSharding(device))

    return jax.tree.map(move, tree)


def _lies_on(array: jax.Array, device: Device) -> bool:
    if isinstance(array, Tracer) or array.devices() != {device}:
        return False
    return array.sharding.memory_kind in (None, device.default_memory().kind)


def host_memory(device: Device, *, pinned: bool | None = None) -> str:
    """The kind of host memory that serves a device best: "pinned_host", or "ordinary" where that gains nothing.

    Pinned pages move at the link's full speed and without the host's help. A CPU device has the kind as well, but its
    own memory is host memory: ordinary arrays are used in place there, and pinned ones would be copied.

    Args:
        pinned: True asks for pinned memory on any device that has it; False does without; None decides as above. Where
            a device lacks the kind there is one notice, a `RuntimeWarning`.
    """
    has_kind = any(memory.kind == PINNED for memory in device.addressable_memories())
    wanted = device.platform != "cpu" if pinned is None else pinned
    if wanted and not has_kind:
        _notice(device.platform, f"{device.platform} devices have no {PINNED} memory here")
    return PINNED if wanted and has_kind else "ordinary"


def to_host(tree: Any, device: Device, kind: str) -> Any:
    """A pytree of frozen NumPy arrays in host memory of the given kind, from where `to_device` moves it.

    Pinned memory that is full gives way to ordinary memory, with one notice.
    """
    if kind != PINNED:
        return tree
    try:
        return jax.block_until_ready(jax.device_put(tree, SingleDeviceSharding(device, memory_kind=PINNED)))
    except jax.errors.JaxRuntimeError as error:
        _notice("full", f"{PINNED} memory is full ({str(error).splitlines()[0]})")
        return tree


def _notice(what: str, reason: str) -> None:
    """Warns once a process."""
    if what not in _noticed:
        _noticed.add(what)
        warnings.warn(
            f"{reason}; chunks are kept in ordinary host memory, which may move more slowly. Results do not change.",
            RuntimeWarning,
            stacklevel=4,
        )


def staged(array: Any, rows: int) -> Any:
    """A host array as it may wait for its transfer: at least `rows` long, and never written again.

    A read-only array is its owner's promise and is taken as it is (a store's views are); one that could still be
    refilled is copied, because a transfer may read it late and a CPU device may even use it in place. Arrays of JAX are
    immutable and pass.
    """
    if isinstance(array, jax.Array) or (not array.flags.writeable and array.shape[0] >= rows):
        return array
    return frozen_copy(array, max(rows, array.shape[0]))


def frozen_copy(array: Any, rows: int) -> np.ndarray:
    """A read-only, aligned copy with `rows` rows, zeros after the given ones."""
    array = np.asarray(array)
    count = rows * int(np.prod(array.shape[1:])) * array.dtype.itemsize
    space = np.empty(count + ALIGNMENT, np.uint8)
    start = -space.ctypes.data % ALIGNMENT
    copy = space[start : start + count].view(array.dtype).reshape(rows, *array.shape[1:])
    copy[: array.shape[0]] = array
    copy[array.shape[0] :] = 0
    copy.flags.writeable = False
    return copy
