"""Needle tasks: facts planted in a haystack and asked for, as in RULER (Hsieh et al., 2024, section 3).

In go a task, a seed and a length; out comes a `Sample` whose answer spans are known exactly. The same arguments give
the same sample, in any process.

    single   one needle, asked for
    mk       several needles with different keys, one asked for
    mq       several needles with different keys, all asked for
    mv       several needles with one key and different values, all asked for
    vt       variables assigned to one another, all those that hold one value asked for (`tracking_sample`)

The haystack is text about other things ("essay": Wikipedia paragraphs, or passages of your own), the same five
sentences over and over ("noise"), or needles that nobody asks for ("needle"), which is the hardest.
"""

import functools
import itertools
import json
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

from jfuse.evals.data import Passage, Sample, read_passages, shipped
from jfuse.evals.planting import Needle, plant, spread
from jfuse.evals.planting import split_sentences as split_sentences

TASKS = ("single", "mk", "mq", "mv")
Haystack = Sequence[Passage] | str
HAYSTACKS = ("essay", "noise", "needle")

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_SEVEN_DIGITS = re.compile(r"(?=(\d{7}))")


def needle_sample(
    task: str,
    seed: int,
    *,
    length: int = 2048,
    num_chunks: int = 8,
    num_needles: int = 4,
    encode: Callable[[str], Sized] | None = None,
    haystack: Haystack | None = None,
) -> Sample:
    """Plants needles at sentence ends of a haystack that is cut into chunks of about equal length.

    Needles stand in different chunks as long as there are enough chunks, anywhere from a chunk's start to its end.

    Args:
        task: one of `TASKS`.
        length: what all chunks hold together, in tokens of `encode` or in words without it. It is never exceeded, and
            missed by less than a sentence.
        num_needles: how many needles `mk`, `mq` and `mv` plant; `single` plants one.
        encode: text to token ids.
        haystack: passages to hide needles in, or a kind of haystack; by default the passages that come with jfuse.

    Raises:
        ValueError: an unknown task, a number below 1, a length that is too short for its chunks and needles, or longer
            than the haystack.
    """
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; use one of {', '.join(TASKS)}.")
    _check(length=length, num_chunks=num_chunks, num_needles=num_needles)
    if num_needles > len(_words()[0]):
        raise ValueError(f"num_needles is {num_needles}; there are keys for at most {len(_words()[0])}.")
    # A string seeds by its SHA-512, so neither the hash seed nor the process matters; each task has its own draws.
    rng = random.Random(f"jfuse needles {task} {seed}")
    kind, passages = _haystack(haystack)
    rng.shuffle(passages)
    needles = _needles(task, 1 if task == "single" else num_needles, passages, rng)
    placed: list[list[Needle]] = [[] for _ in range(num_chunks)]
    for chunk, needle in zip(spread(len(needles), num_chunks, rng), needles, strict=True):
        placed[chunk].append(needle)
    filling = _filling(kind, passages, needles, f"jfuse distractors {task} {seed}")
    chunks, found = plant(placed, filling, length, encode or str.split, rng)
    asked = [needles[0]] if task in ("single", "mk") else needles
    if task == "mv":
        asked = sorted(asked, key=lambda needle: found[needle])  # one key: the reading order is the natural order
    question, answer_prefix = _question(asked)
    return Sample(
        id=f"{task}-{length}-{seed}" if kind == "essay" else f"{task}-{kind}-{length}-{seed}",
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
        max_new_tokens=16 * (len(asked) + 1),  # a number may be seven tokens, and as much goes between numbers
    )


def tracking_sample(
    seed: int,
    *,
    length: int = 2048,
    num_chunks: int = 8,
    num_chains: int = 1,
    num_hops: int = 4,
    encode: Callable[[str], Sized] | None = None,
    haystack: Haystack = "noise",
) -> Sample:
    """Variable tracking: chains of assignments in reading order, and a worked example in front, as in RULER.

    Args:
        num_chains: how many chains; the variables of the first are asked for.
        num_hops: assignments from variable to variable in a chain, which then has one variable more.

    Raises:
        ValueError: a number below 1, or an impossible length.
    """
    _check(length=length, num_chunks=num_chunks, num_chains=num_chains, num_hops=num_hops)
    rng = random.Random(f"jfuse tracking {seed}")
    kind, passages = _haystack(haystack)
    rng.shuffle(passages)
    chains = _chains(num_chains, num_hops, 5, rng)
    placed: list[list[Needle]] = [[] for _ in range(num_chunks)]
    for chain in chains:
        for chunk, needle in zip(sorted(spread(len(chain), num_chunks, rng)), chain, strict=True):
            placed[chunk].append(needle)
    filling = _filling(kind, passages, [], f"jfuse tracking distractors {seed}")
    chunks, found = plant(placed, filling, length, encode or str.split, rng, in_order=True)
    instruction, question, answer_prefix = _tracking_texts(chains[0])
    return Sample(
        id=f"vt-{length}-{seed}" if kind == "noise" else f"vt-{kind}-{length}-{seed}",
        task="vt",
        instruction=instruction,
        example=_tracking_example(num_hops, rng),
        chunks=tuple(chunks),
        question=question,
        answer_prefix=answer_prefix,
        answers=tuple(needle.value for needle in chains[0]),
        spans=tuple(sorted(found[needle] for needle in chains[0])),
        gold=tuple(sorted({found[needle].chunk for needle in chains[0]})),
        scoring="all",
        max_new_tokens=8 * (num_hops + 1),
    )


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; use an integer >= 1.")


@functools.cache
def wiki_haystack() -> tuple[Passage, ...]:
    """The Wikipedia paragraphs that come with jfuse (CC BY-SA 4.0, see the ATTRIBUTION.md beside them)."""
    return tuple(read_passages(shipped("wiki.jsonl")))


@functools.cache
def _words() -> tuple[list[str], list[str]]:
    words = json.loads(shipped("words.json").read_text(encoding="utf-8"))
    return words["adjectives"], words["nouns"]


def _haystack(haystack: Haystack | None) -> tuple[str, list[Passage]]:
    """Kind and passages."""
    if haystack is None or haystack == "essay":
        return "essay", list(wiki_haystack())
    if isinstance(haystack, str):
        if haystack not in HAYSTACKS:
            raise ValueError(f"haystack is {haystack!r}; use {', '.join(HAYSTACKS)}, or a list of passages.")
        return haystack, []
    return "essay", list(haystack)


def _filling(kind: str, passages: list[Passage], needles: Sequence[Needle], seed: str) -> Iterable[Passage]:
    if kind == "noise":
        return itertools.repeat(Passage("noise", "", NOISE))
    return _distractors(needles, random.Random(seed)) if kind == "needle" else passages


def _distractors(needles: Sequence[Needle], rng: random.Random) -> Iterator[Passage]:
    """Needles whose keys and values are none of those asked for, and differ from one another."""
    adjectives, nouns = _words()
    taken = {text for needle in needles for text in (needle.key, needle.value)}
    while True:
        key, value = f"{rng.choice(adjectives)}-{rng.choice(nouns)}", str(rng.randrange(1_000_000, 10_000_000))
        if not taken & {key, value}:
            taken |= {key, value}
            yield Passage(key, "", _number(key, value).text)


def _number(key: str, value: str) -> Needle:
    return Needle(key, value, f"One of the special magic numbers for {key} is: {value}.")


def _needles(task: str, count: int, passages: Sequence[Passage], rng: random.Random) -> list[Needle]:
    """Needles of which no two share a word of their keys or a value, and whose values occur nowhere in the passages."""
    adjectives, nouns = _words()
    num_keys = 1 if task == "mv" else count
    words = zip(rng.sample(adjectives, num_keys), rng.sample(nouns, num_keys), strict=True)
    keys = [f"{adjective}-{noun}" for adjective, noun in words]
    taken = {number for passage in passages for number in _SEVEN_DIGITS.findall(passage.text)}
    draws = map(str, rng.sample(range(1_000_000, 10_000_000), count + len(taken)))
    values = [value for value in draws if value not in taken]
    return [_number(keys[index % num_keys], values[index]) for index in range(count)]


def _chains(num_chains: int, num_hops: int, num_letters: int, rng: random.Random) -> list[list[Needle]]:
    """Chains of assignments; a needle's key is the number at its chain's start, its value the variable's name."""
    names: dict[str, None] = {}
    while len(names) < num_chains * (num_hops + 1):
        names["".join(rng.choices(string.ascii_uppercase, k=num_letters))] = None
    numbers = rng.sample(range(10_000, 100_000), num_chains)
    chains, drawn = [], iter(names)
    for number in numbers:
        sources = [str(number)]
        chain = []
        for name in itertools.islice(drawn, num_hops + 1):
            chain.append(Needle(str(number), name, f"VAR {name} = {sources[-1]}."))
            sources.append(f"VAR {name}")
        chains.append(chain)
    return chains


def _tracking_texts(chain: Sequence[Needle]) -> tuple[str, str, str]:
    """Instruction, question, and the beginning of the answer."""
    number = chain[0].key
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.",
        f"Question: Find all variables that are assigned the value {number} in the text above.",
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(chain)} variables are assigned the value {number}, they are:",
    )


def _tracking_example(num_hops: int, rng: random.Random) -> str:
    """A short task of the same kind with its answer; its names have three letters."""
    (chain,) = _chains(1, num_hops, 3, rng)
    instruction, question, answer_prefix = _tracking_texts(chain)
    lines = "\n".join(f"{NOISE}\n{needle.text}" for needle in chain)
    answer = ", ".join(needle.value for needle in chain)
    return f"{instruction}\n\n{lines}\n\n{question} {answer_prefix} {answer}\n\n"


def _instruction(*, several: bool) -> str:
    some, are, number = ("Some", "are", "numbers") if several else ("A", "is", "number")
    return (
        f"{some} special magic {number} {are} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {number} afterwards."
    )


def _question(asked: Sequence[Needle]) -> tuple[str, str]:
    """The question, and the beginning of its answer."""
    keys = list(dict.fromkeys(needle.key for needle in asked))
    listed = " and ".join(keys) if len(keys) < 3 else ", ".join(keys[:-1]) + f", and {keys[-1]}"
    what, number, are = ("What are all", "numbers", "are") if len(asked) > 1 else ("What is", "number", "is")
    about = f"the special magic {number} for {listed} mentioned in the provided text"
    return f"{what} {about}?", f"The{about.removeprefix('the')} {are}"
