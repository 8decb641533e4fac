"""The supported model families, and the reading of a Hugging Face config.json.

In: the config as a dict. Out: a `ModelConfig`, or an error that names what is not implemented. Explicit fields are read
before any is derived, and what would change the forward pass without being implemented is refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jfuse.models.config import ModelConfig
from jfuse.models.rope import LongRope
from jfuse.models.rope_scaling import SCALED_KEYS, make_rope, rope_settings


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints differs from plain llama.

    Attributes:
        models: public models of the family.
        tested: how its forward pass was checked.
        attention_bias: whether q, k and v have a bias and the output none; None where the config's attention_bias
            decides for all four.
        fused: checkpoints hold q/k/v, and gate/up, as one tensor each.
        rope_aliases: further names that its configs give to longrope.
        window_flag: a sliding window counts only with use_sliding_window.
        head_size: of configs that do not give head_dim; None means width / heads.
    """

    name: str
    architecture: str
    models: tuple[str, ...]
    tested: str = "transformers, tiny random weights"
    attention_bias: bool | None = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    partial_rotary: bool = False
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_aliases: tuple[str, ...] = ()
    window_flag: bool = False
    head_size: int | None = None


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            ("Llama 3.1", "Llama 3.2", "SmolLM2"),
            tested="transformers, tiny random weights and SmolLM2-135M",
            attention_bias=None,
            mlp_bias=True,
        ),
        Family("mistral", "MistralForCausalLM", ("Mistral 7B v0.3",)),
        Family("qwen2", "Qwen2ForCausalLM", ("Qwen2.5",), attention_bias=True, window_flag=True),
        Family(
            "qwen3", "Qwen3ForCausalLM", ("Qwen3",), attention_bias=None, qk_norm=True, window_flag=True, head_size=128
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            ("Phi-3", "Phi-4"),
            fused=True,
            partial_rotary=True,
            rope_types=("default", "longrope"),
            rope_aliases=("su", "yarn"),
        ),
    )
}
NEUTRAL_AT_ONE = ("residual_multiplier", "embedding_multiplier", "logits_scaling")
REFUSED_FIELDS: dict[str, tuple[str, ...]] = {
    "logit soft-capping": ("attn_logit_softcapping", "final_logit_softcapping"),
    "a mixture of experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size"),
    "attention sinks": ("attention_sinks", "use_attention_sinks", "num_attention_sinks", "num_sink_tokens"),
    "latent attention": ("kv_lora_rank", "q_lora_rank"),
    "chunked or temperature-scaled attention": ("attention_chunk_size", "attn_temperature_tuning"),
    "scaled residuals, embeddings or logits": NEUTRAL_AT_ONE,
    "quantised weights": ("quantization_config", "compression_config"),
    "an encoder": ("is_encoder_decoder", "add_cross_attention"),
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face config.json.

    longrope models start with their short set; see `ModelConfig.for_requests`.

    Raises:
        ValueError: an architecture or a feature that is not implemented (by name), or a missing or malformed field.
    """
    family = family_of(config)
    _check_features(family, config)
    width, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    given = config.get("head_dim") if config.get("head_dim") is not None else family.head_size
    if given is None and width % heads:
        raise ValueError(
            f"config.json: hidden_size {width} is no multiple of {heads} heads, and head_dim is not given."
        )
    head_size = width // heads if given is None else _integer({"head_dim": given}, "head_dim")
    kv_heads = heads if config.get("num_key_value_heads") is None else _integer(config, "num_key_value_heads")
    layers, trained = _integer(config, "num_hidden_layers"), _integer(config, "max_position_embeddings")
    rope, max_positions = _rope(family, config, head_size, trained)
    _check_full_attention(family, config, layers, max_positions)
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise ValueError(f"config.json: rms_norm_eps is {eps!r}; a number between 0 and 1 is needed.")
    configured_bias = bool(config.get("attention_bias"))
    return ModelConfig(
        family=family.name,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        mlp_width=_integer(config, "intermediate_size"),
        vocab_size=_integer(config, "vocab_size"),
        norm_eps=float(eps),
        max_positions=max_positions,
        rope=rope.short if isinstance(rope, LongRope) else rope,
        longrope=rope if isinstance(rope, LongRope) else None,
        qkv_bias=configured_bias if family.attention_bias is None else family.attention_bias,
        out_bias=configured_bias if family.attention_bias is None else False,
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings")),
    )


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its `architectures`, or by `model_type` where that is absent.

    Raises:
        ValueError: not a supported architecture; the message lists those that are.
    """
    architectures = config.get("architectures") or []
    name = architectures[0] if architectures else f"model_type {config.get('model_type')!r}"
    for family in FAMILIES.values():
        if name == family.architecture or (not architectures and config.get("model_type") == family.name):
            return family
    supported = ", ".join(f"{family.architecture} ({', '.join(family.models)})" for family in FAMILIES.values())
    raise ValueError(f"The architecture {name} is not supported. Supported: {supported}.")


def _check_features(family: Family, config: Mapping[str, Any]) -> None:
    """Refuses what the one decoder does not compute, naming field and feature."""
    for feature, fields in REFUSED_FIELDS.items():
        for field in fields:
            if config.get(field) and not (field in NEUTRAL_AT_ONE and config[field] == 1.0):
                raise ValueError(
                    f"config.json asks for {feature} ({field} = {config[field]!r}), which is not implemented."
                )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json: the activation hidden_act is {activation!r}; only 'silu' is implemented.")
    bias = config.get("attention_bias")
    if bias is not None and family.attention_bias is not None and bool(bias) != family.attention_bias:
        raise ValueError(
            f"config.json: attention_bias is {bias!r}, but {family.architecture} has "
            f"{'always' if family.attention_bias else 'never'} a bias on q, k and v. Remove the field or correct it."
        )
    if config.get("mlp_bias") and not family.mlp_bias:
        raise ValueError(f"config.json: mlp_bias is not implemented for {family.architecture}. Remove the field.")


def _check_full_attention(family: Family, config: Mapping[str, Any], num_layers: int, max_positions: int) -> None:
    """Refuses a sliding window that some position of some layer would feel, and unknown layer types."""
    types = config.get("layer_types") or ()
    if other := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"config.json: layer_types has {', '.join(other)}; only full attention is implemented.")
    window = config.get("sliding_window")
    if (
        window is None
        or _integer(config, "sliding_window") >= max_positions
        or (family.window_flag and not config.get("use_sliding_window"))
    ):
        return
    spared = bool(types) and "sliding_attention" not in types
    if family.window_flag and (spared or (not types and config.get("max_window_layers", 0) >= num_layers)):
        return
    raise ValueError(
        f"config.json: sliding_window limits attention to {window} of the model's {max_positions} positions, and "
        "sliding windows are not implemented. Use a model with full attention."
    )


def _rope(family: Family, config: Mapping[str, Any], head_size: int, trained: int) -> tuple[Any, int]:
    """The RoPE table or tables, and the positions the model serves."""
    settings = rope_settings(config, aliases=dict.fromkeys(family.rope_aliases, "longrope"))
    kind = settings["rope_type"]
    if kind not in family.rope_types:
        allowed = [name for name in SCALED_KEYS if name in family.rope_types]
        raise ValueError(
            f"The rope type is {kind!r}, which is not implemented for {family.architecture}. "
            f"Implemented: {', '.join(allowed)}."
        )
    if settings["partial_rotary_factor"] != 1.0 and not family.partial_rotary:
        raise ValueError(
            f"partial_rotary_factor is {settings['partial_rotary_factor']}, which {family.architecture} does not have: "
            "transformers would ignore it. Remove the field."
        )
    rope = make_rope(settings, head_size=head_size, max_positions=trained)
    served = trained
    if kind == "yarn" and settings.get(
        "original_max_position_embeddings"
    ):  # many yarn configs leave the trained length
        served = max(served, int(settings["factor"] * settings["original_max_position_embeddings"]))
    return rope, served


def _integer(config: Mapping[str, Any], key: str) -> int:
    """A required positive integer."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r}; a positive integer is needed.")
    return value
