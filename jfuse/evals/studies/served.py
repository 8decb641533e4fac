"""One request of a timing study: chunks encoded and in memory, ready to be served again and again."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jfuse.anchors import AnchorRule
from jfuse.chunks import encode_chunk
from jfuse.models.decoder import Model
from jfuse.pipeline import Question, encode_prefix
from jfuse.sources import ResidentChunks
from jfuse.stitch import Layout, make_layout, prefix_tokens
from jfuse.types import ContextCache


class Request(NamedTuple):
    """What serving wants, and the layout that full prefill wants."""

    model: Model
    resident: ResidentChunks
    prefix: ContextCache | None
    layout: Layout
    question: Question
    pad_to: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunks' caches."""
        itemsize = np.dtype(self.model.dtype).itemsize
        return sum(map(len, self.resident.tokens)) * self.model.config.kv_bytes_per_token(itemsize)


def make_request(
    model: Model,
    pieces: Sequence[Int[np.ndarray, " _"]],
    question: Question,
    *,
    prefix: Int[np.ndarray, " P"] | None = None,
    anchor_rule: AnchorRule | None = None,
    pad_to: int = 512,
) -> Request:
    """Encodes chunks and system prefix, given as token ids."""
    head = None if prefix is None or not len(prefix) else encode_prefix(model, prefix)
    chunks = [encode_chunk(model, tokens, anchor_rule=anchor_rule) for tokens in pieces]
    layout = make_layout(pieces, prefix_tokens(head), pad_to=pad_to)
    return Request(model, ResidentChunks(chunks), head, layout, question, pad_to)
