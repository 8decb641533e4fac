"""Sixteen questions at once: `jit(vmap(...))` over the samples of a bucket, held against the single runs.

    python examples/batch_eval.py --selector qcfuse --ratio 0.3

Batches pay on an accelerator. On a CPU they show that selectors, fusion and scores are plain functions of JAX.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from jfuse import load_model
from jfuse.evals.batch import bucket, measure_batch
from jfuse.evals.measure import Case
from jfuse.evals.methods import make_methods, needed_layers
from jfuse.evals.prompts import make_prompt
from jfuse.evals.settings import Task
from jfuse.evals.workload import draw

FIGURES = ("kl", "first_kl", "nll")


def timed(run: Callable[[], list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], float]:
    """The result, and the seconds of a second run, which compiles nothing."""
    run()
    began = time.perf_counter()
    return run(), time.perf_counter() - began


def main() -> None:
    """Measures every sample alone and in its batch, and prints how far the two differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selector", default="qcfuse")
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="context tokens of each question")
    arguments = parser.parse_args()

    model = load_model("smollm2-135m")
    layers = needed_layers([arguments.selector], model)
    method = make_methods([arguments.selector], [arguments.ratio], layers=layers)[-1]
    task = Task("mk", length=arguments.length, num_chunks=2)
    samples = draw(task, model.tokenizer, arguments.samples)
    cases = [Case(model, make_prompt(sample, model.tokenizer)) for sample in samples]

    batches = defaultdict(list)
    for case in cases:
        batches[bucket(case.prompt)].append(case)
    largest = 0.0
    for shape, members in batches.items():
        together, batched = timed(lambda members=members: measure_batch(members, method))
        alone, single = timed(lambda members=members: [case.measure(method).figures for case in members])
        gaps = [abs(a[name] - b[name]) for a, b in zip(alone, together, strict=True) for name in FIGURES]
        largest = max(largest, *gaps)
        kl = np.mean([one["kl"] for one in together])
        print(
            f"{len(members)} samples padded to {shape[0]} positions: KL {kl:.4f}; "
            f"{batched:.1f} s together, {single:.1f} s one by one"
        )
    print(f"{method.key}: batch and single runs differ by at most {largest:.1e} nats")
    if largest > 1e-3:
        raise SystemExit("the batch does not give what the single runs give")


if __name__ == "__main__":
    main()
