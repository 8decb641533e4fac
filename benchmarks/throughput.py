"""Time to first token under load: full prefill, ProphetKV and QCFuse, one request at a time, caches in host memory.

8 x 512 tokens, 64 query tokens, one output token, all hits, ratio 0.5; Poisson arrivals, the same for every method. For
the rate at saturation, methods take turns in draining short queues.
Rates are shares of the rate that full prefill can sustain: 20 requests take every method about 20 times full prefill's
time over the rate. In all that is an hour and a half on two cores, and an hour without ProphetKV.
Usage: python benchmarks/throughput.py [--methods qcfuse]
"""

import argparse
from typing import Any

import setting
from tqdm.auto import tqdm

import jfuse
from jfuse import selectors
from jfuse.account import make_report
from jfuse.config import FusionConfig
from jfuse.evals.load_test import hosted_methods, throughput
from jfuse.evals.requests import TextRequest
from jfuse.pipeline import serve
from jfuse.profile import load_profile
from jfuse.sources import ResidentChunks

RATIO = 0.5
GAIN, SHARE_OF_SINGLE = 1.5, 0.92
"""What QCFuse must reach at saturation: over full prefill, and of its gain for a single request."""


def main() -> None:
    """Runs every method at every load and prints a table and what was to be reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=("prophetkv", "qcfuse"), default=("prophetkv", "qcfuse"))
    parser.add_argument("--count", type=int, default=20, help="requests a point")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 1.3, 1.6])
    parser.add_argument("--burst", type=int, default=5, help="requests of a queue whose draining is timed")
    parser.add_argument("--single", type=int, default=5, help="requests timed alone")
    setting.add_sizes(parser)
    parser.add_argument("--name", default="throughput", help="of the results file")
    arguments = parser.parse_args()
    model = jfuse.load_model("smollm2-135m")
    request = setting.sized_request(model.tokenizer, arguments)
    known = {"prophetkv": selectors.prophetkv(), "qcfuse": selectors.qcfuse(load_profile(model).critical_layers())}
    methods = hosted_methods(model, request, {name: known[name] for name in arguments.methods}, ratio=RATIO)
    with tqdm(total=len(methods) * (len(arguments.loads) + 2), unit="run", disable=None) as bar:
        rows = throughput(
            methods,
            loads=arguments.loads,
            count=arguments.count,
            single=arguments.single,
            burst=arguments.burst,
            tick=bar.update,
        )
    for row in rows:
        load = row["load"] if row["offered"] is None else f"{row['offered']:.3f}/s offered"
        print(
            f"{row['method']:12s} {load:18s} {row['achieved']:.3f}/s, TTFT p50 {row['p50']:.2f} s, "
            f"p90 {row['p90']:.2f} s, p95 {row['p95']:.2f} s, {row['failed']} failed"
        )
    checks = reached(rows, arguments.loads) if "qcfuse" in arguments.methods else []
    limit = flop_limit(model, request, known["qcfuse"])
    print(f"counting FLOPs allows qcfuse {limit:.2f}x over full prefill")
    for check in checks:
        print(f"{'met    ' if check['met'] else 'NOT met'}  {check['value']:.3f}  {check['check']}")
    found = {"settings": vars(arguments), "flop_limit": limit, "rows": rows, "checks": checks}
    print(setting.save(arguments.name, found))


def reached(rows: list[dict[str, Any]], loads: list[float]) -> list[dict[str, Any]]:
    """What was to be reached, and whether it was."""

    def of(method: str, load: object) -> dict[str, Any]:
        return next(row for row in rows if (row["method"], row["load"]) == (method, load))

    gain = of("qcfuse", "saturation")["achieved"] / of("full prefill", "saturation")["achieved"]
    single = of("full prefill", "single")["p50"] / of("qcfuse", "single")["p50"]
    worst = max(of("qcfuse", load)["p50"] / of("full prefill", load)["p50"] for load in loads)
    failed = sum(row["failed"] for row in rows)
    return [
        setting.check(f"saturation of qcfuse over full prefill: at least {GAIN}", gain, gain >= GAIN),
        setting.check(
            f"that gain over the gain of a single request: at least {SHARE_OF_SINGLE}",
            gain / single,
            gain / single >= SHARE_OF_SINGLE,
        ),
        setting.check("median TTFT of qcfuse over full prefill's, worst of the rates: below 1", worst, worst < 1),
        setting.check("requests that failed: 0", failed, failed == 0),
    ]


def flop_limit(model: jfuse.Model, request: TextRequest, selector: jfuse.Selector) -> float:
    """FLOPs of a full prefill over those of the fused request, with the positions that the selector chooses in it."""
    config, source = FusionConfig(RATIO), ResidentChunks([jfuse.encode_chunk(model, piece) for piece in request.pieces])
    served = serve(model, source, request.question, selector, config)
    return make_report(model, selector, config, served, len(request.question.tokens)).flop_limit


if __name__ == "__main__":
    main()
