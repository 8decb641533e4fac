"""B-05 on the embedded model: what the report says full prefill would take, against what it takes."""

import numpy as np
import pytest

import jfuse as jf
from jfuse.account import make_report
from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave
from jfuse.evals.ruler import wiki_haystack
from jfuse.pipeline import Question, full_prefill, serve
from jfuse.sources import ResidentChunks
from jfuse.stitch import make_layout
from jfuse.throttle import Throttle


@pytest.mark.slow
def test_the_estimate_of_a_full_prefill_is_within_a_fifth_of_the_measurement():
    """B-05: a short context behind a slow disk; medians of runs that take turns."""
    model = jf.load_model("smollm2-135m")
    text = np.concatenate([model.tokenizer.encode(passage.content) for passage in wiki_haystack()[:40]])
    pieces, question = [text[:256], text[256:512]], Question(text[512:576])
    source, selector = ResidentChunks([jf.encode_chunk(model, piece) for piece in pieces]), jf.selectors.qcfuse((21,))
    config, layout, reports = FusionConfig(ratio=0.5), make_layout(pieces, pad_to=512), []
    slow = Throttle(latency=0.5)(source)

    def fused():
        served = serve(model, slow, question, selector, config)
        int(np.argmax(served.first))
        reports.append(make_report(model, selector, config, served, 64))

    seconds = interleave(
        {"full": lambda: int(np.argmax(full_prefill(model, layout, question).first)), "fused": fused}, repeats=5
    )
    measured = float(np.median(seconds["full"]))
    estimated = float(np.median([report.full_prefill_estimate for report in reports[1:]]))
    assert estimated == pytest.approx(measured, rel=0.2)
    assert np.median(seconds["fused"]) > measured and all(report.full_prefill_faster for report in reports[1:])
