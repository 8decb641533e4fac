"""Everything that only a GPU can show, in ten minutes on one card, nothing downloaded: JSON after each section, tables.

Ceilings of the card; every op against its XLA form in float32; every op against XLA, and where torch is present against
its attention; a search over block sizes; then whole models with random weights, cache-ready and from the host tier,
against jfuse's and Hugging Face's full prefill. A section that fails leaves its traceback, and the rest runs.

Usage: python benchmarks/gpu.py [--seconds 540] [--sections ceilings ops ...]. `--miniature` runs all of it on a CPU,
tiny and interpreted, to prove that the script itself works; its figures mean nothing.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs room beside

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import partial  # noqa: E402
from importlib.metadata import PackageNotFoundError, version  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gpu_models  # noqa: E402
import gpu_ops  # noqa: E402
import jax  # noqa: E402
import setting  # noqa: E402

from jfuse.models.config import ModelConfig  # noqa: E402
from jfuse.models.public import public_config  # noqa: E402
from jfuse.models.tiny import tiny_config  # noqa: E402
from jfuse.pallas.choice import INTERPRETED, fallbacks, pretended  # noqa: E402


@dataclass(frozen=True)
class Scale:
    """How large everything is: the setting of QCFuse's measurements, or a miniature of it."""

    chunks: int = 20
    chunk_tokens: int = 512
    query_tokens: int = 64
    heads: int = 32
    kv_heads: int = 8
    sizes: tuple[int, ...] = (128, 64, 96)
    ratios: tuple[float, ...] = (0.1, 0.3, 0.5, 0.2, 0.4)  # in order of interest: time may run out
    matrix: int = 8192
    copy_bytes: int = 4 << 30
    pad_to: int = 512
    row_block: int = 128
    repeats: int = 5
    miniature: bool = False

    @property
    def context(self) -> int:
        """Context tokens of a request."""
        return self.chunks * self.chunk_tokens

    def models(self) -> dict[str, ModelConfig]:
        """The shapes whose TTFT is measured."""
        if self.miniature:
            return {family: tiny_config(family, num_layers=2) for family in ("qwen3", "llama")}
        return {name: public_config(name) for name in ("Qwen3-8B", "Llama-3.1-8B")}


MINIATURE = Scale(
    chunks=2,
    chunk_tokens=24,
    query_tokens=5,
    heads=4,
    kv_heads=2,
    sizes=(16,),
    ratios=(0.3,),
    matrix=64,
    copy_bytes=1 << 16,
    pad_to=64,
    row_block=16,
    repeats=1,
    miniature=True,
)


def main() -> None:
    """Runs the sections in order until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=540.0, help="no measurement starts after this long")
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--sections", nargs="+", default=None)
    parser.add_argument("--out", type=Path, default=setting.RESULTS / "gpu.json")
    arguments = parser.parse_args()
    scale = MINIATURE if arguments.miniature else Scale()
    deadline = time.monotonic() + arguments.seconds
    with pretended(INTERPRETED) if arguments.miniature else nullcontext():
        results = run(scale, deadline, arguments.out, arguments.sections)
    failed = [name for name, section in results["sections"].items() if "error" in section]
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def run(scale: Scale, deadline: float, out: Path, chosen: list[str] | None = None) -> dict[str, Any]:
    """All sections, each on its own; the file is written anew after every one."""
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "ceilings": partial(gpu_ops.ceilings, scale),
        "correctness": partial(gpu_ops.correctness, scale),
        "ops": partial(gpu_ops.speed, scale),
    }
    sections |= {
        f"ttft {name}": partial(gpu_models.ttft, scale, name, config, deadline)
        for name, config in scale.models().items()
    }
    sections["blocks"] = partial(gpu_ops.block_search, scale, deadline)
    results: dict[str, Any] = {"machine": describe(), "miniature": scale.miniature, "sections": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, section in sections.items():
        if chosen is not None and not any(name.startswith(one) for one in chosen):
            continue
        started = time.monotonic()
        if started > deadline:
            result: dict[str, Any] = {"skipped": "out of time"}
        else:
            try:
                result = section()
            except Exception as failure:  # one section must not cost the others
                result = {"error": f"{type(failure).__name__}: {failure}", "traceback": traceback.format_exc()}
        results["sections"][name] = result | {"wall_seconds": time.monotonic() - started}
        results["fallbacks"] = list(fallbacks())
        out.write_text(json.dumps(results, indent=1, default=float) + "\n")
        show(name, result)
    return results


def describe() -> dict[str, Any]:
    """Card, host and versions."""
    device = jax.devices()[0]
    versions = {}
    for package in ("jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    stats = device.memory_stats() or {}
    return setting.machine() | versions | {"device": device.device_kind, "memory": stats.get("bytes_limit")}


def show(name: str, result: dict[str, Any]) -> None:
    """One section as a table: its rows, or its single figures."""
    print(f"\n{name}" + (f": {result.get('error', result.get('skipped', ''))}" if "rows" not in result else ""))
    for row in result.get("rows", [result] if "error" not in result else []):
        cells = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
