"""Plants sentences in a haystack that is cut into chunks, and remembers where what they say stands.

In go needles, passages and a length; out come the chunks' texts and a `Span` for every needle's value.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import NamedTuple

from jfuse.evals.data import Passage, Span

MOST_PASSED_OVER = 20
"""Passages in a row that may be too long for a chunk before it is taken to be too small."""

_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\]\"']{3}[.!?])\s+(?=[A-Z\"])")


class Needle(NamedTuple):
    """A sentence to plant."""

    key: str
    value: str  # what is asked for; it stands in the text
    text: str


def split_sentences(text: str) -> list[str]:
    """A passage's sentences, without the white space between them."""
    return _SENTENCE_END.split(text)


def spread(num_needles: int, num_chunks: int, rng: random.Random) -> list[int]:
    """The chunk of each needle: no chunk gets its second before every chunk has one."""
    chunks = []
    for first in range(0, num_needles, num_chunks):
        chunks += rng.sample(range(num_chunks), min(num_chunks, num_needles - first))
    return chunks


def plant(
    placed: Sequence[Sequence[Needle]],
    haystack: Iterable[Passage],
    length: int,
    measure: Callable[[str], Sized],
    rng: random.Random,
    *,
    in_order: bool = False,
) -> tuple[list[str], dict[Needle, Span]]:
    """The text of each chunk, and where each needle's value stands.

    Args:
        placed: the needles of each chunk.
        haystack: passages; each is used in one chunk only.
        length: what all chunks hold together, by `measure`.
        in_order: the needles of a chunk stand in the order given.

    Raises:
        ValueError: too little room, or too few passages.
    """
    passages = iter(haystack)
    texts, found, left = [], {}, length
    for index, needles in enumerate(placed):
        room = left // (len(placed) - index)  # what a chunk leaves over is shared by those after it
        depths = [rng.random() for _ in needles]
        text, starts = _filled(passages, needles, sorted(depths) if in_order else depths, room, measure)
        for needle, start in zip(needles, starts, strict=True):
            start += needle.text.index(needle.value)
            found[needle] = Span(index, start, start + len(needle.value))
        texts.append(text)
        left -= len(measure(text))
    return texts, found


def _filled(
    haystack: Iterator[Passage],
    needles: Sequence[Needle],
    depths: Sequence[float],
    room: int,
    measure: Callable[[str], Sized],
) -> tuple[str, list[int]]:
    """As many sentences of the next passages as fit, with the needles among them.

    A passage whose first sentence alone is too long for the chunk is passed over.
    """
    sentences: list[tuple[str, str]] = []
    filled, passed_over = None, 0
    for passage in haystack:
        for index, sentence in enumerate(split_sentences(passage.text.strip())):
            sentences.append(("\n\n" if index == 0 else " ", sentence))
            candidate = _planted(sentences, needles, depths)
            if len(measure(candidate[0])) > room:
                if filled is None and passed_over < MOST_PASSED_OVER:
                    passed_over += 1
                    sentences.clear()
                    break
                if filled is None:
                    raise ValueError(
                        f"A chunk has room for {room} tokens or words, too few for {len(needles)} needles and one "
                        "sentence; raise length, or lower num_chunks or num_needles."
                    )
                return filled
            filled = candidate
    raise ValueError("The haystack has too few passages for this length; lower length, or give a longer haystack.")


def _planted(
    sentences: Sequence[tuple[str, str]], needles: Sequence[Needle], depths: Sequence[float]
) -> tuple[str, list[int]]:
    """A chunk's text, and where each needle starts in it; depth 0 is before the first sentence, 1 after the last."""
    slots = [int(depth * (len(sentences) + 1)) for depth in depths]
    text, starts = "", [0] * len(needles)
    for slot in range(len(sentences) + 1):
        for index, needle in enumerate(needles):
            if slots[index] == slot:
                text += " " if text else ""
                starts[index] = len(text)
                text += needle.text
        if slot < len(sentences):
            separator, sentence = sentences[slot]
            text += (separator if text else "") + sentence
    return text, starts
