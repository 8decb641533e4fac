"""The studies of quality: against time, over longer contexts, without parts of a method, and RelaxKV's tables."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from jfuse.cli.study.compared import Compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jfuse.evals.studies.parts import Part, Row

ENDS = ("full prefill", "reuse")


@dataclass(frozen=True, kw_only=True)
class Tradeoff(Compared):
    """Quality against time to first token, one line per method over its ratios (QCFuse Figs. 10 and 11)."""

    name: ClassVar[str] = "tradeoff"
    example: ClassVar[str] = "jfuse study tradeoff --tasks mq hotpotqa --ratios 0.1 0.3 0.5 --limit 5"

    selectors: tuple[str, ...] = ("epic", "cacheblend", "fusionrag", "prophetkv", "qcfuse")
    """Methods beside full prefill and reuse."""
    ratios: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    """Shares of the context that are recomputed."""
    limit: int = 6

    def parts(self) -> "list[Part]":
        """Every method at every ratio, timed."""
        from jfuse.evals.studies.tradeoff import tradeoff

        return tradeoff(
            self.asked_tasks(), methods=self.selectors, ratios=self.ratios, limit=self.limit, model=self.model
        )

    def draw(self, rows: "list[Row]") -> "Axes":
        """A panel per task, and one for the mean over tasks where full prefill leads."""
        from jfuse.evals.studies.parts import pooled
        from jfuse.plot import panels, quality_against_ttft

        mean = [{**row, "task": "mean over tasks"} for row in pooled(rows, measure=self.measure)]
        several = len({row["task"] for row in rows}) > 1
        return panels(
            [*rows, *(mean if several else [])],
            "task",
            lambda own, ax: quality_against_ttft(own, quality=self.measure, label=self.label, ax=ax),
        )


@dataclass(frozen=True, kw_only=True)
class Stress(Compared):
    """Quality as contexts get longer, by the number of chunks (QCFuse Fig. 12) or by their size (RelaxKV Table 6)."""

    name: ClassVar[str] = "stress"
    varied: ClassVar[str] = "by"
    example: ClassVar[str] = "jfuse study stress --by count --values 2 4 8 --chunk-tokens 256"

    by: Literal["count", "size"] = "count"
    """What grows: the number of chunks, or their size in a context of fixed length."""
    values: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: 2 4 8, or 64 128 256 512)")] = ()
    """Chunks, or tokens of a chunk."""
    chunk_tokens: int = 256
    """By count: tokens of a chunk."""
    length: int = 1024
    """By size: tokens of the context."""
    selectors: tuple[str, ...] = ("epic", "cacheblend", "fusionrag", "prophetkv", "qcfuse", "relaxkv:window=32")
    """Methods beside full prefill and reuse."""
    ratio: float = 0.3
    """Share of the context that is recomputed."""
    tasks: tuple[str, ...] = ("mq", "mv")
    """Needle tasks, which can have any length."""

    def parts(self) -> "list[Part]":
        """A run per length or size."""
        from jfuse.evals.studies.stress import by_chunk_count, by_chunk_size

        same = {"tasks": self.tasks, "methods": self.selectors, "ratio": self.ratio, "limit": self.limit}
        same |= {"model": self.model, "new_tokens": self.new_tokens}
        if self.by == "count":
            return by_chunk_count(self.values or (2, 4, 8), chunk_tokens=self.chunk_tokens, **same)
        return by_chunk_size(self.values or (64, 128, 256, 512), length=self.length, **same)

    def draw(self, rows: "list[Row]") -> "Axes":
        """A panel per task, a line per method."""
        from jfuse.plot import lines, panels

        x, xlabel = {
            "count": ("num_chunks", "chunks in the context"),
            "size": ("chunk_tokens", "tokens in a chunk"),
        }[self.by]
        label = {"xlabel": xlabel, "ylabel": self.label}
        shown = [row for row in rows if not self.measure.endswith("_closed") or row["method"] not in ENDS]
        return panels(shown, "task", lambda own, ax: lines(own, x=x, y=self.measure, by="method", ax=ax, **label))


@dataclass(frozen=True, kw_only=True)
class Ablation(Compared):
    """QCFuse with more or fewer anchors (Fig. 15), or scored on other layers (Fig. 16)."""

    name: ClassVar[str] = "ablation"
    varied: ClassVar[str] = "of"
    example: ClassVar[str] = "jfuse study ablation --of layers --limit 8"

    of: Literal["anchors", "layers"] = "anchors"
    """What is varied."""
    shares: tuple[float, ...] = (0.0, 0.1, 1.0)
    """Of anchors: their share of each chunk."""
    ratio: float = 0.3
    """Share of the context that is recomputed."""

    def parts(self) -> "list[Part]":
        """One run."""
        from jfuse.config import checked_ratio
        from jfuse.evals.studies.ablation import anchor_ratios, scored_layers

        checked_ratio(self.ratio, name="--ratio")
        same = {"tasks": self.asked_tasks(), "ratio": self.ratio, "limit": self.limit, "model": self.model}
        if self.of == "anchors":
            return anchor_ratios(self.shares, **same)
        model = self.load()
        return scored_layers(self.critical_layers(model, ["qcfuse"]), model.config.num_layers, **same)

    def draw(self, rows: "list[Row]") -> "Axes":
        """A group of bars per task."""
        from jfuse.plot import bars

        shown = [row for row in rows if row["method"] not in ENDS]
        return bars(shown, x="task", y=self.measure, by="method", ylabel=self.label)


@dataclass(frozen=True, kw_only=True)
class RelaxKV(Compared):
    """RelaxKV over its ratio beside what that realises, and the controls of its paper (Tables 3, 5, 7 and 8)."""

    name: ClassVar[str] = "relaxkv"
    varied: ClassVar[str] = "table"
    example: ClassVar[str] = "jfuse study relaxkv --table ratio --ratios 0.05 0.15 0.3"

    table: Literal["ratio", "context", "capacity"] = "ratio"
    """What is varied: r; where the context's positions come from; or the size of one set of targets."""
    ratios: Annotated[tuple[float, ...], tyro.conf.arg(help_behavior_hint="(default: the paper's)")] = ()
    """Ratios of the sweep, or capacities; the first one is the controls' ratio."""

    def parts(self) -> "list[Part]":
        """One run."""
        from jfuse.evals.studies import relaxkv

        same = {"tasks": self.asked_tasks(), "limit": self.limit, "model": self.model}
        if self.table == "ratio":
            return relaxkv.ratio_sweep(self.ratios or relaxkv.RATIOS, **same)
        if self.table == "context":
            return relaxkv.context_controls(*self.ratios[:1], **same)
        return relaxkv.target_capacity(self.ratios or relaxkv.CAPACITIES, **same)

    def draw(self, rows: "list[Row]") -> "Axes":
        """Quality against the work that ratios realise, a panel per task; bars for the controls."""
        from jfuse.plot import bars, panels, quality_against_work

        shown = [row for row in rows if row["method"] not in ENDS]
        if self.table == "context":
            return bars(shown, x="task", y=self.measure, by="method", ylabel=self.label)
        return panels(
            shown,
            "task",
            lambda own, ax: quality_against_work(own, quality=self.measure, label=self.label, ax=ax),
        )
