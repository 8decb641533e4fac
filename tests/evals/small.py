"""A tokenizer of single bytes and tiny models with it, so that text tasks run in the tests."""

import functools

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jfuse.models.decoder import Model
from jfuse.models.tiny import tiny_model
from jfuse.models.tokenizer import Tokenizer


@functools.cache
def bytes_tokenizer() -> Tokenizer:
    """One token per byte."""
    import json

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Tokenizer(json.loads(tokenizer.to_str()))


@functools.cache
def text_model(num_layers: int = 3) -> Model:
    """A model with random weights that reads bytes."""
    model = tiny_model(jax.random.key(0), num_layers=num_layers, vocab_size=256, max_positions=8192)
    return model.replace(tokenizer=bytes_tokenizer())
