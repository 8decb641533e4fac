"""Which layers localise evidence: QCFuse's critical-layer profile, kept in a file or shipped with jfuse.

It holds the recall of every layer, hence the few layers that a `qcfuse` selector should score on. A profile belongs to
one model, and says so. `evals.profiling` measures it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jfuse.fingerprint import Fingerprint
from jfuse.models.decoder import Model


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
