"""A question in a model's chat template: the token ids before the passages, and those after them."""

import numpy as np
from jaxtyping import Int

from jfuse.models.tokenizer import Tokenizer
from jfuse.pipeline import Question


def chat_request(tokenizer: Tokenizer, question: str, instruction: str = "") -> tuple[Int[np.ndarray, " P"], Question]:
    """Prefix and question of a request: the chat template around instruction, passages and question.

    Only the question's own tokens score. A base model without template is cued by "Answer:".

    Args:
        instruction: stands before the passages, with a blank line behind it.

    Returns:
        The prefix's ids for `encode_prefix` (there may be none), and the question for `answer`.

    Raises:
        ValueError: an empty question.
    """
    if not question.strip():
        raise ValueError("The question is empty; ask something.")
    parts = tokenizer.chat_parts(None)
    opening = tokenizer.encode(f"{instruction}\n\n") if instruction else np.zeros(0, np.int32)
    asked = tokenizer.encode(question)
    tail = tokenizer.encode_template(parts.tail) if parts.tail else tokenizer.encode("\nAnswer:")
    prefix = np.concatenate([tokenizer.encode_template(parts.head), opening])
    return prefix, Question(np.concatenate([asked, tail]), slice(0, len(asked)))
