"""The studies of time: where it goes, and what a slow link costs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jfuse.cli.command import make_table
from jfuse.cli.selector import SelectorCommand
from jfuse.cli.store import needed_tokenizer
from jfuse.cli.study.base import Study
from jfuse.report import as_milliseconds

if TYPE_CHECKING:
    from jfuse.evals.studies.served import Request
    from jfuse.models.decoder import Model
    from jfuse.selectors.base import Selector


@dataclass(frozen=True, kw_only=True)
class Timed(SelectorCommand, Study):
    """A study that serves one request by several methods in turn."""

    selectors: tuple[str, ...] = ("epic", "cacheblend", "fusionrag", "prophetkv", "qcfuse")
    """Methods beside full prefill; jfuse selectors lists the names."""
    ratio: float = 0.3
    """Share of the context that is recomputed."""
    chunks: int = 8
    """Chunks of the request."""
    chunk_tokens: int = 256
    """Tokens of a chunk."""
    query_tokens: int = 64
    """Tokens of the query."""
    repeats: int = 5
    """Timed runs of every method; medians are shown."""

    def prepare(self, model: "Model") -> "tuple[Request, dict[str, Selector]]":
        """The request with its chunks encoded, and the methods by name."""
        from jfuse.cli.command import working
        from jfuse.evals.requests import request_of
        from jfuse.evals.studies.served import make_request

        methods = self.choose(model, self.selectors)
        sized = request_of(
            needed_tokenizer(model), chunks=self.chunks, chunk_tokens=self.chunk_tokens, query_tokens=self.query_tokens
        )
        with working(f"Encoding {self.chunks} chunks ..."):
            request = make_request(model, sized.pieces, sized.question)
        return request, methods

    def check(self) -> None:
        """Refuses what cannot be run, before anything is loaded."""
        from jfuse.config import checked_ratio

        self.check_selectors(self.selectors)
        checked_ratio(self.ratio, name="--ratio")
        self.require(1, "chunks", "chunk_tokens", "query_tokens", "repeats")


@dataclass(frozen=True, kw_only=True)
class Breakdown(Timed):
    """Where a request's time goes: selecting, fusing, the query, decoding (QCFuse Fig. 1)."""

    name: ClassVar[str] = "breakdown"
    example: ClassVar[str] = "jfuse study breakdown --chunks 8 --chunk-tokens 256"

    new_tokens: int = 16
    """Tokens of the answer."""

    def run(self) -> int:
        """Times every stage, caches in memory."""
        from jfuse.evals.studies.breakdown import time_breakdown
        from jfuse.plot import time_breakdown as figure

        self.check()
        self.require(0, "new_tokens")
        request, methods = self.prepare(self.load())
        rows = time_breakdown(request, methods, ratio=self.ratio, repeats=self.repeats, new_tokens=self.new_tokens)
        return self.finish({"rows": rows}, figure(rows), stages_table(rows))


@dataclass(frozen=True, kw_only=True)
class Bandwidth(Timed):
    """Time to first token while caches arrive over links of different speed (QCFuse Fig. 13)."""

    name: ClassVar[str] = "bandwidth"
    example: ClassVar[str] = "jfuse study bandwidth --load-shares 0.09 0.29"

    selectors: tuple[str, ...] = ("prophetkv", "qcfuse")
    """Methods beside full prefill; jfuse selectors lists the names."""
    ratio: float = 0.5
    """Share of the context that is recomputed."""
    load_shares: tuple[float, ...] = (0.02, 0.09, 0.29)
    """Time to load all caches over the time of a full prefill; QCFuse's 10 and 3 GB/s are 0.09 and 0.29."""
    repeats: int = 3

    def run(self) -> int:
        """Times every stage behind every link."""
        from jfuse.evals.studies.bandwidth import bandwidth
        from jfuse.plot import time_breakdown as figure

        self.check()
        self.require_shares("load_shares")
        request, methods = self.prepare(self.load())
        rows = bandwidth(request, methods, load_shares=self.load_shares, ratio=self.ratio, repeats=self.repeats)
        shown = [{name: value for name, value in row.items() if name != "decode"} for row in rows]
        return self.finish({"rows": rows}, figure(shown), stages_table(rows))


def stages_table(rows: list[dict[str, Any]]) -> Any:
    """Stages for people."""
    links = any("load_share" in row for row in rows)
    lines = []
    for row in rows:
        stages = [as_milliseconds(row[name]) if name in row else "" for name in STAGES]
        link = (f"{row['load_share']:g}",) if links else ()
        whole = (as_milliseconds(row["ttft"]), f"{row['select_share']:.0%}", as_milliseconds(row["total"]))
        lines.append((*link, row["method"], f"{row['ratio']:g}", *stages, *whole))
    first = ("load / full",) if links else ()
    return make_table((*first, "method", "ratio", *STAGES, "TTFT", "select share", "total"), lines)


STAGES = ("prefill", "select", "fuse", "query", "decode")
