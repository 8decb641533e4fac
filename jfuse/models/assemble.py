"""From named checkpoint tensors to the stacked parameter tree, with a ledger that accounts for every tensor.

In: a `ModelConfig` and a `TensorSource` that reads tensors by the names of a Hugging Face llama checkpoint (weights
[out, in]). Out: the tree of `jfuse.models.params`, one leaf at a time: besides the finished leaves only the tensors
being copied are held. Loaders of other formats rename and re-order their tensors and come through here too.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jfuse.models.config import ModelConfig
from jfuse.models.params import Params, Path, build_params, param_shapes

BLOCK = "model.layers.{}."
MODULES: dict[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens",),
    "attn_norm": (BLOCK + "input_layernorm",),
    "qkv": (BLOCK + "self_attn.q_proj", BLOCK + "self_attn.k_proj", BLOCK + "self_attn.v_proj"),
    "q_norm": (BLOCK + "self_attn.q_norm",),
    "k_norm": (BLOCK + "self_attn.k_norm",),
    "o": (BLOCK + "self_attn.o_proj",),
    "mlp_norm": (BLOCK + "post_attention_layernorm",),
    "gate_up": (BLOCK + "mlp.gate_proj", BLOCK + "mlp.up_proj"),
    "down": (BLOCK + "mlp.down_proj",),
    "final_norm": ("model.norm",),
    "head": ("lm_head",),
}
FUSED_MODULES: dict[str, tuple[str, ...]] = {
    "qkv": (BLOCK + "self_attn.qkv_proj",),
    "gate_up": (BLOCK + "mlp.gate_up_proj",),
}
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # a buffer that old checkpoints saved; the config says the same
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorSource(NamedTuple):
    """The tensors of one checkpoint, by Hugging Face llama name, read on demand."""

    origin: str  # what an error message calls it: a folder or a file
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor there is, whether wanted or not
    read: Callable[[str], np.ndarray]  # a floating-point array; called once a tensor, possibly from several threads


class Part(NamedTuple):
    """One tensor of the checkpoint and the output columns it fills in its leaf."""

    name: str
    shape: tuple[int, ...]
    columns: slice


def assemble(config: ModelConfig, source: TensorSource, *, dtype: Any, fused: bool = False) -> Params:
    """Reads every expected tensor once and stacks them into the parameter tree, on the default device.

    Args:
        dtype: of the parameters, whatever the checkpoint's.
        fused: the checkpoint holds q/k/v, and gate/up, as one tensor each (Phi-3).

    Raises:
        ValueError: tensors missing, unused or of the wrong shape (all are listed), or a NaN or infinite weight.
    """
    check_ledger(config, source, fused=fused)
    if config.tied and HEAD in source.shapes and not np.array_equal(source.read(HEAD), source.read(EMBEDDING)):
        raise ValueError(
            f"{source.origin}: the config ties the output head to the embedding, but {HEAD} differs from {EMBEDDING}. "
            "Set tie_word_embeddings to false in config.json if the head is meant to be used."
        )

    def leaf(path: Path, shape: tuple[int, ...]) -> jax.Array:
        return jax.device_put(_filled(source, leaf_parts(config, path, fused=fused), path, shape, np.dtype(dtype)))

    return build_params(config, leaf)


def check_ledger(config: ModelConfig, source: TensorSource, *, fused: bool = False) -> tuple[str, ...]:
    """Compares the checkpoint's tensors with those that the config expects, before any is read.

    Returns:
        The tensors that are there and known to be redundant: saved RoPE buffers, and the head of a tied model.

    Raises:
        ValueError: lists missing tensors, tensors nothing uses, and wrong shapes.
    """
    if config.num_layers > len(source.shapes):  # so that an absurd count is not spelled out layer by layer
        raise ValueError(
            f"{source.origin}: the config asks for {config.num_layers} layers, but there are only "
            f"{len(source.shapes)} tensors. Use the config.json that belongs to these weights."
        )
    expected = {
        part.name: part.shape
        for path in param_shapes(config)
        for layer in leaf_parts(config, path, fused=fused)
        for part in layer
    }
    extra = [name for name in source.shapes if name not in expected]
    ignored = [name for name in extra if name.endswith(IGNORED_SUFFIXES) or (config.tied and name == HEAD)]
    unused = sorted(set(extra) - set(ignored))
    missing = sorted(set(expected) - set(source.shapes))
    wrong = [
        f"{name} is {list(source.shapes[name])}, the config needs {list(shape)}"
        for name, shape in expected.items()
        if name in source.shapes and tuple(source.shapes[name]) != shape
    ]
    faults = [
        f"{len(names)} {what}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        for what, names in (("missing", missing), ("unused", unused), ("of the wrong shape", wrong))
        if names
    ]
    if faults:
        raise ValueError(
            f"{source.origin}: the weights do not fit the config ({config.family}, {config.num_layers} layers). "
            f"Tensors {'; '.join(faults)}. Use the config.json that belongs to these weights."
        )
    return tuple(sorted(ignored))


def leaf_parts(config: ModelConfig, path: Path, *, fused: bool = False) -> list[list[Part]]:
    """The tensors that make up one leaf: a list per layer (one list outside the blocks), in column order."""
    shape = param_shapes(config)[path]
    stacked = path[0] == "blocks"
    module, kind = path[-2:]
    names = (FUSED_MODULES if fused else {}).get(module, MODULES[module])
    wanted = shape[1:] if stacked else shape
    rows_first = wanted[::-1] if kind == "kernel" else wanted  # a checkpoint's weight is [out, in]
    widths = {
        1: (rows_first[0],),
        2: (config.mlp_width,) * 2,
        3: (config.num_heads * config.head_size, *(config.num_kv_heads * config.head_size,) * 2),
    }[len(names)]
    ends = np.cumsum(widths).tolist()
    suffix = ".bias" if kind == "bias" else ".weight"
    return [
        [
            Part(name.format(layer) + suffix, (width, *rows_first[1:]), slice(end - width, end))
            for name, width, end in zip(names, widths, ends, strict=True)
        ]
        for layer in range(shape[0] if stacked else 1)
    ]


def _filled(
    source: TensorSource, layers: list[list[Part]], path: Path, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """One leaf, each tensor cast and copied straight to its place."""
    leaf = _aligned_empty(shape, dtype)
    slots = leaf if path[0] == "blocks" else leaf[None]

    def fill(layer: int) -> None:
        for part in layers[layer]:
            slot = slots[layer].T if path[-1] == "kernel" else slots[layer]
            if not _copy_finite(source.read(part.name), slot[part.columns]):
                raise ValueError(
                    f"{source.origin}: tensor {part.name} holds NaN or infinite values. "
                    "Download or convert the weights again."
                )

    with ThreadPoolExecutor() as pool:  # NumPy copies without the interpreter lock
        for _ in pool.map(fill, range(len(layers))):
            pass
    return leaf


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory on a 64-byte boundary, which a CPU device takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy_finite(tensor: np.ndarray, slot: np.ndarray) -> bool:
    """Casts and copies a tensor; False if it holds NaN or infinity. Blocks stay in cache: slots are strided."""
    for start in range(0, tensor.shape[0], 128):
        rows = tensor[start : start + 128]
        if not np.isfinite(rows).all():
            return False
        slot[start : start + 128] = rows
    return True
