"""`jfuse study NAME`: one figure or table of the papers each, made anew on any model.

To add one: a file here with a subclass of `Study` whose `run` calls one function of `jfuse.evals` and hands rows, axes
and tables to `finish`; then a line in `STUDIES`.
"""

from dataclasses import dataclass

from jfuse.cli.command import Command
from jfuse.cli.study.attention import Anchors, Concentration, Fidelity, LayerRecall
from jfuse.cli.study.base import Study
from jfuse.cli.study.quality import Ablation, RelaxKV, Stress, Tradeoff
from jfuse.cli.study.throughput import Throughput
from jfuse.cli.study.timeline import Timeline
from jfuse.cli.study.times import Bandwidth, Breakdown

STUDIES: dict[str, type[Study]] = {
    "tradeoff": Tradeoff,
    "breakdown": Breakdown,
    "attention": Concentration,
    "anchors": Anchors,
    "layers": LayerRecall,
    "fidelity": Fidelity,
    "stress": Stress,
    "bandwidth": Bandwidth,
    "throughput": Throughput,
    "timeline": Timeline,
    "ablation": Ablation,
    "relaxkv": RelaxKV,
}


@dataclass(frozen=True, kw_only=True)
class Studies(Command):
    """Makes one figure or table of the papers anew; jfuse study --help lists them."""

    example = "jfuse study tradeoff"
