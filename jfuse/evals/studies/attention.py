"""How few tokens a question attends to, and which layers agree on them (QCFuse section 2.3, Fig. 5)."""

from collections.abc import Iterable, Sequence

import numpy as np

from jfuse.evals.attention import layer_overlap, mass_curve, question_mass
from jfuse.evals.measure import DEFAULT, Case, Setting
from jfuse.evals.prompts import Prompt
from jfuse.evals.studies.parts import Row
from jfuse.models.decoder import Model

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def concentration(
    model: Model, prompts: Iterable[Prompt], *, shares: Sequence[float] = SHARES, setting: Setting = DEFAULT
) -> tuple[list[Row], list[Row]]:
    """The cumulative mass of the ranked context tokens, and each layer's overlap with the ranking of all layers.

    The question runs over the stitched cache, as selectors with a full view see it. Means over prompts.

    Returns:
        Rows `share`, `mass`, `mass_se` and rows `layer`, `overlap`, `overlap_se`.
    """
    curves, overlaps = [], []
    for prompt in prompts:
        case = Case(model, prompt, setting=setting)
        mass = question_mass(model, case.stale, prompt.question)
        curves.append(mass_curve(mass.sum(0), np.asarray(shares)))
        overlaps.append(layer_overlap(mass))
    return (
        _rows("share", shares, "mass", np.array(curves)),
        _rows("layer", range(model.config.num_layers), "overlap", np.array(overlaps)),
    )


def _rows(key: str, keys: Iterable[float | int], name: str, values: np.ndarray) -> list[Row]:
    error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros(values.shape[1])
    means = values.mean(0)
    return [
        {key: at, name: float(means[i]), f"{name}_se": float(error[i]), "n": len(values)} for i, at in enumerate(keys)
    ]
