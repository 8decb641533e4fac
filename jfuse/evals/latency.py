"""Fair timing: variants interleaved in one run, each waiting for its result on the host, compilation kept out.

In come functions that finish their own work (they return host values or block); out come seconds per variant.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np

from jfuse.report import Compilations


def interleave(
    variants: Mapping[str, Callable[[], object]], *, repeats: int = 5, warm_up: int = 1
) -> dict[str, list[float]]:
    """Runs all variants in turn, `repeats` times, the order rotating so that none always follows the same other.

    Args:
        warm_up: rounds that are run first and discarded; they compile.

    Raises:
        RuntimeError: a timed run compiled something, so its time is not a latency.
    """
    names = list(variants)
    for _ in range(warm_up):
        for name in names:
            variants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            with Compilations() as compiled:
                start = time.perf_counter()
                variants[name]()
                seconds[name].append(time.perf_counter() - start)
            if compiled.count:
                raise RuntimeError(f"{name!r} compiled {compiled.count} functions while it was timed; raise warm_up.")
    return seconds


def summary(seconds: list[float]) -> dict[str, int | float]:
    """Count, median, quartiles and extremes of one variant's times."""
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return {
        "n": len(seconds),
        "median": float(middle),
        "q25": float(low),
        "q75": float(high),
        "min": float(min(seconds)),
        "max": float(max(seconds)),
    }
