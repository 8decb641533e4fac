"""Requests of a given size from the shipped passages and questions, for measurements of time."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jfuse.evals.data import read_samples, shipped
from jfuse.evals.ruler import wiki_haystack
from jfuse.models.tokenizer import Tokenizer
from jfuse.pipeline import Question


class TextRequest(NamedTuple):
    """Chunks and question of a request."""

    pieces: list[Int32[np.ndarray, " _"]]
    question: Question


def request_of(
    tokenizer: Tokenizer, *, chunks: int = 8, chunk_tokens: int = 512, query_tokens: int = 64
) -> TextRequest:
    """A request of this size.

    Raises:
        ValueError: a size below 1, or more query tokens than there are.
    """
    if chunks < 1 or chunk_tokens < 1:
        raise ValueError(f"chunks is {chunks} and chunk_tokens {chunk_tokens}; use integers >= 1.")
    text = passage_tokens(tokenizer, chunks * chunk_tokens)
    pieces = [text[start : start + chunk_tokens] for start in range(0, len(text), chunk_tokens)]
    return TextRequest(pieces, Question(question_tokens(tokenizer, query_tokens)))


def passage_tokens(tokenizer: Tokenizer, count: int) -> Int32[np.ndarray, " T"]:
    """The first `count` tokens of the shipped Wikipedia passages, which come round again if they are too few.

    Raises:
        ValueError: a count below 1.
    """
    if count < 1:
        raise ValueError(f"count is {count}; use a number of tokens >= 1.")
    tokens: list[int] = []
    passages = wiki_haystack()
    while True:
        for passage in passages:
            tokens.extend(tokenizer.encode(passage.content + "\n\n").tolist())
            if len(tokens) >= count:
                return np.asarray(tokens[:count], np.int32)


def question_tokens(tokenizer: Tokenizer, count: int) -> Int32[np.ndarray, " U"]:
    """The first `count` tokens of the shipped SQuAD questions.

    Raises:
        ValueError: more tokens than the questions have, or fewer than 1.
    """
    tokens = tokenizer.encode(" ".join(sample.question for sample in read_samples(shipped("squad.jsonl"))))
    if not 1 <= count <= len(tokens):
        raise ValueError(f"count is {count}; use 1 to {len(tokens)} query tokens.")
    return tokens[:count]
