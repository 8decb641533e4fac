"""Models small enough for tests, with the flags of any family and random weights."""

from typing import Any

import jax
import jax.numpy as jnp

from jfuse.models.config import ModelConfig
from jfuse.models.decoder import Model
from jfuse.models.params import digest_params, random_params
from jfuse.models.rope import default_rope

FLAGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "phi3": {},
}
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "width": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
    "mlp_width": 64,
    "vocab_size": 128,
    "norm_eps": 1e-5,
    "max_positions": 4096,
}


def tiny_config(family: str = "llama", **overrides: Any) -> ModelConfig:
    """The config of a tiny model with the flags of `family`; `overrides` are `ModelConfig` fields.

    >>> tiny_config("qwen3", num_layers=2).qk_norm
    True

    Raises:
        ValueError: not a supported family.
    """
    if family not in FLAGS:
        raise ValueError(f"The family is {family!r}; use one of {', '.join(FLAGS)}.")
    fields = SIZES | FLAGS[family] | overrides
    fields.setdefault("rope", default_rope(fields["head_size"], 10_000.0))
    return ModelConfig(family=family, **fields)


def tiny_model(key: jax.Array, family: str = "llama", *, dtype: Any = jnp.float32, **overrides: Any) -> Model:
    """A tiny model with random weights and no tokenizer; equal keys and settings give equal models."""
    config = tiny_config(family, **overrides)
    params = random_params(config, key, dtype)
    return Model(config, params, weights_id=digest_params(params))
