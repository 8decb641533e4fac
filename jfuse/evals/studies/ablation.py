"""What QCFuse owes to its anchors and its layers (QCFuse section 4.6, Figs. 15 and 16)."""

from collections.abc import Sequence

from jfuse.evals.settings import Entry, Settings, Task
from jfuse.evals.studies.parts import Part
from jfuse.selectors.qcfuse import qcfuse

TASKS = (Task("mq"), Task("mv"), Task("hotpotqa"), Task("squad"))


def anchor_ratios(
    shares: Sequence[float] = (0.0, 0.1, 1.0),
    *,
    tasks: Sequence[Task] = TASKS,
    ratio: float = 0.3,
    limit: int = 12,
    model: str = "smollm2-135m",
) -> list[Part]:
    """QCFuse with anchors of each share of a chunk: 0 is the query over the prefix alone, 1 over all that is stale."""
    entries = tuple(Entry(f"qcfuse:anchor_ratio={share:g}", (ratio,)) for share in shares)
    return [Part("anchor-ratios", Settings((model,), tuple(tasks), entries, limit))]


def scored_layers(
    critical: Sequence[int],
    num_layers: int,
    *,
    tasks: Sequence[Task] = TASKS,
    ratio: float = 0.3,
    limit: int = 12,
    model: str = "smollm2-135m",
) -> list[Part]:
    """QCFuse scored on other layers: the first, middle and final ones, the best, the critical ones, and all.

    Raises:
        ValueError: no critical layers, or fewer layers than critical ones.
    """
    count = len(critical)
    if not 1 <= count <= num_layers:
        raise ValueError(f"critical names {count} layers; use 1 to {num_layers}, the model's layers.")
    middle = (num_layers - count) // 2
    choices = {
        f"first {count}": range(count),
        f"middle {count}": range(middle, middle + count),
        f"final {count}": range(num_layers - count, num_layers),
        "best 1": critical[:1],
        f"best {count}": critical,
        "all": range(num_layers),
    }
    selectors = {f"qcfuse, {name}": qcfuse(tuple(layers)) for name, layers in choices.items()}
    entries = tuple(Entry(name, (ratio,)) for name in selectors)
    return [Part("layers", Settings((model,), tuple(tasks), entries, limit, layers=tuple(critical)), {}, selectors)]
