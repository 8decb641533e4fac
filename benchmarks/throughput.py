"""Time to first token under load: full prefill, ProphetKV and QCFuse, one request at a time, caches in host memory.

8 x 512 tokens, 64 query tokens, one output token, all hits, ratio 0.5; Poisson arrivals, the same for every method.
Rates are shares of the rate that full prefill can sustain. Usage: python benchmarks/throughput.py [--count 20]
"""

import argparse
from functools import partial

import numpy as np
import setting
from tqdm.auto import tqdm

import jfuse
from jfuse import selectors
from jfuse.config import FusionConfig
from jfuse.evals.latency import interleave, summary
from jfuse.evals.throughput import throughput
from jfuse.host_tier import HostTier
from jfuse.jobs import FusionJob, PrefillJob
from jfuse.pipeline import Question, full_prefill
from jfuse.profile import load_profile
from jfuse.sources import StoredChunks
from jfuse.stitch import make_layout

CONFIG = FusionConfig(ratio=0.5)


def main() -> None:
    """Runs every method at every load and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="requests a point")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--single", type=int, default=5, help="requests timed alone")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--query-tokens", type=int, default=64)
    parser.add_argument("--name", default="throughput", help="of the results file")
    arguments = parser.parse_args()
    model = jfuse.load_model("smollm2-135m")
    size, count = arguments.chunk_tokens, arguments.chunks
    text = setting.wiki_tokens(model.tokenizer, size * count)
    pieces = [text[i * size : (i + 1) * size] for i in range(count)]
    question = Question(setting.question_tokens(model.tokenizer, arguments.query_tokens))
    store = jfuse.ChunkStore.open("memory://", model)
    ids = [store.put(jfuse.encode_chunk(model, piece)) for piece in pieces]
    host = HostTier(store)
    host.load(ids)

    def turned(items, i):
        """Request i has the chunks in its own order."""
        return items[i % count :] + items[: i % count]

    def prefilled(i):
        return PrefillJob(model, make_layout(turned(pieces, i), pad_to=CONFIG.pad_to), question)

    def fused(selector, i):
        return FusionJob(model, lambda: StoredChunks(store, turned(ids, i), host=host), question, selector, CONFIG)

    methods = {
        "full prefill": prefilled,
        "prophetkv": partial(fused, selectors.prophetkv()),
        "qcfuse": partial(fused, selectors.qcfuse(load_profile(model).critical_layers())),
    }

    def full():
        int(np.argmax(full_prefill(model, make_layout(pieces, pad_to=CONFIG.pad_to), question).first))

    alone = summary(interleave({"full": full}, repeats=3)["full"])["median"]
    rates = [load / alone for load in arguments.loads]
    with tqdm(total=len(methods) * (len(rates) + 2), unit="run", disable=None) as bar:
        rows = throughput(methods, rates=rates, count=arguments.count, single=arguments.single, tick=bar.update)
    for row in rows:
        load = row["load"] if isinstance(row["load"], str) else f"{row['load']:.3f}/s offered"
        print(
            f"{row['method']:12s} {load:18s} {row['achieved']:.3f}/s, TTFT p50 {row['p50']:.2f} s, "
            f"p95 {row['p95']:.2f} s, {row['failed']} failed"
        )

    def of(method, load):
        return next(row for row in rows if (row["method"], row["load"]) == (method, load))

    gain = of("qcfuse", "saturation")["achieved"] / of("full prefill", "saturation")["achieved"]
    single = of("full prefill", "single")["p50"] / of("qcfuse", "single")["p50"]
    lower = [of("qcfuse", rate)["p50"] / of("full prefill", rate)["p50"] for rate in rates]
    checks = [
        ("saturation of qcfuse over full prefill: at least 1.5", gain, gain >= 1.5),
        ("that gain over the gain of a single request: at least 0.92", gain / single, gain / single >= 0.92),
        ("TTFT of qcfuse over full prefill's, worst of the rates: below 1", max(lower), max(lower) < 1),
    ]
    for what, value, met in checks:
        print(f"{'met    ' if met else 'NOT met'}  {value:.3f}  {what}")
    found = [{"check": what, "value": float(value), "met": bool(met)} for what, value, met in checks]
    print(setting.save(arguments.name, {"settings": vars(arguments), "rows": rows, "checks": found}))


if __name__ == "__main__":
    main()
