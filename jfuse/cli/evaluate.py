"""`jfuse eval`: selectors x ratios x tasks x models, resumable, from flags or a YAML file."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jfuse.cli.command import DEFAULT_MODEL, make_table
from jfuse.cli.selector import SelectorCommand

if TYPE_CHECKING:
    from jfuse.evals.results import Run
    from jfuse.evals.settings import Settings, Task

TASKS = ("mq", "mv", "hotpotqa", "squad")
SELECTORS = ("random", "epic", "cacheblend", "prophetkv", "qcfuse", "relaxkv:window=32")


@dataclass(frozen=True, kw_only=True)
class Eval(SelectorCommand):
    """Compares selectors with full prefill and reuse on the same questions, and goes on where it was stopped."""

    example = "jfuse eval --tasks mq squad --selectors epic qcfuse --ratios 0.1 0.3 --limit 20"

    config: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(optional)")] = None
    """A YAML file of models, tasks, methods, limit, dtype, longest_request, layers, anchor_rule, ttft and batch, as
    benchmarks/study.yaml is one. Beside it: --limit, --ttft, --batch, --profile, --out, --fresh and --dry-run."""
    models: tuple[str, ...] = (DEFAULT_MODEL,)
    """Aliases, folders, .gguf files, or Hugging Face ids."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and caches; auto is float32 on a CPU, bfloat16 on an accelerator."""
    longest_request: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(optional)")] = None
    """Positions of the longest request, which chooses the factors of a longrope model."""
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint=f"(default: {' '.join(TASKS)}, or --data)")] = ()
    """Made on the spot (single, mk, mq, mv, vt, quote) or shipped (hotpotqa, squad)."""
    data: tuple[Path, ...] = ()
    """Files of your own, of jfuse, LongBench, LV-Eval, RULER and others; each is a task, named after the file."""
    selectors: tuple[str, ...] = SELECTORS
    """Which selectors, with settings after a colon: relaxkv:window=32. Full prefill and reuse are always there."""
    ratios: tuple[float, ...] = (0.3,)
    """Shares of the context that are recomputed."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 40, or the config's)")] = (
        None
    )
    """Questions of each task."""
    length: int = 1024
    """Made tasks: context tokens."""
    num_chunks: int = 4
    """Made tasks: chunks."""
    chunk_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: passages)")] = None
    """Cut chunks to at most so many tokens; contexts in one piece are cut in any case."""
    new_tokens: int = 0
    """Also answer greedily with at most so many tokens, and score the text."""
    ttft: bool = False
    """Also time every request, its chunk caches in memory."""
    batch: int = 0
    """Measure so many questions of equal padded lengths in one compiled program, for quality alone; 0: one by one."""
    out: Path = Path("runs/eval")
    """Folder of the run. Rows that are there are kept; rows of other settings are refused."""
    fresh: bool = False
    """Start a new, numbered folder if the folder exists."""
    dry_run: bool = False
    """Say what would run and how long it would take, and stop."""

    def run(self) -> int:
        """Measures what is missing, writes the results, and prints a table."""
        from jfuse.evals.results import write_results
        from jfuse.evals.run import evaluate

        settings, out = self.settings(), numbered(self.out) if self.fresh else self.out
        if self.profile is not None and (settings.layers or len(settings.models) > 1):
            raise ValueError("--profile gives the critical layers of one model; ask one model, and leave layers out.")
        if self.dry_run:
            return self.estimate(settings, out)
        added = evaluate(settings, out, profile=self.profile, command=["jfuse", *sys.argv[1:]])
        run = write_results(out)
        self.show(as_value(run, out, added), *report(run, out, added))
        return 0

    def settings(self) -> "Settings":
        """What is asked, from the YAML file or the flags."""
        from jfuse.evals.settings import Entry, Settings, read_yaml

        if self.config is not None:
            beside = ("models", "dtype", "longest_request", "tasks", "data", "selectors", "ratios", "layers", "length")
            for name in (*beside, "num_chunks", "chunk_tokens", "new_tokens"):
                if getattr(self, name) != getattr(type(self), name):
                    flag = name.replace("_", "-")
                    raise ValueError(f"--{flag} stands beside --config; write it into {self.config}.")
            read = read_yaml(self.config)
            limit = read.limit if self.limit is None else self.limit
            ttft, batch = self.ttft or read.ttft, self.batch or read.batch
            return replace(read, limit=limit, ttft=ttft, batch=batch)
        return Settings(
            models=self.models,
            tasks=self.asked_tasks(),
            methods=tuple(Entry(name, self.ratios) for name in self.selectors),
            limit=40 if self.limit is None else self.limit,
            dtype=self.dtype,
            longest_request=self.longest_request,
            layers=self.layers,
            ttft=self.ttft,
            batch=self.batch,
        )

    def asked_tasks(self) -> "tuple[Task, ...]":
        """Named tasks, then files."""
        from jfuse.evals.settings import Task

        names = self.tasks or (() if self.data else TASKS)
        options: dict[str, Any] = {"new_tokens": self.new_tokens, "chunk_tokens": self.chunk_tokens}
        made = {"length": self.length, "num_chunks": self.num_chunks}
        return tuple(Task(name, **made, **options) for name in names) + tuple(
            Task(path.stem, data=str(path), **options) for path in self.data
        )

    def estimate(self, settings: "Settings", out: Path) -> int:
        """Prints what would run, and the time it would take here."""
        from jfuse.evals.estimate import estimate

        found = estimate(settings, out, profile=self.profile)
        columns = ("model", "task", "samples", "runs left", "seconds")
        rows = [(one.model, one.task, one.samples, one.runs, f"{one.seconds:,.0f}") for one in found]
        total = sum(one.seconds for one in found)
        runs = sum(one.runs for one in found)
        value = {"seconds": total, "runs": runs, "tasks": [one._asdict() for one in found]}
        line = f"{runs} runs, about {as_duration(total)}, compilation not counted. Nothing was run."
        self.show(value, make_table(columns, rows), line)
        return 0


def numbered(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that does not exist."""
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def as_duration(seconds: float) -> str:
    """Seconds for people."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def as_value(run: "Run", out: Path, added: int) -> dict[str, Any]:
    """The result as plain values."""
    from jfuse.evals.summary import as_row

    return {"out": str(out), "added": added, "incomplete": run.incomplete, "rows": [as_row(cell) for cell in run.cells]}


def report(run: "Run", out: Path, added: int) -> list[Any]:
    """The result for people: one table a task, raw means beside the share of the gap closed."""
    columns = ("method", "ratio", "realised", "n", "KL", "closed", "95 %", "NLL", "closed", "score", "TTFT")
    tables = []
    for model, task in dict.fromkeys((cell.model, cell.task) for cell in run.cells):
        rows = []
        for cell in run.cells:
            if (cell.model, cell.task) != (model, task):
                continue
            kl, nll = cell.closed.get("kl"), cell.closed.get("nll")
            rows.append(
                (cell.method, f"{cell.ratio:g}", f"{cell.mean['realised']:.2f}", cell.n, f"{cell.mean['kl']:.3f}")
                + (percent(kl and kl.value), interval(kl), f"{cell.mean['nll']:.3f}", percent(nll and nll.value))
                + (number(cell.mean.get("score"), "{:.2f}"), number(cell.mean.get("ttft"), "{:.2f} s"))
            )
        caption = (
            "Closed: share of the way from reuse to full prefill; blank where that gap is under two standard errors."
        )
        tables.append(make_table(columns, rows, f"{model}, {task}", caption))
    left = f" {run.incomplete} samples are not complete and do not count." if run.incomplete else ""
    if run.too_long:
        left += (
            f" {run.too_long} samples were left out: they are longer than the model serves, or need the other factor "
            "set of a longrope model (--longest-request)."
        )
    if run.left_out:
        left += f" Not shown, for they lack samples that count: {', '.join(run.left_out)}; name them to complete them."
    return [*tables, f"{added} runs added.{left} Written: {out}/metrics.json, metrics.csv."]


def percent(value: float | None) -> str:
    """A share for people."""
    return "" if value is None else f"{value:.0%}"


def interval(share: Any) -> str:
    """An interval for people."""
    return "" if share is None or share.low is None else f"{share.low:.0%} to {share.high:.0%}"


def number(value: float | None, form: str) -> str:
    """A number that may be missing."""
    return "" if value is None else form.format(value)
