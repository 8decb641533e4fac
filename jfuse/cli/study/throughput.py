"""`jfuse study throughput`: time to first token under load (QCFuse section 4.5, Fig. 14)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jfuse.cli.command import make_table
from jfuse.cli.selector import SelectorCommand
from jfuse.cli.store import needed_tokenizer
from jfuse.cli.study.base import Study
from jfuse.report import as_milliseconds


@dataclass(frozen=True, kw_only=True)
class Throughput(SelectorCommand, Study):
    """Time to first token against requests per second, by full prefill and by fusion (QCFuse Fig. 14).

    Requests arrive at random, wait in a queue, and load their caches from host memory while the one before computes.
    """

    name: ClassVar[str] = "throughput"
    example: ClassVar[str] = "jfuse study throughput --selectors qcfuse prophetkv --ratio 0.5 --loads 0.6 1.0"

    selectors: tuple[str, ...] = ("prophetkv", "qcfuse")
    """What is held against full prefill; jfuse selectors lists the names."""
    ratio: float = 0.5
    """Share of the context that is recomputed."""
    loads: tuple[float, ...] = (0.6, 0.8, 1.0, 1.3)
    """Offered rates, as shares of the rate that full prefill can sustain alone."""
    requests: int = 20
    """Requests per point."""
    chunks: int = 8
    """Chunks of a request."""
    chunk_tokens: int = 512
    """Tokens of a chunk."""
    query_tokens: int = 64
    """Tokens of the query."""

    def run(self) -> int:
        """Runs every method at every load."""
        from tqdm.auto import tqdm

        from jfuse.config import checked_ratio
        from jfuse.evals.load_test import hosted_methods, throughput
        from jfuse.evals.requests import request_of
        from jfuse.plot import ttft_against_load

        self.check_selectors(self.selectors)
        checked_ratio(self.ratio, name="--ratio")
        self.require(1, "requests", "chunks", "chunk_tokens", "query_tokens")
        self.require_shares("loads")
        model = self.load()
        chosen = self.choose(model, self.selectors)
        request = request_of(
            needed_tokenizer(model), chunks=self.chunks, chunk_tokens=self.chunk_tokens, query_tokens=self.query_tokens
        )
        methods = hosted_methods(model, request, chosen, ratio=self.ratio)
        with tqdm(total=len(methods) * (len(self.loads) + 2), unit="run", disable=None) as bar:
            rows = throughput(methods, loads=self.loads, count=self.requests, tick=bar.update)
        return self.finish({"rows": rows}, ttft_against_load(rows), load_table(rows))


def load_table(rows: list[dict[str, Any]]) -> Any:
    """The rows of a load test for people."""
    return make_table(
        ("load", "method", "offered / s", "achieved / s", "TTFT p50", "p90", "p95", "failed"),
        [
            (row["load"], row["method"], "" if row["offered"] is None else f"{row['offered']:.3f}")
            + (f"{row['achieved']:.3f}", *(as_milliseconds(row[name]) for name in ("p50", "p90", "p95")), row["failed"])
            for row in rows
        ],
        caption="single: one request at a time. saturation: a full queue. Else Poisson arrivals.",
    )
