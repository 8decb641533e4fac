"""Chunk-local anchor rules: which few tokens of a chunk stand for it while a query is probed (QCFuse eq. 14).

A rule scores every token of a chunk, per layer, from that chunk alone; the probe then sees the top share r_a of each
chunk.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import budget
from jfuse.pallas.attention_mass import attention_mass
from jfuse.types import AnyArray, Chunk, ChunkAnchors, LayerKV

REPEAT = "\n\nRepeat the previous context exactly."
NUM_SINKS = 4


class LayerStates(NamedTuple):
    """What an anchor rule may look at: one layer of a chunk followed by the rule's own probe tokens."""

    q: Float[Array, "T N H"]  # rotated
    k: Float[Array, "T K H"]  # rotated
    positions: Int[Array, " T"]  # PAD_POSITION where padded
    probe: Bool[Array, " T"]  # the rule's probe tokens, which follow the chunk


class AnchorRule(NamedTuple):
    """An anchor rule: hashable, so that it can be a static argument and a fingerprint field.

    `instruction` holds token ids that are run after the chunk in the same pass; they never enter the chunk's cache.
    """

    name: str
    score: Callable[[LayerStates], Float[Array, " T"]]
    instruction: tuple[int, ...] = ()
    num_sinks: int = NUM_SINKS  # first tokens of a chunk that are kept whatever their score, inside the budget


def kvzip_score(states: LayerStates) -> Float[Array, " T"]:
    """The strongest attention any probe row of any head pays to a token (KVzip, 2505.23416; QCFuse's instruction form).

    The softmax runs over chunk and instruction, causally, so that the score depends on the chunk alone.
    """
    return attention_mass(
        states.q,
        states.k,
        states.positions,
        key_positions=states.positions,
        rows=states.probe,
        heads="max",
        over_rows="max",
    )


@functools.cache
def kvzip(instruction: tuple[int, ...]) -> AnchorRule:
    """KVzip in instruction-probe form: the chunk is asked to be repeated, and what that request looks at is kept.

    Raises:
        ValueError: an empty instruction, which would leave no probe rows.
    """
    if not instruction:
        raise ValueError(
            "kvzip needs instruction token ids, at least one; encode anchors.REPEAT with the model's tokenizer."
        )
    return AnchorRule("kvzip", kvzip_score, instruction)


def default_rule(model) -> AnchorRule:
    """KVzip with the model's own wording of "repeat"; without a tokenizer, a fixed pair of ids stands in for it."""
    if model.tokenizer is None:
        return kvzip((1 % model.config.vocab_size, 2 % model.config.vocab_size))
    return kvzip(tuple(int(i) for i in model.tokenizer.encode(REPEAT)))


def anchor_offsets(score: Float[AnyArray, "L C"], ratio: float) -> Int[np.ndarray, "L A"]:
    """The ceil(ratio * C) best positions of every layer, sorted by position; ties go to the lower one.

    >>> anchor_offsets(np.array([[0.1, 0.9, 0.5, 0.9]]), 0.5)
    array([[1, 3]])
    """
    score = np.asarray(score, np.float32)
    keep = budget("ceil", ratio, score.shape[1])
    return np.sort(np.argsort(-score, axis=1, kind="stable")[:, :keep], axis=1)


def chunk_anchors(chunk: Chunk, ratio: float) -> ChunkAnchors:
    """The anchor block of a chunk: per layer the kept offsets and their un-rotated keys and values."""
    offsets = anchor_offsets(chunk.anchor_score, ratio)
    return ChunkAnchors(
        offsets,
        tuple(
            LayerKV(np.asarray(kv.k)[rows], np.asarray(kv.v)[rows]) for kv, rows in zip(chunk.kv, offsets, strict=True)
        ),
    )


def force_sinks(score: Float[Array, "L C"], num_sinks: int) -> Float[Array, "L C"]:
    """Raises the first tokens above every other score, so that they are kept first and count in the budget."""
    first = jnp.arange(score.shape[-1]) < num_sinks
    return jnp.where(first, jnp.finfo(jnp.float32).max, score)
