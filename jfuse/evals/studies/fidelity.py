"""How a method's cache and attention compare with full prefill, layer by layer; no labels are needed."""

from collections.abc import Iterable, Sequence

import numpy as np

from jfuse.evals.attention import attention_recovery, question_mass
from jfuse.evals.measure import DEFAULT, Case, Setting
from jfuse.evals.methods import Method
from jfuse.evals.prompts import Prompt
from jfuse.evals.studies.parts import Row
from jfuse.fuse import cache_error
from jfuse.models.decoder import Model


def layer_fidelity(
    model: Model, prompts: Iterable[Prompt], methods: Sequence[Method], *, setting: Setting = DEFAULT
) -> list[Row]:
    """Relative error of keys and values, and recovery of the question's attention, per method and layer.

    Returns:
        Rows `method`, `ratio`, `layer`, `error`, `recovery`, `n`, means over prompts.
    """
    fused = [method for method in methods if method.selector is not None]
    found: dict[Method, list[np.ndarray]] = {method: [] for method in fused}
    for prompt in prompts:
        case = Case(model, prompt, setting=setting)
        full = question_mass(model, case.full, prompt.question)
        for method in fused:
            cache = case.fuse(case.choose(method))
            mass = question_mass(model, cache, prompt.question)
            found[method].append(np.stack([cache_error(cache, case.full), attention_recovery(full, mass)]))
    return [
        {
            "method": method.name,
            "ratio": method.ratio,
            "layer": layer,
            "error": float(error),
            "recovery": float(recovery),
            "n": len(values),
        }
        for method, values in found.items()
        for layer, (error, recovery) in enumerate(np.mean(values, axis=0).T)
    ]
