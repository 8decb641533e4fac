"""A plain prompt in token ids, and the empty context it continues."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jfuse.models.decoder import Model
from jfuse.models.tokenizer import Tokenizer
from jfuse.types import PAD_POSITION, PADDING_SEGMENT, ContextCache, LayerKV


def make_prompt(tokenizer: Tokenizer, text: str, *, raw: bool = False) -> Int[np.ndarray, " T"]:
    """A plain prompt in the chat template, or as it stands.

    Raises:
        ValueError: an empty prompt.
    """
    if not text:
        raise ValueError("The prompt is empty; write something.")
    if raw:
        bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return np.concatenate([np.asarray(bos, np.int32), tokenizer.encode(text)])
    parts = tokenizer.chat_parts(None)
    head, tail = (tokenizer.encode_template(part) for part in parts)
    return np.concatenate([head, tokenizer.encode(text), tail])


def no_context(model: Model) -> ContextCache:
    """A context of padding alone, for prompts that have none."""
    size, c = 64, model.config
    empty = jnp.zeros((size, c.num_kv_heads, c.head_size), model.dtype)
    positions = np.full(size, PAD_POSITION, np.int32)
    segments = np.full(size, PADDING_SEGMENT, np.int32)
    return ContextCache(np.zeros(size, np.int32), positions, segments, (LayerKV(empty, empty),) * c.num_layers)
