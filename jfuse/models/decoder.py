"""The decoder: two linen modules without state, and one forward pass that serves every phase.

`prefill` makes the full-prefill reference, the system prefix, and the query's pass over a fused cache. A layer is
`project` (norm, q/k/v), RoPE, attention over one or two caches, and `finish` (output, MLP); encoding, probing,
fusion and decoding call the same pieces.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jfuse.config import Implementation
from jfuse.models.config import ModelConfig
from jfuse.models.rope import angles
from jfuse.pallas.rotate import rotate
from jfuse.pallas.selective_attention import attend
from jfuse.types import PAD_POSITION, AnyArray, ContextCache, KVCache, LayerKV

Params = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder's static description and its weights: one pytree, passed explicitly to every function.

    Attributes:
        params: `embed`, `blocks` (every leaf stacked over layers, [L, ...]), `final_norm`, and `head` unless tied.
        weights_id: SHA-256 over the weights; part of every cache's fingerprint.
    """

    config: ModelConfig = dataclasses.field(metadata={"static": True})
    params: Params
    tokenizer: Any = dataclasses.field(metadata={"static": True}, default=None)
    weights_id: str = dataclasses.field(metadata={"static": True}, default="")

    def replace(self, **changes: Any) -> "Model":
        """A copy with these attributes. Other weights have no `weights_id` until one is given: caches belong to it."""
        if "params" in changes:
            changes = {"weights_id": ""} | changes
        return dataclasses.replace(self, **changes)

    @property
    def layers(self) -> tuple[Params, ...]:
        """The blocks one by one, for loops that stream. On a CPU they are views of the stacked weights, not copies."""
        leaves = jax.tree.leaves(self.params["blocks"])
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._split(operator.getitem)  # of one trace, which must not outlive it here
        return self._resident_layers

    @functools.cached_property
    def _resident_layers(self) -> tuple[Params, ...]:
        on_cpu = all(leaf.devices() == {jax.devices("cpu")[0]} for leaf in jax.tree.leaves(self.params["blocks"]))
        with jax.ensure_compile_time_eval():  # they may be asked for first inside somebody's trace
            # device_put of an aligned host view aliases it; indexing would copy the weights of every layer.
            return self._split((lambda leaf, l: jax.device_put(np.asarray(leaf)[l])) if on_cpu else operator.getitem)

    def _split(self, pick: Callable[[Any, int], Array]) -> tuple[Params, ...]:
        return tuple(
            jax.tree.map(lambda leaf: pick(leaf, l), self.params["blocks"])  # noqa: B023
            for l in range(self.config.num_layers)
        )

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights, hidden states, keys and values."""
        return self.params["embed"]["table"].dtype


class Linear(nn.Module):
    """A dense layer that accumulates in float32 whatever its weights' dtype."""

    features: int
    bias: bool = False
    wide: bool = False  # leave the result in float32

    @nn.compact
    def __call__(self, x: Float[Array, "T i"]) -> Float[Array, "T o"]:
        """Applies kernel [in, out] and the optional bias."""
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        y = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
        if self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(jnp.float32)[None, :]
        return y if self.wide else y.astype(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last axis, in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises and scales."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (wide * jnp.broadcast_to(scale.astype(jnp.float32), x.shape)).astype(x.dtype)


class Block(nn.Module):
    """One decoder layer in two pure halves; what lies between them, attention, is the caller's."""

    config: ModelConfig

    def setup(self):
        """Declares the layer's parts under the names of the parameter tree."""
        c = self.config
        self.attn_norm, self.mlp_norm = RMSNorm(c.norm_eps), RMSNorm(c.norm_eps)
        self.qkv = Linear((c.num_heads + 2 * c.num_kv_heads) * c.head_size, bias=c.qkv_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.norm_eps), RMSNorm(c.norm_eps)
        self.o = Linear(c.width, bias=c.out_bias)
        self.gate_up = Linear(2 * c.mlp_width, bias=c.mlp_bias)
        self.down = Linear(c.width, bias=c.mlp_bias)

    def project(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values before RoPE, after bias and q/k-norm."""
        c = self.config
        heads = self.qkv(self.attn_norm(x)).reshape(x.shape[0], -1, c.head_size)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        return (self.q_norm(q), self.k_norm(k), v) if c.qk_norm else (q, k, v)

    def finish(self, x: Float[Array, "T D"], attended: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        """The residual stream after attention output and MLP."""
        x = x + self.o(attended.reshape(x.shape[0], -1))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(nn.silu(gate) * up)


class Table(nn.Module):
    """The token embedding table."""

    config: ModelConfig

    def setup(self):
        """Declares the table [V, D]."""
        self.table = self.param("table", nn.initializers.normal(), (self.config.vocab_size, self.config.width))

    def look_up(self, tokens: Int[AnyArray, " T"]) -> Float[Array, "T D"]:
        """Rows of the table."""
        return jnp.take(self.table, jnp.asarray(tokens), axis=0)

    def score(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """The tied head: products with every row of the table."""
        return jnp.einsum("TD,VD->TV", x, self.table, preferred_element_type=jnp.float32)


class Embedder(nn.Module):
    """Tokens to hidden states, and final hidden states to float32 logits."""

    config: ModelConfig

    def setup(self):
        """Declares table, final norm, and a head unless it is tied to the table."""
        self.embed, self.final_norm = Table(self.config), RMSNorm(self.config.norm_eps)
        if not self.config.tied:
            self.head = Linear(self.config.vocab_size, wide=True)

    def start(self, tokens: Int[AnyArray, " T"]) -> Float[Array, "T D"]:
        """Hidden states at the first layer."""
        return self.embed.look_up(tokens)

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Next-token logits, float32."""
        x = self.final_norm(x)
        return self.embed.score(x) if self.config.tied else self.head(x)


class Rows(NamedTuple):
    """Where a set of rows stands: positions (PAD_POSITION where padded) and their RoPE table, shared by all layers."""

    positions: Int[Array, " T"]
    cos: Float[Array, "T F"]
    sin: Float[Array, "T F"]


class Past(NamedTuple):
    """A cached part of the sequence that rows attend to at one layer. Keys are rotated."""

    kv: LayerKV
    positions: Int[Array, " S"]


class LayerOut(NamedTuple):
    """What one layer gives for T rows."""

    x: Float[Array, "T D"]
    q: Float[Array, "T N H"]  # rotated
    kv: LayerKV  # rotated keys


class Prefill(NamedTuple):
    """The result of a forward pass over T tokens."""

    hidden: Float[Array, "t D"]  # all T rows, or the one asked for
    kv: KVCache  # rotated keys, the new tokens only


def _apply(module: nn.Module, params: Params, *args: Any, method: str) -> Any:
    return module.apply({"params": params}, *args, method=method)


def _embedder(params: Params) -> Params:
    return {name: params[name] for name in ("embed", "final_norm", "head") if name in params}


@functools.partial(jax.jit, static_argnames="config")
def start(
    config: ModelConfig, params: Params, tokens: Int[AnyArray, " T"], positions: Int[AnyArray, " T"]
) -> tuple[Float[Array, "T D"], Rows]:
    """Embeddings and RoPE table of new rows."""
    return _apply(Embedder(config), _embedder(params), tokens, method="start"), make_rows(config, positions)


def make_rows(config: ModelConfig, positions: Int[AnyArray, " T"]) -> Rows:
    """Positions with their RoPE table."""
    positions = jnp.asarray(positions, jnp.int32)
    return Rows(positions, *angles(config.rope, positions))


@functools.partial(jax.jit, static_argnames="config")
def logits(config: ModelConfig, params: Params, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
    """Next-token logits in float32."""
    return _apply(Embedder(config), _embedder(params), hidden, method="logits")


def project(
    config: ModelConfig, block: Params, x: Float[Array, "T D"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Queries, keys and values of one layer before RoPE."""
    return _apply(Block(config), block, x, method="project")


def finish(
    config: ModelConfig, block: Params, x: Float[Array, "T D"], attended: Float[Array, "T N H"]
) -> Float[Array, "T D"]:
    """The residual stream after one layer's attention output and MLP."""
    return _apply(Block(config), block, x, attended, method="finish")


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def layer(
    config: ModelConfig,
    block: Params,
    x: Float[Array, "T D"],
    rows: Rows,
    past: Past | None = None,
    *,
    implementation: Implementation = None,
) -> LayerOut:
    """One decoder layer over new rows, which see each other and the past, causally by position."""
    q, k, v = project(config, block, x)
    q, k = rotate(q, rows.cos, rows.sin), rotate(k, rows.cos, rows.sin)
    attended = _attend(q, rows.positions, LayerKV(k, v), rows, past, implementation)
    return LayerOut(finish(config, block, x, attended), q, LayerKV(k, v))


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def last_layer(
    config: ModelConfig,
    block: Params,
    x: Float[Array, "T D"],
    rows: Rows,
    past: Past | None,
    row: Int[AnyArray, ""],
    *,
    implementation: Implementation = None,
) -> LayerOut:
    """The final layer when only one row's output is wanted: keys and values of all rows, the rest for that row."""
    q, k, v = project(config, block, x)
    q, k = rotate(q, rows.cos, rows.sin), rotate(k, rows.cos, rows.sin)
    one = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, row, 1), (x, q, rows.positions))
    attended = _attend(one[1], one[2], LayerKV(k, v), rows, past, implementation)
    return LayerOut(finish(config, block, one[0], attended), one[1], LayerKV(k, v))


@functools.partial(jax.jit, static_argnames="config")
def keys_values(config: ModelConfig, block: Params, x: Float[Array, "T D"], rows: Rows) -> LayerOut:
    """A layer cut short after its projections: all that a probe's deepest layer, or a cache's last, needs."""
    q, k, v = project(config, block, x)
    return LayerOut(x, rotate(q, rows.cos, rows.sin), LayerKV(rotate(k, rows.cos, rows.sin), v))


def _attend(
    q: Float[Array, "t N H"],
    positions: Int[Array, " t"],
    new: LayerKV,
    rows: Rows,
    past: Past | None,
    implementation: Implementation,
) -> Float[Array, "t N H"]:
    parts = [(new, rows.positions)] + ([] if past is None else [(past.kv, past.positions)])
    return attend(q, positions, parts, implementation=implementation)


def prefill(
    model: Model,
    tokens: Int[AnyArray, " T"],
    positions: Int[AnyArray, " T"],
    prefix: ContextCache | None = None,
    *,
    hidden: Literal["all", "last", "none"] = "all",
    implementation: Implementation = None,
) -> Prefill:
    """The forward pass over new tokens, causal by position, over an optional cached prefix.

    Padding tokens carry PAD_POSITION. One compiled layer function serves all layers, so `prefix.kv`
    may be a tuple or an iterator that brings one layer at a time.

    Args:
        hidden: which rows' final hidden states are wanted. "last" is the last real token and "none" gives an empty
            array; both leave out the last layer's attention and MLP for all other rows, which nobody reads.
    """
    config = model.config
    x, rows = start(config, model.params, tokens, positions)
    past_layers = None if prefix is None else iter(prefix.kv)
    at = jnp.zeros(0, jnp.int32) if prefix is None else jnp.asarray(prefix.positions)
    kv = []
    for l, block in enumerate(model.layers):
        past = None if past_layers is None else Past(next(past_layers), at)
        if l < config.num_layers - 1 or hidden == "all":
            out = layer(config, block, x, rows, past, implementation=implementation)
        elif hidden == "last":
            last = jnp.where(rows.positions < PAD_POSITION, jnp.arange(x.shape[0]), -1).max()
            out = last_layer(config, block, x, rows, past, last, implementation=implementation)
        else:
            out = keys_values(config, block, x, rows)
        x = out.x
        kv.append(out.kv)
    return Prefill(x[:0] if hidden == "none" else x, tuple(kv))
