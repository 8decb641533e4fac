"""What the report says full prefill would take, against what it takes: a short context behind a slow disk.

The advice that full prefill would have been faster rests on this estimate.
Usage: python benchmarks/estimate.py [--repeats 5]
"""

import argparse

import numpy as np
import setting

import jfuse
from jfuse.account import make_report
from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave, summary
from jfuse.pipeline import Question, full_prefill, serve
from jfuse.sources import ResidentChunks
from jfuse.stitch import make_layout
from jfuse.throttle import Throttle


def main() -> None:
    """Runs both in turn and prints the medians; the estimate should be within a fifth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    model = jfuse.load_model("smollm2-135m")
    text = setting.wiki_tokens(model.tokenizer, 576)
    pieces, question = [text[:256], text[256:512]], Question(text[512:])
    selector = jfuse.selectors.qcfuse(jfuse.load_profile(model).critical_layers())
    config, layout, reports = FusionConfig(ratio=0.5), make_layout(pieces, pad_to=512), []
    slow = Throttle(latency=0.5)(ResidentChunks([jfuse.encode_chunk(model, piece) for piece in pieces]))

    def full():
        int(np.argmax(full_prefill(model, layout, question).first))

    def fused():
        served = serve(model, slow, question, selector, config)
        int(np.argmax(served.first))
        reports.append(make_report(model, selector, config, served, len(question.tokens)))

    seconds = interleave({"full": full, "fused": fused}, repeats=arguments.repeats)
    kept = reports[-arguments.repeats :]
    measured = float(np.median(seconds["full"]))
    estimated = float(np.median([report.full_prefill_estimate for report in kept]))
    advised = sum(report.full_prefill_faster for report in kept)
    print(f"full prefill {measured:.3f} s, estimated {estimated:.3f} s ({estimated / measured:.2f})")
    print(
        f"fused behind a slow disk {np.median(seconds['fused']):.3f} s; advised against {advised} of {len(kept)} times"
    )
    rows = {name: summary(times) for name, times in seconds.items()}
    print(setting.save("estimate", {"rows": rows, "estimated": estimated, "advised": advised, "runs": len(kept)}))


if __name__ == "__main__":
    main()
