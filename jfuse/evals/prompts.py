"""From a sample to the token ids of a request: prefix, chunks, question, reference answer.

Each segment is tokenised on its own, so the ids of the request are the concatenation of these, for every method alike.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jfuse.evals.data import Joints, Sample
from jfuse.evals.spans import span_tokens
from jfuse.models.tokenizer import Tokenizer
from jfuse.pipeline import Question

JOINT = Joints().chunk


class Prompt(NamedTuple):
    """A sample in tokens."""

    prefix: Int[np.ndarray, " P"]
    chunks: tuple[Int[np.ndarray, " C"], ...]
    question: Question
    reference: Int[np.ndarray, " M"]  # the reference answer, as the model would continue
    evidence: Int[np.ndarray, " E"]  # context positions of the answer spans, prefix not counted; empty if unlabelled


def make_prompt(sample: Sample, tokenizer: Tokenizer) -> Prompt:
    """The plain-text prompt `sample.text` in tokens: by default one blank line between parts."""
    texts = [chunk + sample.joints.chunk for chunk in sample.chunks]
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prefix = tokenizer.encode(sample.prefix + sample.joints.prefix)
    lead, question, cue = (tokenizer.encode(text) for text in (sample.lead, sample.question, sample.cue))
    return Prompt(
        np.concatenate([np.asarray(bos, np.int32), prefix]),
        tuple(tokenizer.encode(text) for text in texts),
        Question(np.concatenate([lead, question, cue]), slice(len(lead), len(lead) + len(question))),
        tokenizer.encode(f" {sample.reference}"),
        span_tokens(sample, [tokenizer.offsets(text) for text in texts]),
    )
