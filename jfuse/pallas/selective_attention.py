"""Attention of gathered rows over a cache, causal by position: prefill, sparse recomputation, probing and decoding.

In come queries of any rows (sorted positions are fastest), keys and values with their positions, and optionally the
set of visible keys; out comes the attention output, and on request the log-sum-exp with which two partial results
are merged. A key is read by a row at position p when its position is <= p and, if a visible set is given, when it is
in the set, in the window before the row, or the row's own. Nothing of size rows x keys is ever kept: rows and keys
are visited in blocks, and blocks of keys that no row of the block can see are skipped at run time.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jfuse.config import Implementation
from jfuse.pallas.attention_gradient import attention_gradient
from jfuse.pallas.choice import Kernel, choose
from jfuse.pallas.merge import NEGATIVE, merge
from jfuse.pallas.selective_attention_mosaic import SIZES, selective_attention_mosaic
from jfuse.pallas.selective_attention_triton import selective_attention_triton
from jfuse.types import PAD_POSITION, AnyArray, LayerKV

ROW_BLOCK = 64
KEY_BLOCK = 128
TYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))


def selective_attention(
    q: Float[Array, "R N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    row_positions: Int[AnyArray, " R"],
    *,
    key_positions: Int[AnyArray, " S"] | None = None,
    visible: Bool[AnyArray, " S"] | None = None,
    window: Int[AnyArray, ""] | int = 0,
    implementation: Implementation = None,
) -> Float[Array, "R N H"]:
    """Attention of R rows over S keys, softmax in float32, scale 1/sqrt(H), query head h over KV head h // (N / K).

    Args:
        row_positions: position of each row; PAD_POSITION marks a padding row, which gives zeros.
        key_positions: position of each key; 0..S-1 by default; PAD_POSITION marks padding, which nobody sees.
        visible: the restricted context; None leaves every earlier key visible.
        window: with `visible`, keys at the `window` positions before a row are visible too.
        implementation: "xla", "pallas" for a GPU kernel, or None for the best that runs here (`pallas.choice`).

    Raises:
        ValueError: query heads that are not a multiple of the KV heads; "pallas" where no kernel can run.
        RuntimeError: "pallas" where the kernels fail. There is no silent fallback.
    """
    return partial_attention(
        q,
        k,
        v,
        row_positions,
        key_positions=key_positions,
        visible=visible,
        window=window,
        implementation=implementation,
    )[0]


def partial_attention(
    q: Float[Array, "R N H"],
    k: Float[Array, "S K H"],
    v: Float[Array, "S K H"],
    row_positions: Int[AnyArray, " R"],
    *,
    key_positions: Int[AnyArray, " S"] | None = None,
    visible: Bool[AnyArray, " S"] | None = None,
    window: Int[AnyArray, ""] | int = 0,
    implementation: Implementation = None,
) -> tuple[Float[Array, "R N H"], Float[Array, "R N"]]:
    """`selective_attention` with the log-sum-exp of each row and head, -1e30 for rows that see nothing."""
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly; use a multiple.")
    row_positions = jnp.asarray(row_positions, jnp.int32)
    key_positions = jnp.arange(k.shape[0]) if key_positions is None else jnp.asarray(key_positions)
    seen = None if visible is None else jnp.asarray(visible)
    kernels = KERNELS if q.shape[0] * q.shape[1] >= FILLS else KERNELS[1:]
    run = choose("selective_attention", implementation, kernels, _blocked, q.dtype, q.shape[-1])
    return _differentiable(run, q, k, v, row_positions, key_positions.astype(jnp.int32), seen, jnp.asarray(window))


def _trial(dtype: np.dtype, size: int):
    """The example on which a kernel is tried: whole, cut and skipped blocks of keys, a window, padding."""
    rng = np.random.default_rng(0)
    rows, keys = 150, 400
    q, k, v = (rng.standard_normal((*shape, size)).astype(dtype) for shape in ((rows, 4), (keys, 2), (keys, 2)))
    at, places = np.arange(200, 200 + rows, dtype=np.int32), np.arange(keys, dtype=np.int32)
    at[-20:], places[-30:] = PAD_POSITION, PAD_POSITION
    return q, k, v, at, places, rng.random(keys) < 0.6, np.int32(20)


KERNELS = (
    Kernel(
        "mosaic",
        selective_attention_mosaic,
        lambda device, dtype, size: device.capability[0] == 9 and dtype.itemsize == 2 and size in SIZES,
        _trial,
    ),
    Kernel(
        "triton",
        selective_attention_triton,
        lambda device, dtype, size: device.capability >= (8, 0) and dtype in TYPES and size <= 256,
        _trial,
    ),
)
FILLS = 2**14
"""Rows x heads from which blocks of 128 rows fill a card; below it the Triton kernel splits the keys as well."""


def _forward(run, *arguments):
    results = run(*arguments)
    return results, (arguments, results)


def _backward(run, kept, cotangents):
    del run  # whichever it was, it gave the same
    arguments, results = kept
    arguments = jax.tree.map(jnp.asarray, arguments)  # constants come back as Python numbers
    return *attention_gradient(arguments, results, cotangents), None, None, None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(run, *arguments):
    """An implementation, whose trip counts are known at run time only, with a gradient of its own."""
    return run(*arguments)


_differentiable.defvjp(_forward, _backward)


def attend(
    q: Float[Array, "R N H"],
    row_positions: Int[AnyArray, " R"],
    parts: Sequence[tuple[LayerKV, Int[AnyArray, " _"]]],
    *,
    implementation: Implementation = None,
) -> Float[Array, "R N H"]:
    """Attention over the union of disjoint caches, each given with its positions; nothing is concatenated."""
    results = [
        partial_attention(q, kv.k, kv.v, row_positions, key_positions=at, implementation=implementation)
        for kv, at in parts
    ]
    return results[0][0] if len(results) == 1 else merge(results)


def _blocked(q, k, v, row_positions, key_positions, visible, window):
    """Online softmax over key blocks, one block of rows at a time, with a trip count computed at run time."""
    rows, heads, size = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    if visible is not None:  # visible keys first: scattered ones would leave something to read in every block
        front = jnp.argsort(~visible, stable=True)
        k, v, key_positions, visible = (a[front] for a in (k, v, key_positions, visible))
    row_block, key_block = min(ROW_BLOCK, _ceil8(rows)), min(KEY_BLOCK, keys)
    padding = -rows % row_block
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    row_positions = jnp.pad(row_positions, (0, padding), constant_values=PAD_POSITION)
    row_positions = jnp.where(row_positions >= PAD_POSITION, -1, row_positions)
    blocks = q.shape[0] // row_block

    # Rows lie along the minor axis, so that maxima and sums over keys run across vector lanes. The query heads of one
    # KV head lie side by side, so that one product serves them all: [block, K, H, rows x group].
    q = (q.astype(jnp.float32) * (1 / math.sqrt(size))).astype(q.dtype)
    q = q.reshape(blocks, row_block, kv_heads, group, size).transpose(0, 2, 4, 1, 3)
    q = q.reshape(blocks, kv_heads, size, row_block * group)
    k, v = k.transpose(1, 0, 2), v.transpose(1, 2, 0)
    first_new = jnp.arange(0, keys, key_block)
    starts = jnp.minimum(first_new, keys - key_block)  # the last block may overlap the one before it

    def attend_block(block):
        q, positions = block
        last = positions.max()
        earliest = jnp.where(positions < 0, PAD_POSITION, positions).min()
        wanted, whole = _block_kinds(key_positions, visible, window, earliest, last, key_block)
        order = jnp.argsort(jnp.where(whole, 0, jnp.where(wanted, 1, 2)), stable=True)
        row = jnp.repeat(positions, group)[None, :]

        def step(i, carry, *, masked):
            out, top, total = carry
            start = starts[order[i]]
            kb = jax.lax.dynamic_slice_in_dim(k, start, key_block, axis=1)
            vb = jax.lax.dynamic_slice_in_dim(v, start, key_block, axis=2)
            scores = jnp.einsum("ksh,khq->ksq", kb, q, preferred_element_type=jnp.float32)
            if masked:
                scores = jnp.where(seen(start, first_new[order[i]]), scores, NEGATIVE)
            new_top = jnp.maximum(top, scores.max(1, keepdims=True))
            decay = jnp.exp(top - new_top)
            weights = jnp.exp(scores - new_top)
            added = jnp.einsum("khs,ksq->khq", vb, weights.astype(vb.dtype), preferred_element_type=jnp.float32)
            return out * decay + added, new_top, total * decay + weights.sum(1, keepdims=True)

        def seen(start, new):
            at = jax.lax.dynamic_slice_in_dim(key_positions, start, key_block)[:, None]
            keep = at <= row
            if keys % key_block:
                keep &= (start + jnp.arange(key_block) >= new)[:, None]
            if visible is not None:
                listed = jax.lax.dynamic_slice_in_dim(visible, start, key_block)[:, None]
                keep &= listed | (row - at <= window)  # a window of 0 still holds the row itself
            return keep

        zero = jnp.zeros((kv_heads, 1, row_block * group), jnp.float32)
        init = (jnp.zeros((kv_heads, size, row_block * group), jnp.float32), zero + NEGATIVE, zero)
        num_whole = whole.sum()
        carry = jax.lax.fori_loop(0, num_whole, functools.partial(step, masked=False), init)
        out, top, total = jax.lax.fori_loop(num_whole, wanted.sum(), functools.partial(step, masked=True), carry)
        # A row that saw only masked keys has top NEGATIVE and weights exp(0); padding rows are let into whole blocks.
        empty = (top <= NEGATIVE / 2) | (row < 0)[None]
        out = jnp.where(empty, 0.0, out / jnp.where(empty, 1.0, total))
        return out, jnp.where(empty, NEGATIVE, top + jnp.log(jnp.where(empty, 1.0, total)))[:, 0]

    out, lse = jax.lax.map(attend_block, (q, row_positions.reshape(blocks, row_block)))
    out = out.reshape(blocks, kv_heads, size, row_block, group).transpose(0, 3, 1, 4, 2).reshape(-1, heads, size)
    lse = lse.reshape(blocks, kv_heads, row_block, group).transpose(0, 2, 1, 3).reshape(-1, heads)
    return out[:rows].astype(v.dtype), lse[:rows]


def _block_kinds(key_positions, visible, window, earliest, last, key_block):
    """Which key blocks some row between `earliest` and `last` may see, and which of them every row sees in full."""
    readable, by_all = key_positions <= last, key_positions <= earliest
    if visible is not None:
        readable &= visible | (key_positions >= earliest - window)
        by_all &= visible
    padding = -key_positions.shape[0] % key_block
    wanted, whole = (
        jnp.pad(keys, (0, padding)).reshape(-1, key_block) for keys in (readable, by_all & (earliest < PAD_POSITION))
    )
    return wanted.any(-1), whole.all(-1)


def _ceil8(n: int) -> int:
    return -(-n // 8) * 8
