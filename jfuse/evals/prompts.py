"""From a sample to the token ids of a request: prefix, chunks, question, reference answer.

Each segment is tokenised on its own, so the ids of the request are the concatenation of these, for every method alike.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jfuse.evals.data import Sample
from jfuse.evals.spans import span_tokens
from jfuse.models.tokenizer import Tokenizer
from jfuse.pipeline import Question

JOINT = "\n\n"


class Prompt(NamedTuple):
    """A sample in tokens."""

    prefix: Int[np.ndarray, " P"]
    chunks: tuple[Int[np.ndarray, " C"], ...]
    question: Question
    reference: Int[np.ndarray, " M"]  # the reference answer, as the model would continue
    evidence: Int[np.ndarray, " E"]  # context positions of the answer spans, prefix not counted; empty if unlabelled


def make_prompt(sample: Sample, tokenizer: Tokenizer, *, example: str = "") -> Prompt:
    """The plain-text prompt `instruction, chunks, question answer-prefix`, one blank line between parts.

    Args:
        example: a worked example that stands first; base-sized models hardly use the context without one.
    """
    texts = [chunk + JOINT for chunk in sample.chunks]
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prefix = tokenizer.encode(example + sample.prefix + JOINT)
    question, cue = tokenizer.encode(sample.question), tokenizer.encode(f" {sample.answer_prefix}")
    return Prompt(
        np.concatenate([np.asarray(bos, np.int32), prefix]),
        tuple(tokenizer.encode(text) for text in texts),
        Question(np.concatenate([question, cue]), slice(0, len(question))),
        tokenizer.encode(f" {sample.reference}"),
        span_tokens(sample, [tokenizer.offsets(text) for text in texts]),
    )
