"""QCFuse's published times (2606.05875, Figs. 1, 11, 13), and what `jfuse.plan` says for the same requests.

The points are read off the figures. Requests: Qwen3-8B (Fig. 11 is a mean over four models), 20 chunks of 512 tokens,
64 query tokens, bfloat16, on H20 GPUs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jfuse import selectors
from jfuse.costs import prefill_cost
from jfuse.hardware import Hardware
from jfuse.models.public import public_config
from jfuse.plan import FULL, fusion_row
from jfuse.selectors.base import Selector
from jfuse.types import Sizes

QWEN3_8B = public_config("Qwen3-8B")
SIZES = Sizes(32, (512,) * 20, 64)
MEMORY, LINK = 3.2e12, 50e9  # bytes per second: 0.8 of the H20's memory bandwidth, PCIe 5
OVERHEAD = 0.12
"""Seconds beside arithmetic and transfers that make Fig. 11's QCFuse right at ratios 0.2 to 0.5; the one fitted number.

Arithmetic speed is not fitted: it is that of each figure's own full prefill."""

METHODS: dict[str, Selector] = {
    "qcfuse": selectors.qcfuse((20, 21, 19)),
    "prophetkv": selectors.prophetkv("qcfuse"),
    "fusionrag": selectors.fusionrag("qcfuse"),
    "cacheblend": selectors.cacheblend(),
    "epic": selectors.epic(),
    "reuse": selectors.reuse(),
}


class Point(NamedTuple):
    """One published time to first token."""

    figure: str
    gb_per_s: float
    method: str
    ratio: float
    seconds: float


class Comparison(NamedTuple):
    """A published point and its prediction."""

    point: Point
    predicted: float

    @property
    def deviation(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.point.seconds - 1


def _points() -> list[Point]:
    ratios = (0.1, 0.2, 0.3, 0.4, 0.5)
    # Fig. 1 gives times to the end of the answer; 7 % of full prefill's 1.6 s is decoding, for every method.
    ends = {FULL: 1.6, "cacheblend": 0.71, "epic": 0.66, "fusionrag": 0.75, "prophetkv": 0.98}
    points = [Point("1", 10.0, name, 0.3, seconds - 0.11) for name, seconds in ends.items()]
    points += [Point("11", 10.0, FULL, 1.0, 1.57), Point("11", 10.0, "reuse", 0.0, 0.33)]
    for name, times in {"qcfuse": (0.39, 0.48, 0.63, 0.77, 0.92), "prophetkv": (0.60, 0.70, 0.85, 1.0, 1.15)}.items():
        points += [Point("11", 10.0, name, ratio, seconds) for ratio, seconds in zip(ratios, times, strict=True)]
    for rate, prophetkv, qcfuse in ((3.0, 2.05, 1.47), (10.0, 1.23, 1.00)):
        points += [Point("13", rate, FULL, 1.0, 1.72)]
        points += [Point("13", rate, "prophetkv", 0.5, prophetkv), Point("13", rate, "qcfuse", 0.5, qcfuse)]
    return points


POINTS = tuple(_points())


def compare() -> list[Comparison]:
    """Every published point with its prediction, but for full prefill, which sets the speed of each figure."""
    rows = []
    flops = prefill_cost(QWEN3_8B, SIZES.prefix + SIZES.context + SIZES.query).flops
    for point in POINTS:
        full = next(p.seconds for p in POINTS if (p.figure, p.gb_per_s, p.method) == (*point[:2], FULL))
        if point.method != FULL:
            hardware = Hardware("H20", flops / full, MEMORY, LINK, point.gb_per_s * 1e9, OVERHEAD)
            ratio = None if point.method == "reuse" else point.ratio
            row = fusion_row(QWEN3_8B, hardware, SIZES, METHODS[point.method], ratio=ratio)
            rows.append(Comparison(point, row.ttft))
    return rows


def table(rows: Sequence[Comparison]) -> str:
    """The comparison in Markdown, as `docs/plan.md` shows it."""
    lines = [
        "| figure | GB/s | method | ratio | published (s) | predicted (s) | deviation |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        point = row.point
        lines.append(
            f"| {point.figure} | {point.gb_per_s:g} | {point.method} | {point.ratio:g} | {point.seconds:.2f} | "
            f"{row.predicted:.2f} | {row.deviation:+.0%} |"
        )
    return "\n".join(lines) + "\n"
