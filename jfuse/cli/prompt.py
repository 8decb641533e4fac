"""From a question to the token ids around the passages, and from a selector's name to the selector."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jfuse.evals.prompts import JOINT
from jfuse.models.decoder import Model
from jfuse.models.tokenizer import Tokenizer
from jfuse.pipeline import Question
from jfuse.profile import load_profile
from jfuse.selectors import by_name
from jfuse.selectors.base import Selector
from jfuse.selectors.listing import NAMED, layer_argument
from jfuse.types import PAD_POSITION, PADDING_SEGMENT, ContextCache, LayerKV


def make_request(tokenizer: Tokenizer, question: str, instruction: str) -> tuple[Int[np.ndarray, " P"], Question]:
    """Prefix and question of a request: the chat template around instruction, passages and question.

    Only the question's own tokens score. A base model without template is cued by "Answer:".

    Raises:
        ValueError: an empty question.
    """
    if not question.strip():
        raise ValueError("The question is empty; ask something.")
    parts = tokenizer.chat_parts(None)
    opening = tokenizer.encode(instruction + JOINT) if instruction else np.zeros(0, np.int32)
    asked = tokenizer.encode(question)
    tail = tokenizer.encode_template(parts.tail) if parts.tail else tokenizer.encode("\nAnswer:")
    prefix = np.concatenate([tokenizer.encode_template(parts.head), opening])
    return prefix, Question(np.concatenate([asked, tail]), slice(0, len(asked)))


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


def check_selector(name: str) -> None:
    """Refuses a name that is not in the catalogue, before anything is loaded.

    Raises:
        ValueError: lists the names.
    """
    by_name(name, layers=(0,))


def choose_selector(name: str, model: Model, layers: tuple[int, ...] = (), profile: Path | None = None) -> Selector:
    """The selector of that name; critical layers are those given, of the profile given, or of the shipped profile.

    Raises:
        ValueError: an unknown name, layers for a selector that takes none, or another model's profile.
        LookupError: critical layers are needed, and neither given nor known for this model.
    """
    factory, _ = NAMED.get(name, (None, {}))
    if factory is not None and layer_argument(factory) and not layers:
        try:
            layers = load_profile(model, profile).critical_layers()
        except LookupError as error:
            raise LookupError(
                f"Selector {name!r} needs critical layers, and jfuse ships no profile of this model. "
                "Measure them with `jfuse profile` and give its file as --profile, or name --layers, counted from 0."
            ) from error
    elif layers and factory is not None and not layer_argument(factory):
        raise ValueError(f"Selector {name!r} takes no critical layers; leave --layers out.")
    selector = by_name(name, layers=layers)
    selector.view.layer_indices(model.config.num_layers)
    return selector
