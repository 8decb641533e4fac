"""Prompts that are too long: the middle is cut out, as LongBench does (Bai et al., 2023, section 4.1).

In go a `Sample` and a limit in tokens; out comes a `Sample` whose prompt keeps its first and its last half.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jfuse.evals.data import Sample, Span


def cut_middle(sample: Sample, longest: int, offsets: Callable[[str], Sequence[tuple[int, int]]]) -> Sample:
    """The sample with the middle of its context cut out, so that its prompt has at most `longest` tokens.

    Of the prompt's tokens, the first `longest // 2` and as many last ones stay. Spans that are cut are lost, and so are
    chunks of which nothing stays.

    Args:
        offsets: the characters `[start, end)` of each token of a text.

    Raises:
        ValueError: what stands before or after the chunks takes half of `longest` or more.
    """
    before, after = len(offsets(sample.prefix + sample.joints.prefix)), len(offsets(sample.query))
    tokens = [offsets(chunk + sample.joints.chunk) for chunk in sample.chunks]
    context = sum(map(len, tokens))
    if before + context + after <= longest:
        return sample
    if longest // 2 <= max(before, after):
        raise ValueError(
            f"longest is {longest}, but sample {sample.id} has {before} tokens before its chunks and {after} after "
            f"them; use more than {2 * max(before, after) + 1}."
        )
    first, last = longest // 2 - before, context + after - longest // 2  # context tokens [first, last) go
    chunks: list[str] = []
    spans: list[Span] = []
    gold: list[int] = []
    at = 0
    for index, (text, own) in enumerate(zip(sample.chunks, tokens, strict=True)):
        edges = [min(start, len(text)) for start, _ in own] + [len(text)]
        until, since = (edges[min(max(edge - at, 0), len(own))] for edge in (first, last))
        at += len(own)
        left = text[:until] + text[since:]
        if not left.strip():
            continue
        labelled = [span for span in sample.spans if span.chunk == index]
        kept = [_moved(span, len(chunks), since - until) for span in labelled if span.start >= since]
        kept += [_moved(span, len(chunks), 0) for span in labelled if span.end <= until and span.start < since]
        if kept or (index in sample.gold and not labelled):
            gold.append(len(chunks))
        spans += sorted(kept)
        chunks.append(left)
    return replace(sample, chunks=tuple(chunks), spans=tuple(spans), gold=tuple(gold))


def _moved(span: Span, chunk: int, by: int) -> Span:
    return Span(chunk, span.start - by, span.end - by)
