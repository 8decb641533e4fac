"""Loads a GGUF file: llama-, qwen2- and qwen3-type models, dequantised into the one parameter tree.

In: a `.gguf` file. Out: a `Model`. Metadata becomes the fields of a Hugging Face config and tensors get Hugging Face
names, so that both formats share one reading of configs, one ledger of tensors and one parameter layout.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jfuse.models.assemble import TensorSource, assemble
from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model
from jfuse.models.families import config_from_hf
from jfuse.models.gguf_file import GGUFFile
from jfuse.models.gguf_tokenizer import gguf_tokenizer
from jfuse.models.load import parameter_dtype
from jfuse.models.rope import Rope

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling as one divisor a frequency
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "rope.freq_base": "rope_theta",
}
_ROPE_FIELDS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_HARMLESS = {"vocab_size", "tensor_data_layout", "expert_used_count", "rope.scaling.finetuned"}
_CHECKED = {"attention.value_length", "rope.dimension_count", "attention.causal", "rope.scaling.attn_factor"}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(path: str | Path, *, dtype: str = "auto", longest_request: int | None = None) -> Model:
    """The model and the tokenizer of one GGUF file.

    Args:
        dtype: of the parameters, whatever the file's quantisation.
        longest_request: positions of the longest request to be served.

    Raises:
        ValueError: a damaged file, or an architecture, feature or quantisation that is not supported (by name).
    """
    file = GGUFFile(path)
    config = gguf_config(file).for_requests(longest_request)
    tokenizer = gguf_tokenizer(file.metadata)
    params = assemble(config, gguf_source(file, config), dtype=parameter_dtype(dtype))
    return Model(config, params, tokenizer, gguf_digest(file))


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model config that the file's metadata describes.

    Raises:
        ValueError: as `config_from_hf`, and for metadata that would change the forward pass without being implemented.
    """
    config = config_from_hf(_hf_config(file))
    if ROPE_FACTORS not in file.tensors:
        return config
    factors = file.read(ROPE_FACTORS).astype(np.float64)
    if config.rope.kind != "default" or factors.shape != (len(config.rope.inv_freq),) or not (factors >= 1).all():
        raise ValueError(f"{file.path}: {ROPE_FACTORS} does not fit the model's RoPE ({config.rope.kind}).")
    scaled = np.asarray(config.rope.inv_freq) / factors
    return dataclasses.replace(config, rope=Rope("llama3", tuple(scaled.tolist())))


def gguf_source(file: GGUFFile, config: ModelConfig) -> TensorSource:
    """The file's tensors under their Hugging Face names, with the rows of llama's q and k put back in order.

    Llama-type files keep the two rows of a RoPE pair next to each other; Hugging Face, and jfuse, half a head apart.
    """
    gguf_names = {_hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    heads = {"attn_q.": config.num_heads, "attn_k.": config.num_kv_heads} if config.family == "llama" else {}

    def read(name: str) -> np.ndarray:
        tensor = file.read(gguf_names[name])
        for part, count in heads.items():
            if part in gguf_names[name]:
                return half_split(tensor, count)
        return tensor

    shapes = {name: file.tensors[gguf_name].shape for name, gguf_name in gguf_names.items()}
    return TensorSource(str(file.path), shapes, read)


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [head, pair, 2] as [head, 2, pair]: RoPE pairs from interleaved to half-split order."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def gguf_digest(file: GGUFFile) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors."""

    def one(name: str) -> bytes:
        info = file.tensors[name]
        return f"{name} {info.kind.name} {list(info.shape)} ".encode() + hashlib.sha256(file.raw(name).data).digest()

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(one, sorted(file.tensors)))).hexdigest()


def _hf_config(file: GGUFFile) -> dict[str, Any]:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} holds the architecture {architecture!r}; jfuse loads {', '.join(ARCHITECTURES)} from GGUF."
        )
    if file.metadata.get("split.count", 0) > 1:
        raise ValueError(f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge.")
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): _plain(v) for key, v in file.metadata.items() if key.startswith(prefix)}
    unknown = sorted(set(values) - set(_FIELDS) - set(_ROPE_FIELDS) - _HARMLESS - _CHECKED)
    if unknown:
        raise ValueError(f"{file.path} asks for {', '.join(prefix + key for key in unknown)}, not implemented.")
    config = {field: values[key] for key, field in _FIELDS.items() if key in values}
    config["architectures"] = [ARCHITECTURES[architecture]]
    config.setdefault("head_dim", _head_size(file, config))
    _check_values(file, values, config["head_dim"])
    scaling = {field: values[key] for key, field in _ROPE_FIELDS.items() if key in values}
    if scaling.get("factor", 1.0) != 1.0 and "rope_type" not in scaling:
        raise ValueError(f"{file.path} has {prefix}rope.scaling.factor but no {prefix}rope.scaling.type; add the type.")
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    config["vocab_size"] = _rows(file, "token_embd.weight")
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return config


def _head_size(file: GGUFFile, config: Mapping[str, Any]) -> int:
    """Rows of q per head: files that do not say have width / heads, which this is too."""
    heads = config.get("num_attention_heads")
    rows = _rows(file, "blk.0.attn_q.weight")
    if type(heads) is not int or heads < 1 or rows % heads:
        raise ValueError(f"{file.path}: attention.head_count is {heads!r}, but q has {rows} rows.")
    return rows // heads


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {name}; it is no complete model.")
    return file.tensors[name].shape[0]


def _check_values(file: GGUFFile, values: Mapping[str, Any], head_size: int) -> None:
    """Metadata that jfuse accepts at one value only."""
    wanted = {"attention.value_length": head_size, "rope.dimension_count": head_size, "attention.causal": True}
    for key, value in (wanted | {"rope.scaling.attn_factor": 1.0}).items():
        if values.get(key, value) != value:
            raise ValueError(f"{file.path}: {key} is {values[key]!r}; jfuse implements {value!r} only.")


def _plain(value: Any) -> Any:
    """A float32 as the decimal it was written from (1e-05, not 9.999999747378752e-06); a constant list as its value."""
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; an unknown one keeps its own, and the ledger lists it as unused."""
    parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if parts is None or parts[2] not in _NAMES:
        return name
    block = f"model.layers.{parts[1]}." if parts[1] else ""
    return f"{block}{_NAMES[parts[2]]}.{parts[3]}"
