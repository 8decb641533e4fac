"""Where the answers of a sample stand: spans of characters carried to smaller chunks, and to token positions.

In go a `Sample` and a cut or the characters of each token; out come a `Sample` over smaller chunks, or positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from jfuse.evals.data import Sample, Span


def split_chunks(sample: Sample, split: Callable[[str], Sequence[str]]) -> Sample:
    """The same sample over smaller chunks. A span across a cut becomes one span in each piece.

    Args:
        split: cuts a text into pieces that join to it again, for example after every 512th token.

    Raises:
        ValueError: the pieces of a chunk do not join to its text.
    """
    chunks, spans, gold = [], [], []
    for index, text in enumerate(sample.chunks):
        pieces = [piece for piece in split(text) if piece]
        if "".join(pieces) != text:
            raise ValueError(f"The pieces of chunk {index} of sample {sample.id} do not join to its text.")
        start = 0
        for piece in pieces:
            end = start + len(piece)
            inside = [
                Span(len(chunks), max(span.start, start) - start, min(span.end, end) - start)
                for span in sample.spans
                if span.chunk == index and span.start < end and start < span.end
            ]
            labelled = any(span.chunk == index for span in sample.spans)
            if inside or (index in sample.gold and not labelled):
                gold.append(len(chunks))
            spans += inside
            chunks.append(piece)
            start = end
    return replace(sample, chunks=tuple(chunks), spans=tuple(spans), gold=tuple(gold))


def span_tokens(sample: Sample, offsets: Sequence[Sequence[tuple[int, int]]]) -> Int[np.ndarray, " E"]:
    """Context positions of the tokens that hold the sample's answers, ascending, each once.

    A token counts if its characters and a span intersect, so that a token cut by a span's edge is in and tokens without
    characters (special tokens) are out. Position 0 is the first token of the first chunk: the prefix is not counted.

    Args:
        offsets: for each chunk, the characters `[start, end)` of each of its tokens.

    Raises:
        ValueError: not one list of offsets a chunk.
    """
    if len(offsets) != len(sample.chunks):
        raise ValueError(f"offsets are given for {len(offsets)} chunks, but {sample.id} has {len(sample.chunks)}.")
    first = np.cumsum([0, *(len(chunk) for chunk in offsets)])
    found = {
        int(first[span.chunk]) + position
        for span in sample.spans
        for position, (start, end) in enumerate(offsets[span.chunk])
        if max(start, span.start) < min(end, span.end)
    }
    return np.array(sorted(found), np.int32)
