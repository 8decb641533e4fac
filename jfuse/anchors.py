"""Chunk-local anchor rules: which few tokens of a chunk stand for it while a query is probed (QCFuse eq. 14).

A rule scores every token of a chunk, per layer, from that chunk alone; the probe then sees the top share r_a of each
chunk.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import anchor_offsets, check_choice
from jfuse.pallas.attention_mass import attention_mass
from jfuse.types import PAD_POSITION, Chunk, ChunkAnchors, LayerKV

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
    Two rules with one name must be the same rule: the name is what a stored chunk's fingerprint holds.
    """

    name: str
    score: Callable[[LayerStates], Float[Array, " T"]]
    instruction: tuple[int, ...] = ()
    num_sinks: int = NUM_SINKS  # first tokens of a chunk that are kept whatever their score, inside the budget
    repeat: bool = False  # the chunk's own tokens follow the instruction, as probe rows
    shared: bool = False  # one set of anchors for all layers, from the mean of their scores


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
def kvzip(instruction: tuple[int, ...], *, repeat: bool = False) -> AnchorRule:
    """KVzip: the chunk is asked to be repeated, and what that looks at is kept.

    QCFuse runs the instruction alone, the default here. KVzip itself lets the answer follow (teacher forcing), so that
    every token of the chunk is a probe row once. Both here score a chunk in one piece and see nothing before it, so
    that the score depends on the chunk alone: KVzip cuts at 2,000 tokens and puts the system prompt into the softmax,
    and QCFuse's code puts the system prompt's first 4 tokens there.

    Args:
        repeat: append the chunk's own tokens to the instruction. Encoding then costs about twice as much.

    Raises:
        ValueError: an empty instruction, which would leave no probe rows.
    """
    if not instruction:
        raise ValueError(
            "kvzip needs instruction token ids, at least one; encode anchors.REPEAT with the model's tokenizer."
        )
    return AnchorRule("kvzip_repeat" if repeat else "kvzip", kvzip_score, instruction, repeat=repeat)


@functools.cache
def sink() -> AnchorRule:
    """The first tokens of a chunk."""
    return AnchorRule("sink", lambda states: -states.positions.astype(jnp.float32), num_sinks=0)


@functools.cache
def knorm(keep: Literal["small", "large"] = "small") -> AnchorRule:
    """The keys of small norm, averaged over KV heads (kvpress; the QCFuse paper does not state the direction).

    RoPE does not change norms. QCFuse averages over layers too: `shared(knorm())`.

    Raises:
        ValueError: `keep` is neither.
    """
    check_choice("keep", keep, ("small", "large"))
    sign = {"small": -1.0, "large": 1.0}[keep]

    def score(states: LayerStates) -> Float[Array, " T"]:
        return sign * jnp.linalg.norm(states.k.astype(jnp.float32), axis=-1).mean(-1)

    return AnchorRule("knorm" if keep == "small" else "knorm_large", score, num_sinks=0)


@functools.cache
def h2o() -> AnchorRule:
    """What the chunk itself attends to, averaged over heads and over the rows that can see the token.

    H2O (2306.14048) adds attention up while generating and keeps a recent window. As the score of a chunk that is
    the column sum of its own attention; column j sums over all rows from j on, hence the division by their number.
    """

    def score(states: LayerStates) -> Float[Array, " T"]:
        rows = ~states.probe & (states.positions < PAD_POSITION)
        mass = attention_mass(states.q, states.k, states.positions, key_positions=states.positions, rows=rows)
        later = jnp.maximum(rows.sum() - states.positions, 1)
        return mass * rows.sum().astype(jnp.float32) / later.astype(jnp.float32)

    return AnchorRule("h2o", score, num_sinks=0)


@functools.cache
def shared(rule: AnchorRule) -> AnchorRule:
    """The rule with one set of anchors per chunk (QCFuse eq. 14) in place of one per layer (its code).

    How layers are reduced is not published; here their scores are averaged.
    """
    return rule._replace(name=f"{rule.name}_shared", shared=True)


def by_name(name: str, model) -> AnchorRule:
    """The rule of that name, with the model's own instruction where it needs one; "_shared" may follow.

    Raises:
        ValueError: an unknown name.
    """
    base, one_set, _ = name.partition("_shared")
    default = default_rule(model)
    rules = {
        "sink": sink,
        "knorm": knorm,
        "knorm_large": lambda: knorm("large"),
        "h2o": h2o,
        "kvzip": lambda: default,
        "kvzip_repeat": lambda: kvzip(default.instruction, repeat=True),
    }
    if base not in rules or name not in (base, f"{base}_shared"):
        raise ValueError(f"There is no anchor rule {name!r}; use one of {', '.join(rules)}, or one with _shared.")
    return shared(rules[base]()) if one_set else rules[base]()


def default_rule(model) -> AnchorRule:
    """KVzip with the model's own wording of "repeat"; without a tokenizer, a fixed pair of ids stands in for it."""
    if model.tokenizer is None:
        return kvzip((1 % model.config.vocab_size, 2 % model.config.vocab_size))
    return kvzip(tuple(int(i) for i in model.tokenizer.encode(REPEAT)))


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
