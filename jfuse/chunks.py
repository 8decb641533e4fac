"""Phase I: a passage alone becomes a chunk, its position-independent cache and its anchor scores in one pass.

In come token ids; out comes a `Chunk` with un-rotated keys. The chunk is run from position 0 and sees nothing but
itself, so that one stored chunk serves any request.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jfuse.anchors import AnchorRule, LayerStates, default_rule, force_sinks
from jfuse.config import chunk_bucket
from jfuse.fingerprint import Fingerprint
from jfuse.models.decoder import Model, finish, project, start
from jfuse.models.tokenizer import check_ids
from jfuse.pallas.rotate import rotate
from jfuse.pallas.selective_attention import selective_attention
from jfuse.types import PAD_POSITION, AnyArray, Chunk, LayerKV, Origin


def encode_chunk(model: Model, tokens: Int[AnyArray, " C"], *, anchor_rule: AnchorRule | None = None) -> Chunk:
    """The position-independent cache of a passage (QCFuse eq. 3) and its anchor scores (eq. 14).

    Args:
        anchor_rule: `anchors.kvzip` with the model's own instruction by default.

    Raises:
        ValueError: no tokens, ids outside the vocabulary, or a chunk longer than the model's positions.
    """
    tokens = check_ids(tokens, model.config.vocab_size, name="chunk")
    rule = anchor_rule or default_rule(model)
    model.config.check_length(len(tokens) * (2 if rule.repeat else 1) + len(rule.instruction))
    size = chunk_bucket(len(tokens))
    padded = np.pad(tokens, (0, size - len(tokens)))
    pieces = [padded, np.asarray(rule.instruction, np.int32)] + ([padded] if rule.repeat else [])
    kv, score = _encode(model, np.concatenate(pieces), np.int32(len(tokens)), size, rule)
    kv, score = jax.device_get((kv, score))  # a chunk is a unit of storage; on a CPU these are views
    layers = tuple(LayerKV(kv.k[l, : len(tokens)], kv.v[l, : len(tokens)]) for l in range(model.config.num_layers))
    origin = Origin(Fingerprint.of(model, anchor_rule=rule).digest) if model.weights_id else None
    return Chunk(tokens, layers, score[:, : len(tokens)], origin)


@functools.partial(jax.jit, static_argnames=("size", "rule"))
def _encode(
    model: Model, tokens: Int[Array, " T"], length: Int[Array, ""], size: int, rule: AnchorRule
) -> tuple[LayerKV, Float[Array, "L C"]]:
    """Chunk (padded to `size`) and probe tokens in one pass; what follows the chunk changes none of its entries."""
    index, repeated = jnp.arange(tokens.shape[0]), size + len(rule.instruction)
    offset = jnp.where(index < size, index, index - repeated)  # inside the chunk, or inside its repetition
    start_at = jnp.where(index < size, 0, repeated - size + length)
    positions = jnp.where(offset < length, offset + start_at, PAD_POSITION)
    probe = (index >= size) & (positions < PAD_POSITION)
    x, rows = start(model.config, model.params, tokens, positions)

    def body(x, block):
        q, k, v = project(model.config, block, x)
        turned, placed = rotate(q, rows.cos, rows.sin), rotate(k, rows.cos, rows.sin)
        attended = selective_attention(turned, placed, v, positions, key_positions=positions)
        score = rule.score(LayerStates(turned, placed, positions, probe))[:size]
        return finish(model.config, block, x, attended), (LayerKV(k[:size], v[:size]), score)

    _, (kv, score) = jax.lax.scan(body, x, model.params["blocks"])
    score = jnp.broadcast_to(score.mean(0, keepdims=True), score.shape) if rule.shared else score
    return kv, force_sinks(score, rule.num_sinks)
