"""RelaxKV's studies (2609.33503): the nominal ratio against what it realises, and controls for its parts.

On small models the restricted context costs quality unless rows keep their nearest neighbours, so every restricted
method is there with a window of 32 positions too.
"""

from collections.abc import Sequence

from jfuse.evals.settings import Entry, Settings, Task
from jfuse.evals.studies.parts import Part

TASKS = (Task("mq"), Task("mv"), Task("hotpotqa"), Task("squad"))
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3)
CAPACITIES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def ratio_sweep(
    ratios: Sequence[float] = RATIOS,
    *,
    tasks: Sequence[Task] = TASKS,
    limit: int = 12,
    model: str = "smollm2-135m",
    ttft: bool = False,
) -> list[Part]:
    """RelaxKV over r beside ProphetKV, whose nominal ratio is what it realises (section 4 and the appendix)."""
    methods = ("prophetkv", "relaxkv", "relaxkv:window=32", "relaxkv_full_prefix")
    return _part("ratio", [(method, ratios) for method in methods], tasks, limit, model, ttft)


def context_controls(
    ratio: float = 0.15,
    *,
    tasks: Sequence[Task] = TASKS,
    limit: int = 12,
    model: str = "smollm2-135m",
    ttft: bool = True,
) -> list[Part]:
    """Where the context's positions come from, at equal counts, and the whole prefix instead (Tables 3 and 5)."""
    methods = [
        name + window
        for window in ("", ":window=32")
        for name in ("relaxkv", "global_sparse", "layerwise_sparse", "relaxkv_g")
    ]
    return _part("context", [(name, (ratio,)) for name in (*methods, "relaxkv_full_prefix")], tasks, limit, model, ttft)


def target_capacity(
    capacities: Sequence[float] = CAPACITIES,
    *,
    tasks: Sequence[Task] = TASKS,
    limit: int = 12,
    model: str = "smollm2-135m",
    ttft: bool = True,
    window: int = 32,
) -> list[Part]:
    """One target set for all layers, from few positions up to as many as the union has (Tables 7 and 8)."""
    methods = [(f"target_capacity:window={window}", tuple(capacities)), (f"target_union:window={window}", (0.2,))]
    return _part("capacity", methods, tasks, limit, model, ttft)


def _part(
    label: str,
    methods: Sequence[tuple[str, Sequence[float]]],
    tasks: Sequence[Task],
    limit: int,
    model: str,
    ttft: bool,
) -> list[Part]:
    entries = tuple(Entry(name, tuple(ratios)) for name, ratios in methods)
    return [Part(label, Settings((model,), tuple(tasks), entries, limit, ttft=ttft))]
