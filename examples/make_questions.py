"""Draws the demo's candidate questions and measures them. Usage: python examples/make_questions.py.

Forty-eight candidates, needles in real passages and quoted sentences, are drawn with fixed seeds. Kept are those
that full prefill answers rightly; no selector is looked at for that. Then all of them, kept or not, are served by
every method, and the medians are written beside the list to jfuse/data/demo_questions.json.
"""

import json
from collections.abc import Sequence

import numpy as np
from tqdm.auto import tqdm

from jfuse import demo
from jfuse.models.resolve import load_model
from jfuse.store import ChunkStore

TASKS: Sequence[str] = ("single", "quote", "mk", "mq", "mv", "quote")
NUM_CANDIDATES = 48
MODEL = "smollm2-135m"


def main() -> None:
    """Measures the candidates and writes the list."""
    model = load_model(MODEL)
    store = ChunkStore.open("memory://", model)
    rows = demo.methods(model)
    questions, results = [], []
    for number in tqdm(range(NUM_CANDIDATES), desc="candidates"):
        task = TASKS[number % len(TASKS)]
        sample = demo.candidate(model, task, number)
        asked = demo.compare(model, store, sample, rows)
        store.clear()
        results.append(asked)
        questions.append({"task": task, "seed": number, "right": demo.is_right(sample, asked[0].answer)})
    medians = [
        {
            "method": method.name,
            "ratio": method.ratio,
            "first_kl": float(np.median([asked[i].first_kl for asked in results])),
            "nll": float(np.median([asked[i].nll for asked in results])),
        }
        for i, method in enumerate(rows)
    ]
    found = {"model": MODEL, "questions": questions, "medians": medians}
    demo.QUESTIONS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
