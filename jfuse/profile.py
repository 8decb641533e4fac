"""Which layers localise evidence: QCFuse's critical-layer profile, measured once per model on span-labelled questions.

In come samples whose answer spans are known; out comes the recall of every layer, and the few layers that a `qcfuse`
selector should score on. A profile belongs to one model, and says so.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jfuse.config import View
from jfuse.evals.measure import Case
from jfuse.evals.prompts import Prompt
from jfuse.evals.recall import recall_at as recall_at
from jfuse.fingerprint import Fingerprint
from jfuse.models.decoder import Model
from jfuse.selectors.score import query_attention
from jfuse.types import Evidence


class LayerProfile(NamedTuple):
    """How well each layer's question attention finds the answer (QCFuse eqs. 13, 18-20)."""

    model: str  # digest of the model that was profiled (`Fingerprint.model_digest`)
    recall: tuple[float, ...]  # Recall@10% per layer, mean over samples
    recall_of_top: tuple[float, ...]  # of the summed scores of the best 1, 2, ... layers
    num_samples: int
    num_dropped: int  # samples without a labelled token, or with fewer than 10 context tokens
    data: str = ""

    def critical_layers(self, k: int = 3) -> tuple[int, ...]:
        """The k layers of highest recall, 0-based, best first."""
        return critical_layers(self.recall, k)


def critical_layers(recall: Sequence[float], k: int = 3) -> tuple[int, ...]:
    """The k best layers, ties to the lower.

    Raises:
        ValueError: k outside 1..L.
    """
    if not 1 <= k <= len(recall):
        raise ValueError(f"k is {k}; use 1 to {len(recall)} layers.")
    return tuple(int(l) for l in np.argsort(-np.asarray(recall), kind="stable")[:k])


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


def save_profile(profile: LayerProfile, path: str | Path) -> None:
    """Writes a profile as JSON."""
    Path(path).write_text(json.dumps(profile._asdict(), indent=1) + "\n", encoding="utf-8")


def load_profile(model: Model, path: str | Path | None = None) -> LayerProfile:
    """The profile in a file, or the one that ships with jfuse for this model.

    Raises:
        ValueError: the file's profile is of another model; both fingerprints are named.
        LookupError: jfuse ships none for this model.
    """
    fingerprint = Fingerprint.of(model)
    own = fingerprint.model_digest
    if path is not None:
        try:
            found = _read(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        fingerprint.require_model(found.model)
        return found
    for entry in sorted((Path(__file__).parent / "data" / "profiles").glob("*.json")):
        found = _read(entry.read_text(encoding="utf-8"))
        if found.model == own:
            return found
    raise LookupError(
        f"Critical layers are needed, and jfuse ships no profile of this model ({own}). Measure one with "
        "`jfuse profile` and give its file as --profile, or name layers, counted from 0, with --layers."
    )


def _read(text: str) -> LayerProfile:
    """A profile from JSON.

    Raises:
        ValueError: anything else.
    """
    try:
        fields = json.loads(text)
        fields["recall"], fields["recall_of_top"] = tuple(fields["recall"]), tuple(fields["recall_of_top"])
        return LayerProfile(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"This is no layer profile ({error!r}); make one with `jfuse profile`.") from error
