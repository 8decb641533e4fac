"""What a machine achieves: given, or measured with a model here. `plan` reckons with it."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jfuse.costs import prefill_cost
from jfuse.models.decoder import Model, prefill
from jfuse.offload import device_of, frozen_copy, to_device


@dataclass(frozen=True)
class Hardware:
    """What a machine achieves.

    Attributes:
        flops: floating-point operations per second of a prefill.
        memory: bytes per second between compute and device memory.
        link: bytes per second from host to device.
        disk: bytes per second from where the chunks lie to the host.
        overhead: seconds that any request takes beside all that.
    """

    name: str
    flops: float | int
    memory: float | int
    link: float | int = float("inf")
    disk: float | int = float("inf")
    overhead: float | int = 0.0

    def __post_init__(self):
        for field in ("flops", "memory", "link", "disk"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Hardware.{field} is {getattr(self, field)}; use a rate above 0, per second.")
        if not self.overhead >= 0:
            raise ValueError(f"Hardware.overhead is {self.overhead}; use seconds >= 0.")

    @property
    def load(self) -> float | int:
        """Bytes per second at which chunks reach the device: disk and link work side by side."""
        return min(self.link, self.disk)


def measure(model: Model, *, tokens: int = 1024, repeats: int = 3, folder: str | os.PathLike | None = None) -> Hardware:
    """What this machine achieves with this model.

    Args:
        tokens: length of the prefill that is timed.
        folder: where chunks would lie; the disk figure is that of a file there, read with an empty page cache.
    """
    device = device_of(model.params["embed"])
    tokens = min(tokens, model.config.max_positions)
    ids, positions = np.zeros(tokens, np.int32), np.arange(tokens, dtype=np.int32)
    seconds = _best(lambda: jax.block_until_ready(prefill(model, ids, positions, hidden="last").hidden), repeats)
    flops = prefill_cost(model.config, tokens).flops / seconds
    block = frozen_copy(np.zeros((64, 2**18), np.float32), 64)  # 64 MiB
    lying = jax.block_until_ready(to_device(block, device))
    double = jax.jit(lambda array: array * 2)
    copying = _best(lambda: double(lying).block_until_ready(), repeats)
    moving = _best(lambda: jax.block_until_ready(jnp.array(block, device=device, copy=True)), repeats)
    return Hardware(
        f"{device.device_kind}, measured",
        flops,
        memory=2 * block.nbytes / copying,
        link=block.nbytes / moving,
        disk=_disk_rate(folder, block.nbytes),
    )


def _best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest run after one that compiles."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _disk_rate(folder: str | os.PathLike | None, num_bytes: int) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".jfuse-plan-") as file:
        file.write(np.random.default_rng(0).bytes(num_bytes))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, space = time.perf_counter(), bytearray(num_bytes)
        with open(file.name, "rb", buffering=0) as again:
            again.readinto(space)
        return num_bytes / (time.perf_counter() - start)
