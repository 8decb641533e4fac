"""Measures a critical-layer profile, once per model, on span-labelled questions (QCFuse eqs. 12, 13, 18-20).

In come prompts whose answers' positions are known; out comes the recall of every layer, alone and summed.
"""

from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import Float

from jfuse.config import View
from jfuse.evals.measure import Case
from jfuse.evals.prompts import Prompt
from jfuse.evals.recall import recall_at
from jfuse.fingerprint import Fingerprint
from jfuse.models.decoder import Model
from jfuse.profile import LayerProfile, critical_layers
from jfuse.selectors.score import query_attention
from jfuse.types import Evidence


def profile_layers(
    model: Model, prompts: Iterable[Prompt], *, anchor_ratio: float = 0.1, num_top: int = 10, data: str = ""
) -> LayerProfile:
    """Profiles every layer with anchors fixed at the default rule; `prompts` may be a progress bar around a list.

    Raises:
        ValueError: no sample with a labelled token.
    """
    pairs, dropped = [], 0
    for prompt in prompts:
        if len(prompt.evidence) == 0 or sum(len(chunk) for chunk in prompt.chunks) < 10:
            dropped += 1
            continue
        pairs.append((_layer_scores(model, prompt, anchor_ratio), prompt.evidence))
    if not pairs:
        raise ValueError("No sample has a labelled answer token and 10 context tokens; profiling needs span labels.")
    layers = range(model.config.num_layers)
    recall = tuple(float(np.mean([recall_at(scores[l], found) for scores, found in pairs])) for l in layers)
    best = critical_layers(recall, min(num_top, len(recall)))
    of_top = tuple(
        float(np.mean([recall_at(scores[list(best[:k])].sum(0), found) for scores, found in pairs]))
        for k in range(1, len(best) + 1)
    )
    return LayerProfile(Fingerprint.of(model).model_digest, recall, of_top, len(pairs), dropped, data)


def _layer_scores(model: Model, prompt: Prompt, anchor_ratio: float) -> Float[np.ndarray, "L N"]:
    """Every layer's question attention over the context, the query probed over prefix and anchors."""
    evidence = probe_all_layers(model, prompt, anchor_ratio)
    scores = _score_all(evidence)
    return np.asarray(scores)[:, np.asarray(evidence.segments) >= 0]


_score_all = jax.jit(query_attention())


def probe_all_layers(model: Model, prompt: Prompt, anchor_ratio: float = 0.1) -> Evidence:
    """Evidence of all layers for one prompt, chunks encoded on the spot; the prefix may be empty."""
    return Case(model, prompt).evidence(View("anchors", None, anchor_ratio))
