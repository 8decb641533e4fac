"""How long an evaluation would take: from the times of rows that are there, or from one short prefill.

In go settings and a run's folder; out comes one line per model and task. Compilation is not counted.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jfuse.costs import prefill_cost
from jfuse.evals.items import Item
from jfuse.evals.measure import DEFAULT, Setting
from jfuse.evals.methods import Method
from jfuse.evals.prompts import Prompt
from jfuse.evals.records import ROWS, TIMINGS, key_of, known_identity, read_rows
from jfuse.evals.run import make_plan
from jfuse.evals.settings import Settings
from jfuse.models.decoder import Model, prefill
from jfuse.models.resolve import load_model
from jfuse.selectors.base import Selector

TRIAL = 256  # tokens of the prefill that is timed


class Estimate(NamedTuple):
    """What is left to do on one task."""

    model: str
    task: str
    samples: int
    runs: int
    seconds: float


def estimate(
    settings: Settings,
    folder: str | Path,
    *,
    selectors: Mapping[str, Selector] | None = None,
    profile: str | Path | None = None,
    load: Callable[..., Model] = load_model,
    setting: Setting = DEFAULT,
) -> list[Estimate]:
    """Runs that are left on every task, and their seconds.

    Raises:
        ValueError, LookupError, ModuleNotFoundError: what `evaluate` would refuse, a folder of another run included.
    """
    done = {key_of(row) for row in read_rows(Path(folder) / ROWS)}
    times = read_rows(Path(folder) / TIMINGS)
    found = []
    for name in settings.models:
        model = load(name, **settings.loading)
        plan = make_plan(settings, name, model, selectors=selectors, profile=profile, setting=setting)
        known_identity(folder, plan.identity)
        left: dict[str, list[Item]] = {task.name: [] for task in settings.tasks}
        for item in plan.items:
            where = (plan.name, item.task.name, item.sample.id)
            methods = [method for method in item.methods if (*where, method.name, method.ratio) not in done]
            if methods:
                left[item.task.name].append(item._replace(methods=methods))
        per_flop = 0.0
        for task, items in left.items():
            known = [time for time in times if (time["model"], time["task"]) == (plan.name, task)]
            if items and not known:
                per_flop = per_flop or seconds_per_flop(model)
            seconds = sum(_by_times(item, known) if known else per_flop * _flops(model, item) for item in items)
            found.append(
                Estimate(plan.name, task, len(items), sum(len(item.methods) for item in items), float(seconds))
            )
    return found


def seconds_per_flop(model: Model) -> float:
    """What a short prefill takes here, compilation left out, over what it computes."""
    tokens, positions = np.zeros(TRIAL, np.int32), np.arange(TRIAL, dtype=np.int32)

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready(prefill(model, tokens, positions, hidden="last").hidden)
        return time.perf_counter() - began

    run()  # compiles
    return run() / prefill_cost(model.config, TRIAL).flops


def _by_times(item: Item, known: list[dict[str, Any]]) -> float:
    """Medians of what earlier samples took."""
    each = {key: [t["seconds"] for t in known if (t["method"], t["ratio"]) == key] for key in map(_key, item.methods)}
    usual = float(np.median([t["seconds"] for t in known]))
    shared = float(np.median([t["shared_seconds"] for t in known if t["shared_seconds"]] or [0.0]))
    return shared + sum(float(np.median(own)) if own else usual for own in each.values())


def _key(method: Method) -> tuple[str, float]:
    return method.name, method.ratio


def _flops(model: Model, item: Item) -> float:
    """Chunks and full prefill once; then the share of the context that each method runs, and query and answer.

    Servings that are timed (`ttft`) are not in it; rows that are there already have them in their seconds.
    """
    context, before, after = _sizes(item.prompt)
    whole = prefill_cost(model.config, before + context + after).flops
    answer = prefill_cost(model.config, after, past=before + context).flops
    encoding = sum(prefill_cost(model.config, len(chunk)).flops for chunk in item.prompt.chunks)
    new = item.task.new_tokens * prefill_cost(model.config, 1, past=before + context + after).flops
    fused = [0.0 if method.selector is None else method.ratio * whole for method in item.methods]  # full prefill ran
    return encoding + whole + sum(own + answer + new for own in fused)


def _sizes(prompt: Prompt) -> tuple[int, int, int]:
    """Tokens of chunks, prefix, and question with reference answer."""
    after = len(prompt.question.tokens) + len(prompt.reference)
    return sum(map(len, prompt.chunks)), len(prompt.prefix), after
