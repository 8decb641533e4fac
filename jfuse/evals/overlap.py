"""One request behind a slow link: how its loading and its recomputation overlap."""

import numpy as np

from jfuse.account import make_report
from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave
from jfuse.evals.requests import TextRequest
from jfuse.models.decoder import Model
from jfuse.pipeline import full_prefill, serve
from jfuse.report import Report
from jfuse.selectors.base import Selector
from jfuse.sources import StoredChunks
from jfuse.stitch import make_layout
from jfuse.store import ChunkStore
from jfuse.throttle import Throttle


def behind_link(
    model: Model, request: TextRequest, selector: Selector, config: FusionConfig = FusionConfig(), *, load_share: float
) -> Report:
    """The account of a request whose caches take `load_share` of a full prefill's time to load, measured here.

    Raises:
        ValueError: a share that is not positive.
        RuntimeError: something was compiled while it was timed.
    """
    store = ChunkStore.open("memory://", model)
    ids = [store.put(encode_chunk(model, piece)) for piece in request.pieces]
    layout, question = make_layout(request.pieces, pad_to=config.pad_to), request.question

    def full() -> None:
        int(np.argmax(full_prefill(model, layout, question).first))

    seconds = float(np.median(interleave({"full": full}, repeats=3)["full"]))
    num_bytes = sum(map(len, request.pieces)) * model.config.kv_bytes_per_token(np.dtype(model.dtype).itemsize)
    link = Throttle.by_load_time(load_share, full_prefill=seconds, num_bytes=num_bytes)
    served = []

    def fused() -> None:
        served.append(serve(model, link(StoredChunks(store, ids)), question, selector, config))

    interleave({"fused": fused}, repeats=1)
    return make_report(model, selector, config, served[-1], len(question.tokens), hits=len(ids))
