"""What every GPU kernel needs of a Hopper and of an Ampere card, and the least time a card allows; no GPU is needed.

Compiles the kernels for the heads of Qwen3-8B (32 query, 8 KV, size 128) and for other head sizes, and writes
`results/kernels_compiled.json` and the tables of `docs/kernels.md`. It needs the compilers that `make kernels` brings:
PYTHONPATH=.venv/cuda JAX_PLATFORMS=cpu python benchmarks/compile_kernels.py
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ahead_of_time import GPUS, compile_for
from setting import save

from jfuse import pallas
from jfuse.pallas.selective_attention_mosaic import SIZES, selective_attention_mosaic
from jfuse.pallas.selective_attention_triton import selective_attention_triton
from jfuse.types import LayerKV

ROWS, KEYS, HEADS, KV_HEADS, LAYERS = 1024, 10_240, 32, 8, 36
"""Qwen3-8B over 20 chunks of 512 tokens, a tenth of them recomputed."""

OURS = ("mosaic", "selective_attention_triton", "attention_mass", "log_mass", "place", "scatter_rows")
RATIOS = (0.1, 0.2, 0.3, 0.5, 1.0)
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"


def shape(*axes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An argument of which only this much matters."""
    return jax.ShapeDtypeStruct(axes, dtype)


def attention(size: int, dtype: Any, rows: int = ROWS) -> tuple[Any, ...]:
    """Arguments of selective attention with a visible set."""
    kv = shape(KEYS, KV_HEADS, size, dtype=dtype)
    at = shape(rows), shape(KEYS), shape(KEYS, dtype=jnp.bool_)
    return shape(rows, HEADS, size, dtype=dtype), kv, kv, *at, shape()


def variants(gpu: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """What is compiled for a card: a description, a function, its arguments."""
    narrow, wide = "bfloat16", "float32"
    if gpu == "sm_90a":
        for size in SIZES:
            yield f"{narrow}, {size}", selective_attention_mosaic, attention(size, narrow)
    for size, dtype in [
        (64, narrow),
        (80, narrow),
        (96, narrow),
        (128, narrow),
        (256, narrow),
        (64, wide),
        (128, wide),
    ]:
        yield f"{dtype}, {size}", selective_attention_triton, attention(size, dtype)
    yield "bfloat16, 128, one row", selective_attention_triton, attention(128, narrow, 1)
    query = shape(64, HEADS, 128, dtype=jnp.bfloat16), shape(KEYS, KV_HEADS, 128, dtype=jnp.bfloat16), shape(64)
    mass = lambda q, k, at, places, rows: pallas.attention_mass(q, k, at, key_positions=places, rows=rows)  # noqa: E731
    yield "bfloat16, 128", mass, (*query, shape(KEYS), shape(64, dtype=jnp.bool_))
    layer, rows, chunk = (LayerKV(*[shape(n, KV_HEADS, 128, dtype=jnp.bfloat16)] * 2) for n in (KEYS, ROWS, 512))
    angles = [shape(512, 64, dtype=jnp.float32)] * 2
    yield "bfloat16, 128", pallas.place, (layer, chunk, shape(), shape(), *angles)
    yield "bfloat16, 128", pallas.scatter_rows, (layer, shape(ROWS), rows)


def table() -> list[dict[str, Any]]:
    """One row per kernel of ours and card; XLA's own are left out."""
    rows = []
    for gpu, card in GPUS.items():
        for variant, function, arguments in variants(gpu):
            for kernel in compile_for(gpu, function, *arguments).kernels:
                if any(name in kernel.name for name in OURS):
                    rows.append({"gpu": gpu, "variant": variant, **asdict(kernel), "occupancy": kernel.occupancy(card)})
    return rows


def floors(gpu: str = "sm_90a") -> list[dict[str, float]]:
    """Selective attention of all layers at the limits of the card: no kernel can take less."""
    card, rows = GPUS[gpu], []
    for ratio in RATIOS:
        recomputed = int(ratio * KEYS)
        edges = recomputed * (KEYS + 1) / 2  # rows spread evenly read half of the keys
        flops = 4 * edges * HEADS * 128
        moved = 2 * 128 * (2 * recomputed * HEADS + 2 * KEYS * KV_HEADS)
        by_flops, by_bytes = flops / card.flops, moved / card.bandwidth
        rows.append(
            {
                "ratio": ratio,
                "rows": recomputed,
                "gflop": flops / 1e9,
                "megabytes": moved / 1e6,
                "flops_per_byte": flops / moved,
                "layer_ms": 1e3 * max(by_flops, by_bytes),
                "model_ms": 1e3 * LAYERS * max(by_flops, by_bytes),
            }
        )
    return rows


def page(kernels: list[dict[str, Any]], floor: list[dict[str, float]]) -> str:
    """The page that shows both."""
    card = GPUS["sm_90a"]
    lines = [
        "# GPU kernels, as compiled\n",
        "Made by `benchmarks/compile_kernels.py` on a machine without a GPU; nothing here was timed on one.\n",
        f"Heads of Qwen3-8B ({HEADS} query, {KV_HEADS} KV), {ROWS} rows, {KEYS} keys, a visible set.\nSpills: bytes "
        "that a thread stores and loads. Occupancy: blocks of the kernel that a core holds at a time. Tensor cores\n"
        "and copies: instructions.\n",
        "| card | kernel | variant | registers | spills | threads | shared | occupancy | tensor cores | async copies |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in kernels:
        counts = [", ".join(f"{n} {name}" for name, n in row[key].items()) or "-" for key in ("tensor_core", "copies")]
        cells = [row[key] for key in ("gpu", "name", "variant", "registers", "spill_bytes", "threads")]
        cells += [f"{row['shared_memory'] / 1024:.0f} KiB", row["occupancy"], *counts]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "\n## The floor of selective attention for Qwen3-8B on an H200\n",
        f"{KEYS} context tokens (20 x 512), {LAYERS} layers, bfloat16, rows spread evenly.\nThe data sheet "
        f"allows {card.flops / 1e12:.0f} TFLOP/s and {card.bandwidth / 1e12:.1f} TB/s: above "
        f"{card.flops / card.bandwidth:.0f} FLOP a byte the tensor cores are the limit.\n",
        "| ratio | rows | GFLOP a layer | MB a layer | FLOP a byte | floor a layer | floor of all layers |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in floor:
        lines.append(
            f"| {row['ratio']:g} | {row['rows']} | {row['gflop']:.1f} | {row['megabytes']:.1f} | "
            f"{row['flops_per_byte']:.0f} | {row['layer_ms']:.3f} ms | {row['model_ms']:.1f} ms |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compiles, then writes the figures and the page."""
    kernels, floor = table(), floors()
    save("kernels_compiled", {"kernels": kernels, "floor": floor})
    PAGE.write_text(page(kernels, floor))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
