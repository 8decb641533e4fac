"""What the benchmarks share: the machine's description, real text in tokens, and where results go."""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def pin(core: int = 0) -> None:
    """Binds this process to one core, before any library starts its threads."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", NPROC="1")
    os.sched_setaffinity(0, {core})


def machine() -> dict[str, Any]:
    """The machine and the versions that a figure belongs to."""
    from importlib.metadata import version

    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def wiki_tokens(tokenizer: Any, count: int) -> np.ndarray:
    """The first `count` tokens of the shipped Wikipedia passages."""
    from jfuse.evals.requests import passage_tokens

    return passage_tokens(tokenizer, count)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The flags of a request's size: by default 4,096 context tokens and a query of 64."""
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--query-tokens", type=int, default=64)


def sized_request(tokenizer: Any, arguments: argparse.Namespace) -> Any:
    """The `TextRequest` of that size, from the shipped passages and questions."""
    from jfuse.evals.requests import request_of

    sizes = {name: getattr(arguments, name) for name in ("chunks", "chunk_tokens", "query_tokens")}
    return request_of(tokenizer, **sizes)


def check(what: str, value: float, met: bool) -> dict[str, Any]:
    """Something that was to be reached, and whether it was."""
    return {"check": what, "value": float(value), "met": bool(met)}


def save(name: str, result: dict[str, Any]) -> Path:
    """Writes a result with its machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return path
