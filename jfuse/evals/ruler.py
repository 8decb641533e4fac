"""Needle tasks: facts planted in real passages and asked for, as in RULER (Hsieh et al., 2024, section 3).

In go a task, a seed and a length; out comes a `Sample` whose answer spans are known exactly. The haystack is Wikipedia
text; every chunk is made of passages of its own. The same arguments give the same sample, in any process.

    single   one needle, asked for
    mk       several needles with different keys, one asked for
    mq       several needles with different keys, all asked for
    mv       several needles with one key and different values, all asked for
"""

import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import NamedTuple

from jfuse.evals.data import Passage, Sample, Span, read_passages, shipped

TASKS = ("single", "mk", "mq", "mv")

_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\]\"']{3}[.!?])\s+(?=[A-Z\"])")
_SEVEN_DIGITS = re.compile(r"(?=(\d{7}))")


class _Needle(NamedTuple):
    key: str
    value: str

    @property
    def text(self) -> str:
        return f"One of the special magic numbers for {self.key} is: {self.value}."


def needle_sample(
    task: str,
    seed: int,
    *,
    length: int = 2048,
    num_chunks: int = 8,
    num_needles: int = 4,
    encode: Callable[[str], Sized] | None = None,
    haystack: Sequence[Passage] | None = None,
) -> Sample:
    """Plants needles at sentence ends of a haystack that is cut into chunks of about equal length.

    Needles stand in different chunks as long as there are enough chunks, anywhere from a chunk's start to its end.

    Args:
        task: one of `TASKS`.
        length: what all chunks hold together, in tokens of `encode` or in words without it. It is never exceeded, and
            missed by less than a sentence.
        num_needles: how many needles `mk`, `mq` and `mv` plant; `single` plants one.
        encode: text to token ids.
        haystack: passages to hide needles in; by default those that come with jfuse.

    Raises:
        ValueError: an unknown task, a number below 1, a length that is too short for its chunks and needles, or longer
            than the haystack.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; use one of {', '.join(TASKS)}.")
    for name, value in (("length", length), ("num_chunks", num_chunks), ("num_needles", num_needles)):
        if value < 1:
            raise ValueError(f"{name} is {value}; use an integer >= 1.")
    if num_needles > len(_words()[0]):
        raise ValueError(f"num_needles is {num_needles}; there are keys for at most {len(_words()[0])}.")
    # A string seeds by its SHA-512, so neither the hash seed nor the process matters; each task has its own draws.
    rng = random.Random(f"jfuse needles {task} {seed}")
    passages = list(wiki_haystack() if haystack is None else haystack)
    rng.shuffle(passages)
    needles = _needles(task, 1 if task == "single" else num_needles, passages, rng)
    chunks, found = _chunks(_placed(needles, num_chunks, rng), passages, length, encode or str.split, rng)
    asked = [needles[0]] if task in ("single", "mk") else needles
    if task == "mv":
        asked = sorted(asked, key=lambda needle: found[needle])  # one key: the reading order is the natural order
    question, answer_prefix = _question(asked)
    return Sample(
        id=f"{task}-{length}-{seed}",
        task=task,
        instruction=_instruction(several=len(asked) > 1),
        example="",
        chunks=tuple(chunks),
        question=question,
        answer_prefix=answer_prefix,
        answers=tuple(needle.value for needle in asked),
        spans=tuple(sorted(found[needle] for needle in asked)),
        gold=tuple(sorted({found[needle].chunk for needle in asked})),
        scoring="all",
    )


@functools.cache
def wiki_haystack() -> tuple[Passage, ...]:
    """The Wikipedia paragraphs that come with jfuse (CC BY-SA 4.0, see the ATTRIBUTION.md beside them)."""
    return tuple(read_passages(shipped("wiki.jsonl")))


@functools.cache
def _words() -> tuple[list[str], list[str]]:
    words = json.loads(shipped("words.json").read_text(encoding="utf-8"))
    return words["adjectives"], words["nouns"]


def split_sentences(text: str) -> list[str]:
    """A passage's sentences, without the white space between them."""
    return _SENTENCE_END.split(text)


def _needles(task: str, count: int, passages: Sequence[Passage], rng: random.Random) -> list[_Needle]:
    """Needles of which no two share a word of their keys or a value, and whose values occur nowhere in the passages."""
    adjectives, nouns = _words()
    num_keys = 1 if task == "mv" else count
    words = zip(rng.sample(adjectives, num_keys), rng.sample(nouns, num_keys), strict=True)
    keys = [f"{adjective}-{noun}" for adjective, noun in words]
    taken = {number for passage in passages for number in _SEVEN_DIGITS.findall(passage.text)}
    draws = map(str, rng.sample(range(1_000_000, 10_000_000), count + len(taken)))
    values = [value for value in draws if value not in taken]
    return [_Needle(keys[index % num_keys], values[index]) for index in range(count)]


def _placed(needles: Sequence[_Needle], num_chunks: int, rng: random.Random) -> list[list[_Needle]]:
    """The needles of each chunk: no chunk gets its second before every chunk has one."""
    placed: list[list[_Needle]] = [[] for _ in range(num_chunks)]
    for first in range(0, len(needles), num_chunks):
        batch = needles[first : first + num_chunks]
        for chunk, needle in zip(rng.sample(range(num_chunks), len(batch)), batch, strict=True):
            placed[chunk].append(needle)
    return placed


def _chunks(
    placed: Sequence[Sequence[_Needle]],
    passages: Sequence[Passage],
    length: int,
    measure: Callable[[str], Sized],
    rng: random.Random,
) -> tuple[list[str], dict[_Needle, Span]]:
    """The text of each chunk, and where each needle's value stands."""
    haystack = iter(passages)
    texts, found, left = [], {}, length
    for index, needles in enumerate(placed):
        room = left // (len(placed) - index)  # what a chunk leaves over is shared by those after it
        depths = [rng.random() for _ in needles]
        text, starts = _filled(haystack, needles, depths, room, measure)
        for needle, start in zip(needles, starts, strict=True):
            start += needle.text.index(needle.value)
            found[needle] = Span(index, start, start + len(needle.value))
        texts.append(text)
        left -= len(measure(text))
    return texts, found


def _filled(
    haystack: Iterator[Passage],
    needles: Sequence[_Needle],
    depths: Sequence[float],
    room: int,
    measure: Callable[[str], Sized],
) -> tuple[str, list[int]]:
    """As many sentences of the next passages as fit, with the needles among them."""
    sentences: list[tuple[str, str]] = []
    filled = None
    for passage in haystack:
        for index, sentence in enumerate(split_sentences(passage.text.strip())):
            sentences.append(("\n\n" if index == 0 else " ", sentence))
            candidate = _planted(sentences, needles, depths)
            if len(measure(candidate[0])) > room:
                if filled is None:
                    raise ValueError(
                        f"A chunk has room for {room} tokens or words, too few for {len(needles)} needles and one "
                        "sentence; raise length, or lower num_chunks or num_needles."
                    )
                return filled
            filled = candidate
    raise ValueError("The haystack has too few passages for this length; lower length, or give a longer haystack.")


def _planted(
    sentences: Sequence[tuple[str, str]], needles: Sequence[_Needle], depths: Sequence[float]
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


def _instruction(*, several: bool) -> str:
    some, are, number = ("Some", "are", "numbers") if several else ("A", "is", "number")
    return (
        f"{some} special magic {number} {are} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {number} afterwards."
    )


def _question(asked: Sequence[_Needle]) -> tuple[str, str]:
    """The question, and the beginning of its answer."""
    keys = list(dict.fromkeys(needle.key for needle in asked))
    listed = " and ".join(keys) if len(keys) < 3 else ", ".join(keys[:-1]) + f", and {keys[-1]}"
    what, number, are = ("What are all", "numbers", "are") if len(asked) > 1 else ("What is", "number", "is")
    about = f"the special magic {number} for {listed} mentioned in the provided text"
    return f"{what} {about}?", f"The{about.removeprefix('the')} {are}"
