"""How much attention each cached position receives from a set of query rows, without keeping rows x positions.

In come query rows and keys; out comes one figure per key: softmax weight, averaged (or maximised) over heads and
rows. The softmax set is a switch, because the papers differ: it is the keys that are counted plus, through their
log-sum-exp, keys that take part in the denominator but are not scored themselves.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import Implementation
from jfuse.pallas.attention_mass_triton import attention_mass_triton, log_mass_triton
from jfuse.pallas.by_definition import by_definition
from jfuse.pallas.choice import Device, Kernel, choose
from jfuse.pallas.merge import NEGATIVE
from jfuse.types import AnyArray

Reduce = Literal["mean", "max"]

KEY_BLOCK = 512
TYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))


def attention_mass(
    q: Float[Array, "U N H"],
    k: Float[Array, "S K H"],
    row_positions: Int[AnyArray, " U"],
    *,
    key_positions: Int[AnyArray, " S"],
    rows: Bool[AnyArray, " U"],
    counted: Bool[AnyArray, " S"] | None = None,
    others: Float[Array, "U N"] | None = None,
    heads: Reduce | Literal["each"] = "mean",
    over_rows: Reduce = "mean",
    implementation: Implementation = None,
) -> Float[Array, " S"] | Float[Array, "N S"]:
    """Softmax mass per position, float32; zero where a position is not counted or later than every scoring row.

    Args:
        rows: the query rows that score; the others change nothing.
        counted: keys in the softmax set; None counts every key that is not padding.
        others: log-sum-exp per row and head of further keys in the denominator (`log_mass` gives it).
        heads: how heads are reduced; "each" keeps them apart, [N, S].
        over_rows: how query rows are reduced, after the heads.
        implementation: "xla", "pallas" for a GPU kernel, or None for the best that runs here (`pallas.choice`).

    Raises:
        ValueError: "pallas" where no kernel can run.
        RuntimeError: "pallas" where the kernel fails.
    """
    run = choose("attention_mass", implementation, KERNELS, _attention_mass, q.dtype, q.shape[-1])
    run = by_definition(run, _attention_mass, heads=heads, over_rows=over_rows)
    counted = None if counted is None else jnp.asarray(counted)
    return run(q, k, jnp.asarray(row_positions), jnp.asarray(key_positions), counted, jnp.asarray(rows), others)


def _attention_mass(q, k, row_positions, key_positions, counted, rows, others, *, heads="mean", over_rows="mean"):
    """Two passes over the keys: the log-sum-exp of each row and head, then masses, reduced block by block."""
    lse = _log_mass(q, k, row_positions, key_positions, counted)
    lse = lse if others is None else jnp.logaddexp(lse, others)

    def reduce(block):
        scores, keep = _scores(q, block, row_positions)  # [U, N, s]
        keep &= rows[:, None, None]
        mass = jnp.where(keep, jnp.exp(jnp.where(keep, scores - lse[..., None], 0.0)), 0.0)
        if heads != "each":
            mass = mass.mean(1) if heads == "mean" else mass.max(1)
        return mass.sum(0) / jnp.maximum(rows.sum(), 1).astype(mass.dtype) if over_rows == "mean" else mass.max(0)

    out = jax.lax.map(reduce, _blocks(k, key_positions, counted))  # [block, (N,) s]
    out = jnp.moveaxis(out, 0, -2)
    return out.reshape(*out.shape[:-2], -1)[..., : k.shape[0]]


def log_mass(
    q: Float[Array, "U N H"],
    k: Float[Array, "S K H"],
    row_positions: Int[AnyArray, " U"],
    *,
    key_positions: Int[AnyArray, " S"],
    counted: Bool[AnyArray, " S"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "U N"]:
    """Log-sum-exp of the scaled scores over the counted keys at or before each row; -1e30 where there is none."""
    run = choose("log_mass", implementation, LOG_KERNELS, _log_mass, q.dtype, q.shape[-1])
    run = by_definition(run, _log_mass)
    counted = None if counted is None else jnp.asarray(counted)
    return run(q, k, jnp.asarray(row_positions), jnp.asarray(key_positions), counted)


def _log_mass(q, k, row_positions, key_positions, counted):
    """Rows and heads lie along the minor axis, so that maxima and sums over keys run across vector lanes."""
    rows, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q = q.reshape(rows, kv_heads, group, size).transpose(1, 3, 0, 2).reshape(kv_heads, size, rows * group)
    row = jnp.repeat(row_positions, group)[None, :]

    def step(carry, block):
        top, total = carry
        kb, at, counts = block
        scores = jnp.einsum("skh,khr->ksr", kb, q, preferred_element_type=jnp.float32) / math.sqrt(size)
        keep = counts[:, None] & (at[:, None] <= row)
        scores = jnp.where(keep, scores, NEGATIVE)
        new_top = jnp.maximum(top, scores.max(1, keepdims=True))
        weights = jnp.where(keep, jnp.exp(scores - new_top), 0.0)
        return (new_top, total * jnp.exp(top - new_top) + weights.sum(1, keepdims=True)), None

    nothing = jnp.zeros((kv_heads, 1, rows * group), jnp.float32)
    (top, total), _ = jax.lax.scan(step, (nothing + NEGATIVE, nothing), _blocks(k, key_positions, counted))
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), NEGATIVE)
    return lse.reshape(kv_heads, rows, group).transpose(1, 0, 2).reshape(rows, heads)


def _blocks(k, key_positions, counted):
    """Keys cut into blocks [b, s, K, H], with their positions and whether they count; the tail is padded with not."""
    keys = k.shape[0]
    size = min(KEY_BLOCK, keys)
    padding = -keys % size
    counted = jnp.ones(keys, bool) if counted is None else counted
    counted = jnp.pad(counted, (0, padding)).reshape(-1, size)
    positions = jnp.pad(key_positions, (0, padding)).reshape(-1, size)
    return jnp.pad(k, ((0, padding), (0, 0), (0, 0))).reshape(-1, size, *k.shape[1:]), positions, counted


def _scores(q, block, row_positions):
    """Scaled scores [U, N, s] in float32 and which of them exist."""
    k, key_positions, counted = block
    rows, heads, size = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, size)
    scores = jnp.einsum("UKGH,SKH->UKGS", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(size)
    keep = counted[None, :] & (key_positions[None, :] <= row_positions[:, None])
    return scores.reshape(rows, heads, -1), jnp.broadcast_to(keep[:, None, :], (rows, heads, keep.shape[-1]))


def _trial(dtype: np.dtype, size: int):
    """Rows that see some keys and rows that do not score, ragged blocks, keys that do not count, others beside them."""
    rng = np.random.default_rng(0)
    rows, keys = 70, 150
    q, k = (rng.standard_normal((*shape, size)).astype(dtype) for shape in ((rows, 4), (keys, 2)))
    at, places = np.arange(90, 90 + rows, dtype=np.int32), np.arange(keys, dtype=np.int32)
    others = rng.standard_normal((rows, 4)).astype(np.float32)
    return q, k, at, places, rng.random(keys) < 0.8, rng.random(rows) < 0.6, others


def _supports(device: Device, dtype: np.dtype, size: int) -> bool:
    return device.capability >= (8, 0) and size <= 256 and dtype in TYPES


KERNELS = (Kernel("triton", attention_mass_triton, _supports, _trial),)
LOG_KERNELS = (Kernel("triton", log_mass_triton, _supports, lambda dtype, size: _trial(dtype, size)[:5]),)
