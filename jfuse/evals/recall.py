"""How well a score finds a labelled answer: the recall of its best positions."""

import numpy as np
from jaxtyping import Float, Int

from jfuse.config import budget


def recall_at(scores: Float[np.ndarray, " N"], evidence: Int[np.ndarray, " E"], share: float = 0.1) -> float:
    """Share of the evidence among the top floor(share * N) positions; ties go to the lower one (QCFuse eq. 13)."""
    top = np.argsort(-scores, kind="stable")[: budget("floor", share, len(scores))]
    return float(np.isin(evidence, top).mean())
