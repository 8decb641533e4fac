"""FusionRAG (2601.12904): the question alone, scored against the last layer's keys. Its online selection only."""

from typing import Literal, get_args

from jfuse.config import View, check_choice
from jfuse.selectors.base import Selector
from jfuse.selectors.made_once import made_once
from jfuse.selectors.score import query_attention

Preset = Literal["paper", "qcfuse"]


@made_once
def fusionrag(preset: Preset = "paper") -> Selector:
    """FusionRAG's query-guided selection; its offline preprocessing of chunks is not part of it.

    "paper": the question sees nothing but itself; one softmax over all chunks' keys, added up over heads and rows.
    The paper does not write the normalisation out, and scores chunks at their stored positions; here the joint
    softmax makes chunks comparable, and all stands at request positions. "qcfuse": as QCFuse's authors run it as a
    baseline, the question over the system prefix and the softmax over everything.

    Raises:
        ValueError: an unknown preset.
    """
    check_choice("preset", preset, get_args(Preset))
    if preset == "paper":
        view, score = View("query", (-1,)), query_attention(denominator="context")
        return Selector(view, score, ratio=0.15, name="fusionrag", source="2601.12904, online selection")
    view, score = View("prefix", (-1,)), query_attention(denominator="all")
    return Selector(view, score, ratio=0.15, name="fusionrag_qcfuse", source="2601.12904 as run by 2606.05875")
