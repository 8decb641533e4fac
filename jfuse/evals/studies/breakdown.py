"""Where a request's time goes: loading and selecting, fusing, the query, and decoding (QCFuse section 2.2, Fig. 1)."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave
from jfuse.evals.methods import FULL
from jfuse.evals.studies.parts import Row
from jfuse.evals.studies.served import Request
from jfuse.generate import decode, stop_ids
from jfuse.pipeline import full_prefill, serve
from jfuse.selectors.base import Selector
from jfuse.sources import Source


def time_breakdown(
    request: Request,
    methods: Mapping[str, Selector],
    *,
    ratio: float = 0.3,
    source: Callable[[], Source] | None = None,
    repeats: int = 5,
    new_tokens: int = 16,
) -> list[Row]:
    """Median seconds of every stage of one request, all methods in turn in one run.

    "select" holds the wait for what a selector must see, "fuse" the wait for the layers that are still on their way.

    Args:
        source: gives the chunks' caches anew for every run, for example behind a `Throttle`; in memory by default.
        new_tokens: decoded after the first token, for the time of a whole answer.

    Returns:
        Rows `method`, `ratio`, then seconds `select`, `fuse`, `query`, `decode` (full prefill: `prefill`, `decode`),
        their sum `total`, `ttft`, and `select_share` of the time to first token.
    """
    model, question = request.model, request.question
    config = FusionConfig(ratio, pad_to=request.pad_to)
    stages: dict[str, list[dict[str, float]]] = {name: [] for name in (FULL, *methods)}

    def run(name: str) -> None:
        if name == FULL:
            out = full_prefill(model, request.layout, question)
        else:
            chunks = request.resident if source is None else source()
            out = serve(model, chunks, question, methods[name], config, prefix=request.prefix)
        began = time.perf_counter()
        tokens = decode(model, out.context, out.queried, out.first, len(question.tokens), new_tokens, stop_ids(model))
        deque(tokens, maxlen=0)
        stages[name].append({**out.stages, "decode": time.perf_counter() - began})

    interleave({name: partial(run, name) for name in stages}, repeats=repeats, warm_up=2)
    return [_row(name, 1.0 if name == FULL else ratio, runs[-repeats:]) for name, runs in stages.items()]


def _row(name: str, ratio: float, runs: Sequence[dict[str, float]]) -> Row:
    median = {stage: float(np.median([run[stage] for run in runs])) for stage in runs[0]}
    ttft = sum(seconds for stage, seconds in median.items() if stage != "decode")
    whole = {"ttft": ttft, "total": ttft + median["decode"], "select_share": median.get("select", 0.0) / ttft}
    return {"method": name, "ratio": ratio, **median, **whole}
