"""What RelaxKV's restricted context saves: recomputation with it against the same targets over the full prefix.

4,096 context tokens in device memory. `relaxkv` and `relaxkv_full_prefix` recompute the same positions in the same
layers and differ only in what these may read, so edges and seconds of the fuse stage are compared. The paper
(2609.33503) reports 9.9 to 23.2 % less recomputation latency. Usage: python benchmarks/restricted.py [--repeats 5]
"""

import argparse
from functools import partial

import numpy as np
import setting

import jfuse
from jfuse.account import make_report
from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave, summary
from jfuse.pipeline import serve
from jfuse.report import Report
from jfuse.selectors import relaxkv, relaxkv_full_prefix
from jfuse.sources import ResidentChunks

RATIOS = (0.1, 0.2, 0.3)
PUBLISHED = (-0.232, -0.099)
WINDOW = 32


def main() -> None:
    """Runs all variants in turn and prints edges and seconds of the fuse stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    setting.add_sizes(parser)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    arguments = parser.parse_args()
    model = jfuse.load_model("smollm2-135m")
    request = setting.sized_request(model.tokenizer, arguments)
    source = ResidentChunks([jfuse.encode_chunk(model, piece) for piece in request.pieces])
    selectors = {
        "relaxkv_full_prefix": relaxkv_full_prefix(),
        "relaxkv": relaxkv(),
        f"relaxkv, window {WINDOW}": relaxkv(window=WINDOW),
    }
    stages: dict[str, list[dict[str, float]]] = {}
    reports: dict[str, Report] = {}

    def fused(key: str, name: str, ratio: float) -> None:
        config = FusionConfig(ratio=ratio)
        served = serve(model, source, request.question, selectors[name], config)
        int(np.argmax(served.first))
        stages.setdefault(key, []).append(served.stages)
        if key not in reports:
            reports[key] = make_report(model, selectors[name], config, served, len(request.question.tokens))

    keys = {(ratio, name): f"{name} at {ratio}" for ratio in arguments.ratios for name in selectors}
    interleave(
        {key: partial(fused, key, name, ratio) for (ratio, name), key in keys.items()}, repeats=arguments.repeats
    )
    rows = []
    for (ratio, name), key in keys.items():
        control = keys[ratio, "relaxkv_full_prefix"]
        if reports[key].rows != reports[control].rows:
            raise RuntimeError(f"{key} recomputed other rows than {control}; they cannot be compared.")
        fuse = {k: summary([lap["fuse"] for lap in stages[k][-arguments.repeats :]]) for k in (key, control)}
        edges = reports[key].edges / reports[control].edges - 1
        seconds = fuse[key]["median"] / fuse[control]["median"] - 1
        rows.append(
            {
                "method": name,
                "ratio": ratio,
                "realised": reports[key].realised_ratio,
                "edges": reports[key].edges,
                "edges_change": edges,
                "fuse": fuse[key],
                "fuse_change": seconds,
            }
        )
        print(
            f"{key:32s} realised {reports[key].realised_ratio:.3f}, {reports[key].edges / 1e6:8.1f} M edges "
            f"({edges:+.1%}), fuse {fuse[key]['median']:.3f} s ({seconds:+.1%})"
        )
    print(f"published: {PUBLISHED[0]:+.1%} to {PUBLISHED[1]:+.1%}")
    print(setting.save("restricted", {"settings": vars(arguments), "published": PUBLISHED, "rows": rows}))


if __name__ == "__main__":
    main()
