"""Public configurations, for shape-only builds and cost tables; no weights are needed to read them."""

from typing import Any

from jfuse.models.config import ModelConfig
from jfuse.models.families import config_from_hf

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _public(architecture: str, sizes: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    """A config.json with sizes (width, mlp, layers, heads, KV heads, vocabulary, positions)."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("vocab_size", "max_position_embeddings")
    return {"architectures": [architecture], "rms_norm_eps": 1e-5} | dict(zip(names, sizes, strict=True)) | fields


PUBLIC_CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": _public(
        "LlamaForCausalLM",
        (576, 1536, 30, 9, 3, 49152, 8192),
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": _public(
        "LlamaForCausalLM",
        (4096, 14336, 32, 32, 8, 128256, 131072),
        rope_theta=500_000.0,
        rope_scaling=LLAMA3_SCALING | {"factor": 8.0},
    ),
    "Llama-3.2-3B": _public(
        "LlamaForCausalLM",
        (3072, 8192, 28, 24, 8, 128256, 131072),
        head_dim=128,
        rope_theta=500_000.0,
        rope_scaling=LLAMA3_SCALING | {"factor": 32.0},
        tie_word_embeddings=True,
    ),
    "Mistral-7B-v0.3": _public(
        "MistralForCausalLM",
        (4096, 14336, 32, 32, 8, 32768, 32768),
        rope_theta=1_000_000.0,
        sliding_window=None,
    ),
    "Qwen2.5-7B": _public(
        "Qwen2ForCausalLM",
        (3584, 18944, 28, 28, 4, 152064, 131072),
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        sliding_window=131072,
        use_sliding_window=False,
    ),
    "Qwen3-8B": _public(
        "Qwen3ForCausalLM",
        (4096, 12288, 36, 32, 8, 151936, 40960),
        head_dim=128,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
    ),
    "Qwen3-14B": _public(
        "Qwen3ForCausalLM",
        (5120, 17408, 40, 40, 8, 151936, 40960),
        head_dim=128,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
    ),
    "Phi-4": _public(
        "Phi3ForCausalLM",
        (5120, 17920, 40, 40, 10, 100352, 16384),
        rope_theta=250_000.0,
        original_max_position_embeddings=16384,
        sliding_window=None,
    ),
}


def public_config(name: str) -> ModelConfig:
    """The `ModelConfig` of a public model, from its published config.json.

    >>> public_config("Llama-3.1-8B").kv_bytes_per_token()
    131072

    Raises:
        ValueError: no configuration of that name is listed.
    """
    if name not in PUBLIC_CONFIGS:
        raise ValueError(f"No public configuration is named {name!r}; listed: {', '.join(PUBLIC_CONFIGS)}.")
    return config_from_hf(PUBLIC_CONFIGS[name])
