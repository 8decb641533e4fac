"""A GPU shared with other processes, such as a second notebook: how much of its memory this process takes.

JAX reads the settings once, when it first touches a device. What is set later has no effect, and says so.
"""

import os
import warnings

import jax

SETTING = "jax_cpu_get_local_topology_timeout_minutes"  # JAX refuses to change it once a backend has started


def limit_memory(share: float | None = None, *, preallocate: bool = False) -> None:
    """Sets XLA's allocator before the first use of a GPU; call it right after `import jfuse`.

    From outside, the same is `XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_MEM_FRACTION=.5 python ...`.

    Args:
        share: at most this share of the GPU's memory; None leaves JAX's limit.
        preallocate: take all of it at once rather than as it is needed.

    Raises:
        ValueError: a share outside (0, 1].

    Warns:
        RuntimeWarning: a device is in use already, so that nothing changes.
    """
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"share is {share}; use a number above 0 and at most 1.")
    if device_in_use():
        warnings.warn(
            "JAX uses a device already, so its memory settings no longer change; restart Python and call limit_memory "
            "first, before any array is made.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if preallocate else "false"
    if share is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:g}"


def device_in_use() -> bool:
    """Whether JAX has started a backend in this process. Asking starts none."""
    before = getattr(jax.config, SETTING)
    try:
        jax.config.update(SETTING, before + 1)
    except RuntimeError:
        return True
    jax.config.update(SETTING, before)
    return False
