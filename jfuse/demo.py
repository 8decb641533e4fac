"""The main job in one call: the embedded model answers questions over real passages, every way side by side.

It belongs to that model: the questions were chosen with it, and the figures of all candidates are its own.
Full prefill, direct reuse and QCFuse meet the same token ids. Questions are the first of a fixed, seeded list that full
prefill answers rightly (`examples/make_questions.py` makes that list without looking at a selector); beside them
stand the figures of all candidates.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from jfuse.account import make_report
from jfuse.anchors import default_rule
from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig
from jfuse.evals.data import Sample
from jfuse.evals.fidelity import answer_logits, answer_nll, kl_divergence
from jfuse.evals.methods import FULL, REUSE
from jfuse.evals.prompts import Prompt, make_prompt
from jfuse.evals.quotes import quote_sample
from jfuse.evals.ruler import needle_sample
from jfuse.generate import decode
from jfuse.models.decoder import Model
from jfuse.pipeline import (
    StoredChunks,
    encode_prefix,
    full_prefill,
    serve,
)
from jfuse.plot import figure_of, quality_against_ttft
from jfuse.profile import load_profile
from jfuse.report import Compilations
from jfuse.selectors import qcfuse, reuse
from jfuse.selectors.base import Selector
from jfuse.stitch import make_layout
from jfuse.store import ChunkStore
from jfuse.types import ContextCache

LENGTH, NUM_CHUNKS, NEW_TOKENS = 2304, 8, 24
QUESTIONS = Path(__file__).parent / "data" / "demo_questions.json"


class Method(NamedTuple):
    """One row of the demo's table; no selector means full prefill."""

    name: str
    ratio: float
    selector: Selector | None = None


class Result(NamedTuple):
    """One question served by one method."""

    method: Method
    ttft: float
    stages: dict[str, float]
    flop_limit: float
    realised_ratio: float
    first_kl: float  # first-token KL from full prefill, nats
    nll: float  # of the reference answer, nats a token
    answer: str
    compilations: int


def methods(model: Model, ratios: Sequence[float] = (0.1, 0.3, 0.5)) -> list[Method]:
    """Full prefill, direct reuse, and QCFuse on the model's profiled critical layers at each ratio."""
    selector = qcfuse(load_profile(model).critical_layers())
    rows = [Method("qcfuse", ratio, selector) for ratio in ratios]
    return [Method(FULL, 1.0), Method(REUSE, 0.0, reuse()), *rows]


def candidate(model: Model, task: str, seed: int) -> Sample:
    """One question of the demo's list: a needle task of `evals.ruler`, or "quote"."""
    encode = model.tokenizer.encode
    if task == "quote":
        return quote_sample(seed, length=LENGTH, num_chunks=NUM_CHUNKS, encode=encode)
    return needle_sample(task, seed, length=LENGTH, num_chunks=NUM_CHUNKS, encode=encode)


def is_right(sample: Sample, answer: str) -> bool:
    """String match: every answer for needles, the quoted words for quotes."""
    return all(wanted.lower() in answer.lower() for wanted in sample.answers)


def prepare(model: Model, store: ChunkStore, prompt: Prompt, tick: Callable[[], object] = lambda: None) -> StoredChunks:
    """The chunks of a prompt; those that the store lacks are encoded and put. `tick` is called once a chunk.

    What a store cannot keep, because it is read-only or full, is served from memory.
    """
    ids, computed = [], {}
    for i, tokens in enumerate(prompt.chunks):
        found = store.lookup(tokens)
        if not found.hit:
            chunk = encode_chunk(model, tokens)
            store.put(chunk)
            if not store.lookup(tokens).hit:
                computed[i] = chunk
        ids.append(found.id)
        tick()
    return StoredChunks(store, ids, computed)


def ask(
    model: Model, chunks: StoredChunks, prompt: Prompt, method: Method, prefix: ContextCache
) -> tuple[Result, np.ndarray]:
    """Serves one question by one method, and returns the result with its teacher-forced answer logits."""
    question, rule = prompt.question, method.selector
    with Compilations() as compiled:
        if rule is None:
            layout = make_layout(prompt.chunks, prompt.prefix, pad_to=FusionConfig().pad_to)
            served = full_prefill(model, layout, question)
            limit, realised = 1.0, 1.0
        else:
            config = FusionConfig(ratio=method.ratio)
            served = serve(model, chunks, question, rule, config, prefix=prefix)
            report = make_report(model, rule, config, served, len(question.tokens))
            limit, realised = report.flop_limit, report.realised_ratio
    answer = decode(
        model,
        served.context,
        served.queried,
        served.first,
        len(question.tokens),
        NEW_TOKENS,
        model.tokenizer.stop_ids,
    )
    text = model.tokenizer.decode(list(answer)).strip()
    scores = np.asarray(answer_logits(model, served.context, question.tokens, prompt.reference))
    return Result(
        method,
        sum(served.stages.values()),
        served.stages,
        limit,
        realised,
        0.0,
        float(answer_nll(scores, prompt.reference)),
        text,
        compiled.count,
    ), scores


def compare(
    model: Model, store: ChunkStore, sample: Sample, rows: Sequence[Method], tick: Callable[[], object] = lambda: None
) -> list[Result]:
    """One question by every method; the first method must be full prefill, which the KL is measured from."""
    prompt = make_prompt(sample, model.tokenizer)
    prefix = encode_prefix(model, prompt.prefix)
    chunks = prepare(model, store, prompt)
    results, full = [], None
    for method in rows:
        result, scores = ask(model, chunks, prompt, method, prefix)
        full = scores if full is None else full
        results.append(result._replace(first_kl=float(kl_divergence(full[0], scores[0]))))
        tick()
    return results


def run(
    model: Model,
    *,
    store: str = "file://runs/demo/store",
    out: str | Path = "runs/demo",
    questions: int = 5,
    ratios: Sequence[float] = (0.1, 0.3, 0.5),
) -> dict[str, Any]:
    """Runs the demo: prepares the store, asks, and writes `demo.json` and `demo.png` into `out`.

    Args:
        model: the embedded one, in any dtype.
        questions: how many of the kept candidates are asked, in seed order.

    Returns:
        What `demo.json` holds: `rows` (medians per method), `questions` with every answer, `candidates` (medians
        over all candidate questions, precomputed), and how warm the store was.

    Raises:
        ValueError: `questions` outside 1..number of kept candidates, or a ratio outside [0, 1].
        LookupError: another model, for which jfuse ships no profile.
    """
    started = time.perf_counter()
    known = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    kept = [(item["task"], item["seed"]) for item in known["questions"] if item["right"]]
    if not 1 <= questions <= len(kept):
        raise ValueError(f"questions is {questions}; use 1 to {len(kept)}.")
    chunk_store = ChunkStore.open(store, model, anchor_rule=default_rule(model))
    samples = [candidate(model, *key) for key in kept[:questions]]
    prompts = [make_prompt(sample, model.tokenizer) for sample in samples]
    rows = methods(model, ratios)

    total = sum(len(prompt.chunks) for prompt in prompts)
    warm = sum(chunk_store.lookup(tokens).hit for prompt in prompts for tokens in prompt.chunks)
    with tqdm(total=total, desc="encoding passages", unit="chunk", disable=None) as bar:
        for prompt in prompts:
            prepare(model, chunk_store, prompt, bar.update)
    encoded = time.perf_counter()
    with tqdm(total=len(rows) * (questions + 1), desc="answering", unit="answer", disable=None) as bar:
        compare(model, chunk_store, samples[0], rows, bar.update)  # compiles, outside the clock
        results = [compare(model, chunk_store, sample, rows, bar.update) for sample in samples]
    result = {
        "model": known["model"],
        "num_context": int(np.median([sum(len(chunk) for chunk in prompt.chunks) for prompt in prompts])),
        "rows": [_row(method, [asked[i] for asked in results], results) for i, method in enumerate(rows)],
        "questions": [_asked(sample, asked) for sample, asked in zip(samples, results, strict=True)],
        "candidates": known["medians"],
        "num_candidates": len(known["questions"]),
        "num_kept": len(kept),
        "store": {"chunks": total, "warm": warm, "seconds": encoded - started},
        "seconds": time.perf_counter() - started,
    }
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    axes = quality_against_ttft(result["rows"])
    axes.set_title(f"{known['model']}, {result['num_context']} context tokens, {questions} questions", fontsize=9)
    figure_of(axes).savefig(folder / "demo.png", dpi=150)
    return result


def _row(method: Method, results: Sequence[Result], asked: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """Medians of one method over the questions. Speed-ups are paired: each question against its own full prefill."""
    speed_up = float(np.median([full[0].ttft / own.ttft for full, own in zip(asked, results, strict=True)]))
    limit = float(np.median([result.flop_limit for result in results]))
    stages = sorted({stage for result in results for stage in result.stages})
    return {
        "method": method.name,
        "ratio": method.ratio,
        "ttft": float(np.median([result.ttft for result in results])),
        "stages": {stage: float(np.median([result.stages[stage] for result in results])) for stage in stages},
        "speed_up": speed_up,
        "flop_limit": limit,
        "share_of_limit": speed_up / limit,
        "realised_ratio": float(np.median([result.realised_ratio for result in results])),
        "first_kl": float(np.median([result.first_kl for result in results])),
        "nll": float(np.median([result.nll for result in results])),
        "compilations": sum(result.compilations for result in results),
    }


def _asked(sample: Sample, results: Sequence[Result]) -> dict[str, Any]:
    answers = [
        {
            "method": result.method.name,
            "ratio": result.method.ratio,
            "answer": result.answer,
            "right": is_right(sample, result.answer),
            "ttft": result.ttft,
            "first_kl": result.first_kl,
            "nll": result.nll,
        }
        for result in results
    ]
    return {"id": sample.id, "question": sample.query, "expected": list(sample.answers), "answers": answers}
