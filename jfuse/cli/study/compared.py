"""What the studies share that compare methods on questions: tasks, limits, and tables of what was measured."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jfuse.cli.command import make_table
from jfuse.cli.selector import SelectorCommand
from jfuse.cli.study.base import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jfuse.evals.settings import Task
    from jfuse.evals.studies.parts import Part, Row

Measure = Literal["kl_closed", "nll_closed", "score_closed", "kl", "nll", "score", "recall"]
MEASURES: dict[str, str] = {
    "kl_closed": "share of the KL gap closed",
    "nll_closed": "share of the NLL gap closed",
    "score_closed": "share of the score gap closed",
    "kl": "KL from full prefill (nats)",
    "nll": "answer NLL (nats per token)",
    "score": "score",
    "recall": "recall at 10%",
}


@dataclass(frozen=True, kw_only=True)
class Compared(SelectorCommand, Study):
    """A study that runs methods on tasks; what it measured is kept, and a second call goes on where it stopped."""

    tasks: tuple[str, ...] = ("mq", "mv", "hotpotqa", "squad")
    """Needle tasks, shipped questions, or paths of files."""
    limit: int = 12
    """Questions of each task."""
    new_tokens: int = 0
    """Also answer with at most so many tokens, and score the text."""
    measure: Measure = "kl_closed"
    """What the figure shows."""

    def parts(self) -> "list[Part]":
        """What is run."""
        raise NotImplementedError

    def draw(self, rows: "list[Row]") -> "Axes":
        """The figure."""
        raise NotImplementedError

    def run(self) -> int:
        """Runs what is missing, and shows all of it."""
        from jfuse.evals.studies.parts import run_parts

        if self.measure.startswith("score") and not self.new_tokens:
            raise ValueError(f"measure is {self.measure}, and nothing is answered; set --new-tokens, such as 64.")
        self.check_selectors()
        loading = {"dtype": self.dtype, "longest_request": self.longest_request}
        parts = [
            part._replace(settings=replace(part.settings, layers=self.layers or part.settings.layers, **loading))
            for part in self.parts()
        ]
        folder = (self.out or Path("runs") / "studies" / self.name) / "parts"
        rows = run_parts(parts, folder, command=["jfuse", *sys.argv[1:]], profile=self.profile)
        return self.finish({"rows": rows}, self.draw(rows), rows_table(rows, self.measure))

    def asked_tasks(self) -> "tuple[Task, ...]":
        """The tasks as evaluations know them."""
        from jfuse.evals.settings import Task

        return tuple(
            Task(Path(name).stem, data=name, new_tokens=self.new_tokens)
            if Path(name).is_file()
            else Task(name, new_tokens=self.new_tokens)
            for name in self.tasks
        )

    @property
    def label(self) -> str:
        """The measure in words."""
        return MEASURES[self.measure]


def rows_table(rows: "Sequence[Row]", measure: str) -> Any:
    """One line per configuration, one column per task; blank where full prefill has no clear lead over reuse."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    own = [name for name in ("num_chunks", "chunk_tokens") if rows and name in rows[0]]
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((*(row[name] for name in own), row["method"], row["ratio"]), {})[row["task"]] = row
    lines = []
    for key, by_task in found.items():
        realised = sum(row["realised"] for row in by_task.values()) / len(by_task)
        values = [by_task.get(task, {}).get(measure) for task in tasks]
        shown = ["" if value is None else f"{value:.3f}" for value in values]
        lines.append((*key[:-1], f"{key[-1]:g}", f"{realised:.2f}", *shown))
    return make_table((*own, "method", "ratio", "realised", *tasks), lines, MEASURES.get(measure, measure))
