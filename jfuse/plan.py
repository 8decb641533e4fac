"""What a request would cost before anything runs: full prefill, reuse and every selector on given hardware.

Time is the larger of arithmetic and memory traffic for each pass, and of loading and recomputation where they overlap;
the counts are those of `costs`. Figures of the hardware are what it achieves, not what its data sheet says.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfuse import costs
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model, prefill
from jfuse.offload import device_of, frozen_copy, to_device
from jfuse.selectors.base import BudgetedPick, Selector, budget_for
from jfuse.selectors.topk import top_k
from jfuse.stitch import make_layout
from jfuse.types import ContextCache, Selection, Sizes

FULL = "full prefill"


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


class Row(NamedTuple):
    """One way to serve a request: seconds, and what they come from."""

    method: str
    ratio: float
    ttft: float
    selection: float  # reading and probing before anything can be recomputed
    fusion: float  # recomputation, with the loading that overlaps it
    query: float
    selection_bytes: int
    flops: int
    speed_up: float = 1.0  # over full prefill
    fastest: bool = False


def plan(
    config: ModelConfig,
    hardware: Hardware,
    sizes: Sizes,
    selectors: Sequence[Selector],
    *,
    ratio: float | int | None = None,
    itemsize: int = 2,
) -> list[Row]:
    """Full prefill and every selector, fastest first.

    Args:
        sizes: token counts of prefix, chunks and query.
        ratio: for all selectors; None takes each one's own.
        itemsize: bytes of a number in weights and caches.

    Raises:
        ValueError: a view that the model does not have, or a ratio outside [0, 1].
    """
    full = full_prefill_row(config, hardware, sizes, itemsize=itemsize)
    rows = [full] + [fusion_row(config, hardware, sizes, s, ratio=ratio, itemsize=itemsize) for s in selectors]
    rows = sorted(rows, key=lambda row: row.ttft)
    return [row._replace(speed_up=full.ttft / row.ttft, fastest=i == 0) for i, row in enumerate(rows)]


def full_prefill_row(config: ModelConfig, hardware: Hardware, sizes: Sizes, *, itemsize: int = 2) -> Row:
    """One causal pass over prefix, context and query."""
    tokens = sizes.prefix + sizes.context + sizes.query
    cost = costs.prefill_cost(config, tokens)
    seconds = _seconds(hardware, cost.flops, _weight_bytes(config, config.num_layers, itemsize)) + hardware.overhead
    return Row(FULL, 1.0, seconds, 0.0, seconds, 0.0, 0, cost.flops)


def fusion_row(
    config: ModelConfig,
    hardware: Hardware,
    sizes: Sizes,
    selector: Selector,
    *,
    ratio: float | int | None = None,
    itemsize: int = 2,
) -> Row:
    """A fused request: what the view needs is read and probed first, then layers load while others are recomputed.

    A probe over the whole context runs while the context loads; one over anchors runs after they are there. Selectors
    that choose per layer are reckoned with independent choices, the widest staircase they can have.
    """
    view, whole = selector.view, sizes.context * config.kv_bytes_per_token(itemsize)
    context, selection = _stand_in(config, sizes, selector, ratio)
    first = costs.selection_bytes(config, view, sizes, itemsize=itemsize)
    again = 2 * _half(config, itemsize) * _anchor_layers(config, selector) * costs.num_anchors(view, sizes)
    probe, fuse = costs.probe_cost(config, view, sizes), costs.fusion_cost(config, context, selection)
    query = costs.prefill_cost(config, sizes.query, past=sizes.prefix + sizes.context)

    depth = max(costs.needed_layers(view, config.num_layers), default=-1) + 1
    probing = _seconds(hardware, probe.flops, _weight_bytes(config, depth, itemsize)) if probe.flops else 0.0
    reading = first / hardware.load
    selecting = max(reading, probing) if view.tokens == "context" else reading + probing
    rest = (whole - (first - again)) / hardware.load
    layers = sum(count > 0 for count in fuse.rows)
    fusing = _seconds(hardware, fuse.flops, _weight_bytes(config, layers, itemsize)) if fuse.flops else 0.0
    asking = _seconds(hardware, query.flops, _weight_bytes(config, config.num_layers, itemsize) + whole)
    overlapped = max(rest, fusing)
    return Row(
        selector.name,
        selector.ratio if ratio is None else ratio,
        selecting + overlapped + asking + hardware.overhead,
        selecting,
        overlapped,
        asking,
        first,
        probe.flops + fuse.flops + query.flops,
    )


def break_even(
    config: ModelConfig,
    hardware: Hardware,
    selector: Selector,
    *,
    ratio: float | int | None = None,
    chunk_tokens: int = 512,
    num_prefix: int = 32,
    num_query: int = 64,
    itemsize: int = 2,
    longest: int | None = None,
) -> int | None:
    """The fewest context tokens, in whole chunks, from which on the selector beats full prefill; None: never.

    Args:
        longest: where to stop looking; the model's positions by default.
    """
    most = ((longest or config.max_positions) - num_prefix - num_query) // chunk_tokens

    def wins(chunks: int) -> bool:
        sizes = Sizes(num_prefix, (chunk_tokens,) * chunks, num_query)
        own = fusion_row(config, hardware, sizes, selector, ratio=ratio, itemsize=itemsize)
        return own.ttft < full_prefill_row(config, hardware, sizes, itemsize=itemsize).ttft

    if most < 1 or not wins(most):
        return None
    loses, winner = 0, most  # the cost per token of a full prefill grows with N, so there is one crossing
    while winner - loses > 1:
        middle = (loses + winner) // 2
        loses, winner = (loses, middle) if wins(middle) else (middle, winner)
    return winner * chunk_tokens


def _stand_in(
    config: ModelConfig, sizes: Sizes, selector: Selector, ratio: float | int | None
) -> tuple[ContextCache, Selection]:
    """A context of these sizes without caches, and what the selector's allocation makes of random scores."""
    tokens = [np.zeros(length, np.int32) for length in sizes.chunks]
    layout = make_layout(tokens, np.zeros(sizes.prefix, np.int32))
    context = ContextCache(layout.tokens, layout.positions, layout.segments, ())
    layers = selector.view.layer_indices(config.num_layers)
    k = budget_for(selector, ratio, sizes)
    scores = np.random.default_rng(0).random((max(len(layers), 1), len(layout.tokens)), np.float32)
    scores = jnp.where(jnp.asarray(layout.segments >= 0)[None], scores, -jnp.inf)
    pick = BudgetedPick(top_k, k if isinstance(k, tuple) else (k,))
    chosen = selector.allocate(scores, pick, layers, config.num_layers)
    real = layout.segments >= 0
    return context, Selection(np.asarray(chosen.recompute) & real, np.asarray(chosen.visible), chosen.window)


def _seconds(hardware: Hardware, flops: int, num_bytes: int) -> float:
    return max(flops / hardware.flops, num_bytes / hardware.memory)


def _weight_bytes(config: ModelConfig, layers: int, itemsize: int) -> int:
    return layers * sum(costs.layer_weights(config)) * itemsize


def _half(config: ModelConfig, itemsize: int) -> int:
    return config.num_kv_heads * config.head_size * itemsize


def _anchor_layers(config: ModelConfig, selector: Selector) -> int:
    layers = selector.view.layer_indices(config.num_layers)
    return max(layers) if selector.view.tokens == "anchors" and layers else 0


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
    flops = costs.prefill_cost(model.config, tokens).flops / seconds
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


def with_bandwidth(hardware: Hardware, bytes_per_second: float | int) -> Hardware:
    """The same machine with chunks behind a link of this bandwidth."""
    return dataclasses.replace(hardware, disk=bytes_per_second)
