"""The parameter tree of a model: its layout, its shapes and sizes, its digest, and random parameters.

In: a `ModelConfig`. Out: a tree of `embed`, `blocks` (leaves stacked over layers), `final_norm` and, unless tied,
`head`.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfuse.models.config import ModelConfig

Params = dict[str, Any]
Path = tuple[str, ...]


def param_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
    """The shape of every parameter by its path, in a fixed order. Kernels are [in, out].

    The `qkv` output is all query heads, all key heads, all value heads; the `gate_up` output is gate, then up.
    """
    c = config
    heads, qkv = c.num_heads * c.head_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_size
    block: dict[Path, tuple[int, ...]] = {("attn_norm", "scale"): (c.width,), ("qkv", "kernel"): (c.width, qkv)}
    if c.qkv_bias:
        block["qkv", "bias"] = (qkv,)
    if c.qk_norm:
        block |= {("q_norm", "scale"): (c.head_size,), ("k_norm", "scale"): (c.head_size,)}
    block["o", "kernel"] = (heads, c.width)
    if c.out_bias:
        block["o", "bias"] = (c.width,)
    block["mlp_norm", "scale"] = (c.width,)
    block["gate_up", "kernel"] = (c.width, 2 * c.mlp_width)
    block["down", "kernel"] = (c.mlp_width, c.width)
    if c.mlp_bias:
        block |= {("gate_up", "bias"): (2 * c.mlp_width,), ("down", "bias"): (c.width,)}
    shapes: dict[Path, tuple[int, ...]] = {("embed", "table"): (c.vocab_size, c.width)}
    shapes |= {("blocks", *path): (c.num_layers, *shape) for path, shape in block.items()}
    shapes["final_norm", "scale"] = (c.width,)
    if not c.tied:
        shapes["head", "kernel"] = (c.width, c.vocab_size)
    return shapes


def shape_params(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The parameter tree with a `jax.ShapeDtypeStruct` at every leaf; allocates nothing."""
    return build_params(config, lambda path, shape: jax.ShapeDtypeStruct(shape, dtype))


def count_params(config: ModelConfig) -> int:
    """Number of weights; a tied head counts once."""
    return sum(math.prod(shape) for shape in param_shapes(config).values())


def random_params(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters whose norm scales are not one and whose biases are not zero, so that an omitted one shows."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))  # drawn on the host: nothing to compile

    def draw(path: Path, shape: tuple[int, ...]) -> jax.Array:
        noise = rng.standard_normal(shape, np.float32)
        if path[-1] == "scale":
            return jnp.asarray(1 + 0.3 * noise, dtype)
        if path[-1] == "bias":
            return jnp.asarray(0.3 * noise, dtype)
        fan_in = 1 if path[-1] == "table" else shape[-2]
        return jnp.asarray(noise / np.float32(math.sqrt(fan_in)), dtype)

    return build_params(config, draw)


def build_params(config: ModelConfig, leaf: Callable[[Path, tuple[int, ...]], Any]) -> Params:
    """The parameter tree with `leaf(path, shape)` at every place, called in the order of `param_shapes`."""
    params: Params = {}
    for path, shape in param_shapes(config).items():
        node = params
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf(path, shape)
    return params


def digest_params(params: Params) -> str:
    """SHA-256 over paths, shapes, dtypes and bytes of all leaves: the weights' id of parameters that have no file."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        host = np.ascontiguousarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {host.dtype} {host.shape} ".encode())
        total.update(host.reshape(-1).view(np.uint8).data)
    return total.hexdigest()
