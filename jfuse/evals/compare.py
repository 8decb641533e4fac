"""Judges two runs of one request by their logits, so that rounding is told from error.

In low precision, and wherever sums are taken in another order, two right runs differ a little; where two tokens
nearly tie, that little flips the greedy choice. A flip is a fault only if the reference was sure of its own choice.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jfuse.types import AnyArray

BANDS = {"float32": 1e-3, "bfloat16": 0.25}
"""How far a logit may drift between two right runs, as a share of the standard deviation of its step's logits."""


class Comparison(NamedTuple):
    """The outcome of a comparison up to the first token that differs; after it, the runs answer different texts."""

    verdict: Literal["same", "tie", "different"]
    step: int | None  # the first step at which the choices differ
    margin: float  # by how much the reference preferred its own choice there; infinite if there is none
    drift: float  # largest difference of a logit up to there


def compare(
    reference: Float[AnyArray, "M V"], other: Float[AnyArray, "M V"], *, band: float = BANDS["float32"]
) -> Comparison:
    """Compares greedy choices step by step.

    A flip is a "tie" if drifts within the band explain it: each of the two logits may move by `band`, so the margin
    may be up to twice that. Larger margins, and drifts beyond the band without any flip, are "different".

    Args:
        band: allowed drift of a logit, as a share of the standard deviation of the reference's logits at its step.

    Raises:
        ValueError: logits of different shapes or without any step, or a band that is not positive.
    """
    reference, other = np.asarray(reference, np.float64), np.asarray(other, np.float64)
    if reference.shape != other.shape or not reference.size:
        raise ValueError(f"The logits have shapes {reference.shape} and {other.shape}; give equal ones, [steps, V].")
    if not band > 0:
        raise ValueError(f"band is {band}; use a positive share, such as those of BANDS.")
    ours, theirs = reference.argmax(-1), other.argmax(-1)
    flips = np.flatnonzero(ours != theirs)
    step = int(flips[0]) if flips.size else None
    seen = slice(0, len(reference) if step is None else step + 1)
    drifts = np.abs(reference[seen] - other[seen]).max(-1)
    allowed = band * reference[seen].std(-1)
    margin = float("inf") if step is None else float(reference[step, ours[step]] - reference[step, theirs[step]])
    if not (drifts <= allowed).all():  # NaN included
        verdict = "different"
    else:
        verdict = "same" if step is None else "tie"
    return Comparison(verdict, step, margin, float(drifts.max()))
