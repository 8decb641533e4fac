"""`jfuse study NAME`: one figure or table of the papers each, made anew on any model.

To add one: a file here with a subclass of `Study` whose `run` calls one function of `jfuse.evals` and hands rows, axes
and tables to `finish`; then a line in `STUDIES`.
"""

from dataclasses import dataclass

from jfuse.cli.command import Command
from jfuse.cli.study.base import Study
from jfuse.cli.study.throughput import Throughput
from jfuse.cli.study.timeline import Timeline

STUDIES: dict[str, type[Study]] = {
    "throughput": Throughput,
    "timeline": Timeline,
}


@dataclass(frozen=True, kw_only=True)
class Studies(Command):
    """Makes one figure or table of the papers anew; jfuse study --help lists them."""

    example = "jfuse study throughput"
