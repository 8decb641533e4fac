"""`jfuse study timeline`: what one request reads, moves and computes when (QCFuse section 3.4)."""

from dataclasses import dataclass
from typing import ClassVar

from jfuse.cli.ask import report_table
from jfuse.cli.selector import SelectorCommand
from jfuse.cli.store import needed_tokenizer
from jfuse.cli.study.base import Study


@dataclass(frozen=True, kw_only=True)
class Timeline(SelectorCommand, Study):
    """Draws how one request's loading overlaps with its recomputation, its caches behind a link of any speed."""

    name: ClassVar[str] = "timeline"
    example: ClassVar[str] = "jfuse study timeline --selector qcfuse --load-share 0.29"

    selector: str = "qcfuse"
    """How the positions to recompute are chosen; jfuse selectors lists the names."""
    ratio: float = 0.5
    """Share of the context that is recomputed."""
    load_share: float = 0.29
    """Time to load all caches, as a share of a full prefill's; QCFuse's 10 and 3 GB/s are 0.09 and 0.29."""
    chunks: int = 8
    """Chunks of the request."""
    chunk_tokens: int = 512
    """Tokens of a chunk."""
    query_tokens: int = 64
    """Tokens of the query."""

    def run(self) -> int:
        """Serves the request once to compile, and once for the figure."""
        from jfuse.config import FusionConfig
        from jfuse.evals.overlap import behind_link
        from jfuse.evals.requests import request_of
        from jfuse.plot import timeline

        self.check_selectors([self.selector])
        self.require(1, "chunks", "chunk_tokens", "query_tokens")
        self.require_shares("load_share")
        config = FusionConfig(ratio=self.ratio)
        model = self.load()
        selector = self.choose(model, [self.selector])[self.selector]
        request = request_of(
            needed_tokenizer(model), chunks=self.chunks, chunk_tokens=self.chunk_tokens, query_tokens=self.query_tokens
        )
        report = behind_link(model, request, selector, config, load_share=self.load_share)
        return self.finish({"report": report.as_dict()}, timeline(report.events), report_table(report))
