"""The tasks by name: needle tasks made on the spot, questions that ship with jfuse, and files of your own.

make_sample("mq", seed, length=1024, num_chunks=4, encode=tokenizer.encode)
read_task("hotpotqa")                     the shipped questions
read_task("longbench/musique.jsonl")      any format of `jfuse.evals.readers`
in_chunks(sample, tokenizer)              contexts in one piece are cut
"""

from collections.abc import Callable, Sized
from functools import partial
from pathlib import Path

from jfuse.evals.data import Sample, read_passages, read_samples, shipped
from jfuse.evals.quotes import quote_sample
from jfuse.evals.readers import read_file
from jfuse.evals.ruler import HAYSTACKS, needle_sample, tracking_sample
from jfuse.evals.ruler import TASKS as NEEDLE_TASKS
from jfuse.evals.shorten import cut_middle
from jfuse.evals.spans import split_chunks
from jfuse.models.tokenizer import Tokenizer

GENERATED = {
    "single": "one needle",
    "mk": "needles with several keys, one asked for",
    "mq": "needles with several keys, all asked for",
    "mv": "one key with several values, all asked for",
    "vt": "variables assigned to one another, those that hold a value asked for",
    "quote": "a sentence of a passage, to be completed",
}
SHIPPED = {
    "hotpotqa": "two-hop questions over 8 to 10 paragraphs",
    "squad": "questions over 8 passages, answers located",
}

CHUNK_TOKENS = 512
"""Chunk size of contexts that come in one piece, as in both papers."""


def make_sample(
    name: str,
    seed: int,
    *,
    length: int,
    num_chunks: int,
    encode: Callable[[str], Sized] | None = None,
    haystack: str | None = None,
) -> Sample:
    """A sample of one of the `GENERATED` tasks; equal arguments give equal samples.

    Args:
        length: context tokens of `encode`, or words without it.
        haystack: "essay", "noise" or "needle", or a file of passages; by default noise for `vt`, else essay.

    Raises:
        ValueError: an unknown task or an impossible length.
    """
    if name not in GENERATED:
        raise ValueError(f"There is no task {name!r} that is made on the spot; use one of {', '.join(GENERATED)}.")
    kind = haystack if haystack is None or haystack in HAYSTACKS else read_passages(haystack)
    if name == "vt":
        return tracking_sample(
            seed, length=length, num_chunks=num_chunks, encode=encode, haystack="noise" if kind is None else kind
        )
    if name in NEEDLE_TASKS:
        return needle_sample(name, seed, length=length, num_chunks=num_chunks, encode=encode, haystack=kind)
    if isinstance(kind, str) and kind != "essay":
        raise ValueError(f"haystack is {kind!r}, which cannot be quoted from; use essay, or a file of passages.")
    passages = None if isinstance(kind, str) else kind
    return quote_sample(seed, length=length, num_chunks=num_chunks, encode=encode, haystack=passages)


def read_task(name: str | Path, *, limit: int | None = None) -> list[Sample]:
    """The shipped questions of that name, or the samples of a file.

    Raises:
        ValueError: neither, or a malformed file by line.
    """
    if str(name) in SHIPPED:
        return read_samples(shipped(f"{name}.jsonl"), limit=limit)
    if not Path(name).is_file():
        raise ValueError(f"There is no task or file {str(name)!r}; use {', '.join(SHIPPED)}, or the path of a file.")
    return read_file(name, limit=limit)


def in_chunks(
    sample: Sample, tokenizer: Tokenizer, chunk_tokens: int | None = None, *, longest: int | None = None
) -> Sample:
    """The sample with chunks of at most `chunk_tokens` tokens, cut evenly.

    Args:
        chunk_tokens: by default passages stay as they are, and a context in one piece is cut at `CHUNK_TOKENS`.
        longest: first cut a prompt with more tokens in the middle.
    """
    if longest is not None:
        sample = cut_middle(sample, longest, tokenizer.offsets)
    size = chunk_tokens or (CHUNK_TOKENS if len(sample.chunks) == 1 else None)
    return sample if size is None else split_chunks(sample, partial(even_pieces, size=size, offsets=tokenizer.offsets))


def even_pieces(text: str, *, size: int, offsets: Callable[[str], list[tuple[int, int]]]) -> list[str]:
    """The text in the fewest pieces of at most `size` tokens, as even as that allows, cut at tokens' first characters.

    >>> even_pieces("abcdefg", size=3, offsets=lambda text: [(i, i + 1) for i in range(len(text))])
    ['ab', 'cd', 'efg']
    """
    starts = [start for start, _ in offsets(text)]
    count = max(1, -(-len(starts) // size))
    cuts = [starts[len(starts) * part // count] for part in range(1, count)]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
