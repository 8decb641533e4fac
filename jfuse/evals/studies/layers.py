"""Which layers find the answer, alone and together (QCFuse section 3.3, Figs. 7 and 8)."""

from jfuse.evals.studies.parts import Row
from jfuse.profile import LayerProfile


def layer_rows(profile: LayerProfile) -> tuple[list[Row], list[Row]]:
    """A profile as rows `layer`, `recall`, `rank` (1 is best) and rows `k`, `recall` of the best k layers together."""
    order = profile.critical_layers(len(profile.recall))
    single = [
        {"layer": layer, "recall": recall, "rank": order.index(layer) + 1, "n": profile.num_samples}
        for layer, recall in enumerate(profile.recall)
    ]
    together = [
        {"k": k, "recall": recall, "n": profile.num_samples} for k, recall in enumerate(profile.recall_of_top, start=1)
    ]
    return single, together
