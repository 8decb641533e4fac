"""Quoted facts: a sentence of one passage is quoted up to its middle, and its next words are asked for.

In go a seed and a length; out comes a `Sample` over real passages whose answer stands in one chunk, word for word.
Even a small model can answer these, if it can find the sentence.
"""

import random
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace

from jfuse.evals.data import Passage, Sample, Span
from jfuse.evals.ruler import needle_sample, split_sentences, wiki_haystack

NUM_CUE_WORDS = 8
NUM_ANSWER_WORDS = 4


def quote_sample(
    seed: int,
    *,
    length: int = 2048,
    num_chunks: int = 8,
    encode: Callable[[str], Sized] | None = None,
    haystack: Sequence[Passage] | None = None,
) -> Sample:
    """A quote to be continued; the same arguments give the same sample in any process.

    The passages are laid out as in the needle tasks, without needles.

    Args:
        length: what all chunks hold together, in tokens of `encode` or in words without it.
        haystack: passages to quote from; by default those that come with jfuse.

    Raises:
        ValueError: no sentence is long and singular enough, or an impossible length.
    """
    passages = wiki_haystack() if haystack is None else haystack
    base = needle_sample("single", seed, length=length, num_chunks=num_chunks, encode=encode, haystack=passages)
    # The needle of the layout is taken out again: this task asks for what the passages themselves say.
    chunks = tuple(_without_needle(text, base.answers[0]) for text in base.chunks)
    rng = random.Random(f"jfuse quotes {seed}")
    candidates = [
        (index, sentence)
        for index, text in enumerate(chunks)
        for paragraph in text.split("\n\n")
        for sentence in split_sentences(paragraph)
        if len(sentence.split(" ")) >= NUM_CUE_WORDS + NUM_ANSWER_WORDS + 1
    ]
    rng.shuffle(candidates)
    whole = "\n".join(chunks)
    for chunk, sentence in candidates:
        words = sentence.split(" ")
        cue = " ".join(words[:NUM_CUE_WORDS])
        answer = " ".join(words[NUM_CUE_WORDS : NUM_CUE_WORDS + NUM_ANSWER_WORDS])
        if whole.count(cue) == 1:
            start = chunks[chunk].index(sentence) + len(cue) + 1
            return replace(
                base,
                id=f"quote-{length}-{seed}",
                task="quote",
                instruction="Read the following passages. I will ask you to complete a sentence of one of them.",
                chunks=chunks,
                question="Complete the sentence exactly as it stands in the passages.",
                answer_prefix=cue,
                answers=(answer,),
                spans=(Span(chunk, start, start + len(answer)),),
                gold=(chunk,),
            )
    raise ValueError(f"The {len(passages)} passages hold no sentence that can be quoted; give longer ones.")


def _without_needle(text: str, value: str) -> str:
    """The chunk without the planted sentence, which ends in `value` and a full stop."""
    if value not in text:
        return text
    start = text.index("One of the special magic numbers for ")
    end = text.index(value) + len(value) + 1
    return (text[:start].rstrip(" ") + " " + text[end:].lstrip(" ")).strip(" ")
