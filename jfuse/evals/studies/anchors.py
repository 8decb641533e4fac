"""How well the question finds the answer when it sees anchors only, by anchor rule and ratio (QCFuse Fig. 6)."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jfuse.anchors import by_name
from jfuse.config import View
from jfuse.evals.measure import DEFAULT, Case, Setting
from jfuse.evals.prompts import Prompt
from jfuse.evals.recall import recall_at
from jfuse.evals.studies.parts import Row
from jfuse.models.decoder import Model
from jfuse.selectors.score import query_attention

RULES = ("sink", "knorm", "h2o", "kvzip")
RATIOS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)


def anchor_recall(
    model: Model,
    prompts: Iterable[Prompt],
    *,
    rules: Sequence[str] = RULES,
    ratios: Sequence[float] = RATIOS,
    layers: Sequence[int] | None = None,
    setting: Setting = DEFAULT,
) -> list[Row]:
    """Recall@10% of the labelled answer for every anchor rule and ratio; 0 is the prefix alone, 1 the whole context.

    Args:
        layers: scored layers; all by default, as in the paper's figure.

    Returns:
        Rows `rule`, `anchor_ratio`, `recall`, `recall_se`, `n`.

    Raises:
        ValueError: no prompt has a labelled answer, or an unknown rule.
    """
    found: dict[tuple[str, float], list[float]] = {}
    chosen = {rule: by_name(rule, model) for rule in rules}
    for prompt in prompts:
        if not len(prompt.evidence):
            continue
        for name, rule in chosen.items():
            case = Case(model, prompt, anchor_rule=rule, setting=setting)
            for ratio in ratios:
                view = View("anchors", None if layers is None else tuple(layers), ratio)
                scores = np.asarray(_score(case.evidence(view))).sum(0)[np.asarray(case.stale.segments) >= 0]
                found.setdefault((name, ratio), []).append(recall_at(scores, prompt.evidence))
    if not found:
        raise ValueError("No prompt has a labelled answer; recall needs one. Use squad, or needle tasks.")
    return [
        {
            "rule": rule,
            "anchor_ratio": ratio,
            "recall": float(np.mean(values)),
            "recall_se": float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0,
            "n": len(values),
        }
        for (rule, ratio), values in found.items()
    ]


_score = jax.jit(query_attention())
