"""Time to first token of QCFuse against jfuse's own full prefill, and against the limit that counting FLOPs sets.

Cache-ready: un-rotated chunk caches and the prefix cache lie in device memory; placing, stitching, probe, selection,
fusion, query and first token are inside the clock. Usage: python benchmarks/ttft.py [--repeats 5]
"""

import argparse

import numpy as np
import setting

import jfuse
from jfuse.account import make_report
from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave, summary
from jfuse.pipeline import ResidentChunks, serve
from jfuse.profile import load_profile
from jfuse.selectors import qcfuse
from jfuse.stitch import make_layout

RATIOS = (0.1, 0.3, 0.5)
PREFIX = "Answer the question based on the given passages.\n\n"


def main() -> None:
    """Runs all variants in turn and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    setting.add_sizes(parser)
    arguments = parser.parse_args()
    model = jfuse.load_model("smollm2-135m")
    pieces, question = setting.sized_request(model.tokenizer, arguments)
    prefix = jfuse.encode_prefix(model, model.tokenizer.encode(PREFIX))
    source = ResidentChunks([jfuse.encode_chunk(model, piece) for piece in pieces])
    layout = make_layout(pieces, np.asarray(prefix.tokens)[: prefix.end], pad_to=FusionConfig().pad_to)
    selector = qcfuse(load_profile(model).critical_layers())
    stages: dict[float, list[dict[str, float]]] = {ratio: [] for ratio in RATIOS}
    reports = {}

    def fused(ratio):
        config = FusionConfig(ratio=ratio)
        served = serve(model, source, question, selector, config, prefix=prefix)
        int(np.argmax(served.first))
        stages[ratio].append(served.stages)
        if ratio not in reports:
            reports[ratio] = make_report(model, selector, config, served, len(question.tokens))

    def full():
        int(np.argmax(jfuse.full_prefill(model, layout, question).first))

    variants = {"full": full} | {str(ratio): (lambda ratio=ratio: fused(ratio)) for ratio in RATIOS}
    seconds = interleave(variants, repeats=arguments.repeats)
    baseline = summary(seconds["full"])
    print(
        f"full prefill: {baseline['median']:.3f} s, {len(pieces)} x {len(pieces[0])} context tokens, "
        f"{len(question.tokens)} query"
    )
    rows = []
    for ratio in RATIOS:
        own, timed = summary(seconds[str(ratio)]), stages[ratio][-arguments.repeats :]
        medians = {name: float(np.median([lap[name] for lap in timed])) for name in timed[0]}
        speed_up, limit = baseline["median"] / own["median"], reports[ratio].flop_limit
        rows.append(
            {
                "ratio": ratio,
                **own,
                "stages": medians,
                "speed_up": speed_up,
                "flop_limit": limit,
                "share_of_limit": speed_up / limit,
                "selection_share_of_full": medians["select"] / baseline["median"],
            }
        )
        print(
            f"ratio {ratio}: {own['median']:.3f} s, {speed_up:.2f}x of a limit of {limit:.2f}x "
            f"({speed_up / limit:.0%}); selection {medians['select'] / baseline['median']:.2%} of full prefill; "
            + ", ".join(f"{name} {value:.3f} s" for name, value in medians.items())
        )
    print(setting.save("ttft", {"selector": selector.name, "full": baseline, "rows": rows}))


if __name__ == "__main__":
    main()
