"""Quality against time to first token, by method and ratio (QCFuse section 4.2, Figs. 10 and 11)."""

from collections.abc import Sequence

from jfuse.evals.settings import Entry, Settings, Task
from jfuse.evals.studies.parts import Part

METHODS = ("epic", "cacheblend", "fusionrag", "prophetkv", "qcfuse")
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)


def tradeoff(
    tasks: Sequence[Task] = (Task("mq"), Task("mv"), Task("hotpotqa"), Task("squad")),
    *,
    methods: Sequence[str] = METHODS,
    ratios: Sequence[float] = RATIOS,
    limit: int = 10,
    model: str = "smollm2-135m",
) -> list[Part]:
    """One part: every method at every ratio, quality and cache-ready time from the same run."""
    entries = tuple(Entry(method, tuple(ratios)) for method in methods)
    return [Part("all", Settings((model,), tuple(tasks), entries, limit, ttft=True))]
