"""The end of a request: prefill the query over a context cache in any state, then decode greedily."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.config import Implementation, query_bucket
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import (
    Model,
    Params,
    Past,
    Prefill,
    Rows,
    finish,
    logits,
    prefill,
    project,
    start,
)
from jfuse.models.tokenizer import check_ids
from jfuse.pallas.rotate import rotate
from jfuse.pallas.selective_attention import attend
from jfuse.types import PAD_POSITION, AnyArray, ContextCache, LayerKV


def prefill_query(
    model: Model, context: ContextCache, query: Int[AnyArray, " U"], *, implementation: Implementation = None
) -> tuple[Float[Array, " V"], Prefill]:
    """Runs the query over the cache; the logits of its last token decide the first answer token.

    The query is padded to its bucket and stands right after the last real entry of the context.
    """
    query, positions = padded_query(query, context.end)
    out = prefill(model, query, positions, context, hidden="last", implementation=implementation)
    return logits(model.config, model.params, out.hidden)[0], out


def padded_query(query: Int[AnyArray, " U"], start: int) -> tuple[Int[np.ndarray, " P"], Int[np.ndarray, " P"]]:
    """A query padded to its bucket, and its positions from `start` on."""
    query = np.asarray(query, np.int32)
    padding = query_bucket(len(query)) - len(query)
    positions = np.arange(len(query), dtype=np.int32) + start
    return np.pad(query, (0, padding)), np.pad(positions, (0, padding), constant_values=PAD_POSITION)


def generate(
    model: Model,
    context: ContextCache,
    query: Int[AnyArray, " U"],
    *,
    max_new_tokens: int = 32,
    stop: frozenset[int] | None = None,
    implementation: Implementation = None,
) -> Int[np.ndarray, " M"]:
    """Greedy answer tokens, at most `max_new_tokens`, ending before the first stop token.

    Args:
        stop: stop ids; the tokenizer's by default.

    Raises:
        ValueError: an empty query, ids outside the vocabulary, a negative count of new tokens, or more positions than
            the model serves.
    """
    return np.asarray(
        list(stream(model, context, query, max_new_tokens=max_new_tokens, stop=stop, implementation=implementation)),
        np.int32,
    )


def stream(
    model: Model,
    context: ContextCache,
    query: Int[AnyArray, " U"],
    *,
    max_new_tokens: int = 32,
    stop: frozenset[int] | None = None,
    implementation: Implementation = None,
) -> Iterator[int]:
    """`generate`, one token at a time."""
    query = check_ids(query, model.config.vocab_size, "query")
    check_new_tokens(max_new_tokens)
    model.config.check_request(context.end + len(query) + max_new_tokens)
    stop = stop_ids(model) if stop is None else stop
    first, queried = prefill_query(model, context, query, implementation=implementation)
    yield from decode(model, context, queried, first, len(query), max_new_tokens, stop, implementation)


def check_new_tokens(count: int) -> None:
    """Refuses a negative count.

    Raises:
        ValueError: it is below 0.
    """
    if count < 0:
        raise ValueError(f"max_new_tokens is {count}; use a count >= 0.")


def stop_ids(model: Model) -> frozenset[int]:
    """The ids that end an answer: the tokenizer's, or none without one."""
    return frozenset() if model.tokenizer is None else model.tokenizer.stop_ids


def decode(
    model: Model,
    context: ContextCache,
    queried: Prefill,
    first: Float[Array, " V"],
    num_query: int,
    max_new_tokens: int,
    stop: frozenset[int],
    implementation: Implementation = None,
) -> Iterator[int]:
    """Greedy tokens after a prefilled query. The context is only read; query and answer live in a tail of their own."""
    padded = queried.kv[0].k.shape[0]
    room = query_bucket(num_query + max_new_tokens) - padded
    tail = [jax.tree.map(lambda a: jnp.pad(a, ((0, room), (0, 0), (0, 0))), layer) for layer in queried.kv]
    at = np.full(padded + room, PAD_POSITION, np.int32)
    at[:num_query] = np.arange(num_query) + context.end
    context_positions = jnp.asarray(context.positions)
    scores = first
    for step in range(max_new_tokens):
        token = int(jnp.argmax(scores))
        if token in stop:
            return
        yield token
        if step == max_new_tokens - 1:
            return
        slot = num_query + step
        at[slot] = context.end + slot
        x, rows = start(model.config, model.params, np.asarray([token], np.int32), at[slot : slot + 1])
        for l, block in enumerate(model.layers):
            past = Past(context.kv[l], context_positions)
            x, tail[l] = _decode_layer(
                model.config, block, x, rows, past, tail[l], at.copy(), np.int32(slot), implementation=implementation
            )
        scores = logits(model.config, model.params, x)[0]


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames="tail")
def _decode_layer(
    config: ModelConfig,
    block: Params,
    x: Float[Array, "1 D"],
    rows: Rows,
    past: Past,
    tail: LayerKV,
    tail_positions: Int[AnyArray, " M"],
    slot: Int[AnyArray, ""],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "1 D"], LayerKV]:
    """One layer of a decode step: the token's own entry is written into the tail first, then read like any other."""
    q, k, v = project(config, block, x)
    k = rotate(k, rows.cos, rows.sin)
    tail = LayerKV(*(jax.lax.dynamic_update_slice_in_dim(a, b, slot, 0) for a, b in zip(tail, (k, v), strict=True)))
    parts = [(past.kv, past.positions), (tail, tail_positions)]
    attended = attend(rotate(q, rows.cos, rows.sin), rows.positions, parts, implementation=implementation)
    return finish(config, block, x, attended), tail
