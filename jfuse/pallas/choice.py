"""Which implementation of an op runs: decided once per process, device and shape class, and before the op is traced.

An op offers its kernels in order of preference. The first that supports the device is tried alone, on a small example
with a known answer: it must compile, run, and agree with the op's XLA definition. What fails is not used, is warned of
once, and stands in the report of every later request. A jitted step can thus never fail late over a kernel, nor be
wrong because of one. Where no GPU is the default device, the XLA definition runs and nothing is tried.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jfuse.config import Implementation


class Device(NamedTuple):
    """The kind of GPU that kernels are chosen for."""

    kind: str  # as jax names it
    capability: tuple[int, int]
    interpret: bool = False  # kernels run on the CPU, instruction by instruction


@dataclass(frozen=True)
class Kernel:
    """One lowering of an op for GPUs.

    Attributes:
        run: takes the arguments of the op's XLA definition and a keyword `interpret`.
        supports: whether it can run, by device, dtype and head size (0 for ops without heads).
        trial: arguments of a small example, by dtype and head size.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[[Device, np.dtype, int], bool]
    trial: Callable[[np.dtype, int], tuple[Any, ...]]


pretended = jax.make_user_context(None)
"""`with pretended(device):` chooses for a `Device` that is not there, untried: to compile for it, or to interpret."""

INTERPRETED = Device("interpreter", (8, 0), interpret=True)  # Triton kernels, which every jax interprets


def choose(
    op: str,
    implementation: Implementation,
    kernels: Sequence[Kernel],
    definition: Callable[..., Any],
    dtype: DTypeLike,
    head_size: int = 0,
) -> Callable[..., Any]:
    """The implementation of `op` that runs on the default device: one of its kernels, or its XLA definition.

    Args:
        implementation: "xla" is the definition; "pallas" a kernel or an error; None the first kernel that holds, and
            the definition where there is none.

    Raises:
        ValueError: "pallas" where no GPU is, or for a dtype or head size that no kernel supports.
        RuntimeError: "pallas" where every kernel failed its trial.
    """
    device = None if implementation == "xla" else pretended.value or _default_device()
    if device is None:
        if implementation == "pallas":
            raise ValueError(
                f'implementation="pallas" of {op} needs a CUDA GPU, but the default device is a '
                f'{jax.default_backend()}; use "xla", or None for the best that runs here.'
            )
        return definition
    dtype = np.dtype(dtype)
    able = tuple(kernel for kernel in kernels if kernel.supports(device, dtype, head_size))
    if pretended.value is not None and able:
        return functools.partial(able[0].run, interpret=device.interpret)
    found = _first_that_holds(op, device, able, definition, dtype, head_size)
    if found is not None:
        return functools.partial(found.run, interpret=False)
    if implementation == "pallas":
        case = f"{op} in {dtype} with head size {head_size} on {device.kind}"
        if not able:
            raise ValueError(f'implementation="pallas": no kernel supports {case}; use "xla" or None.')
        raise RuntimeError(f'implementation="pallas": every kernel failed its trial: {case}; use "xla" or None.')
    return definition


def fallbacks() -> tuple[str, ...]:
    """What this process runs otherwise than it would like to, with the reason; for the reports."""
    return tuple(_fallbacks)


def forget() -> None:
    """Forgets every decision, so that the next call tries again."""
    _first_that_holds.cache_clear()
    _fallbacks.clear()


_fallbacks: dict[str, None] = {}  # in the order in which they were met


def _default_device() -> Device | None:
    config: Any = jax.config  # its attributes are made at run time
    device = config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device.platform != "gpu":
        return None
    major, _, minor = str(getattr(device, "compute_capability", "0.0")).partition(".")
    return Device(device.device_kind, (int(major), int(minor or 0)))


@functools.cache
def _first_that_holds(op, device, kernels, definition, dtype, head_size) -> Kernel | None:
    case = f"{op} ({dtype}, head size {head_size}, {device.kind})"
    if not kernels:
        _fall_back(f"{case}: XLA instead of a kernel; none supports this.")
        return None
    for kernel in kernels:
        try:
            error = _error(functools.partial(kernel.run, interpret=False), definition, kernel.trial(dtype, head_size))
        except Exception as failure:  # compilers raise what they like
            reason = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"
        else:
            if error <= (2e-2 if dtype.itemsize < 4 else 1e-4):
                return kernel
            reason = f"it is off by {error:.1e} of the largest value."
        following = kernels[kernels.index(kernel) + 1 :]
        _fall_back(f"{case}: {following[0].name if following else 'XLA'} instead of {kernel.name}; {reason}")
    return None


def _fall_back(message: str) -> None:
    _fallbacks[message] = None
    warnings.warn(f"jfuse: {message}", RuntimeWarning, stacklevel=2)


def _error(run: Callable[..., Any], definition: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """The largest difference on an example, relative to the largest value of each output. Compiles, then runs."""
    with jax.ensure_compile_time_eval():  # the caller may be in the middle of a trace of its own
        ours, expected = (jax.jit(f).lower(*arguments).compile()(*arguments) for f in (run, definition))
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
        return max(_relative(*(np.asarray(jnp.asarray(a), np.float64) for a in pair)) for pair in pairs)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    difference = np.abs(a - b).max()  # NaN stays NaN, and is then no smaller than any bound
    return float(difference / max(np.abs(b).max(), 1e-30))
