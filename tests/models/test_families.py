"""Reading config.json: sizes, flags, exact parameter counts, and everything that is refused by name."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.models.decoder import RMSNorm, logits
from jfuse.models.families import FAMILIES, config_from_hf
from jfuse.models.params import count_params, random_params, shape_params
from jfuse.models.public import PUBLIC_CONFIGS, public_config
from jfuse.models.tiny import tiny_config, tiny_model

LLAMA, MISTRAL = PUBLIC_CONFIGS["Llama-3.1-8B"], PUBLIC_CONFIGS["Mistral-7B-v0.3"]
QWEN2, QWEN3, PHI = PUBLIC_CONFIGS["Qwen2.5-7B"], PUBLIC_CONFIGS["Qwen3-8B"], PUBLIC_CONFIGS["Phi-4"]


def without(config, *fields):
    return {key: value for key, value in config.items() if key not in fields}


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("SmolLM2-135M-Instruct", 134_515_008, 23_040),
        ("Llama-3.1-8B", 8_030_261_248, 131_072),
        ("Llama-3.2-3B", 3_212_749_824, 114_688),
        ("Mistral-7B-v0.3", 7_248_023_552, 131_072),
        ("Qwen2.5-7B", 7_615_616_512, 57_344),
        ("Qwen3-8B", 8_190_735_360, 147_456),
        ("Qwen3-14B", 14_768_307_200, 163_840),
        ("Phi-4", 14_659_507_200, 204_800),
    ],
)
def test_public_configurations_have_their_published_sizes(name, parameters, kv_bytes):
    config = public_config(name)
    leaves = jax.tree.leaves(shape_params(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == count_params(config) == parameters
    assert config.kv_bytes_per_token() == kv_bytes
    assert config.kv_bytes_per_token(4) == 2 * kv_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_real_parameters(family, tied):
    config = tiny_config(family, tied=tied)
    params = random_params(config, jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shape_params(config)
    )
    assert ("head" in params) != tied


def test_logits_of_an_untied_head_are_not_rounded_to_bfloat16():
    """Products of bfloat16 weights and states, summed in float32 and left there, as a tied head's are."""
    model = tiny_model(jax.random.key(0), tied=False, dtype=jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(1), (5, model.config.width), jnp.bfloat16)
    scores = np.asarray(logits(model.config, model.params, hidden))
    norm = RMSNorm(model.config.norm_eps).apply({"params": model.params["final_norm"]}, hidden)
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (norm, model.params["head"]["kernel"])]
    np.testing.assert_allclose(scores, wide[0] @ wide[1], rtol=1e-4, atol=1e-5)
    assert (scores != scores.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.5


def test_explicit_fields_come_before_derived_ones():
    """W-03: head_dim and num_key_value_heads are read where given and derived where absent or null."""
    small = QWEN3 | {"hidden_size": 1024, "num_attention_heads": 16}
    assert config_from_hf(small).head_size == 128
    assert config_from_hf(without(small, "head_dim")).head_size == 128  # the family's own default, not 64
    assert config_from_hf(without(LLAMA, "head_dim")).head_size == 128
    assert config_from_hf(LLAMA | {"head_dim": None}).head_size == 128
    assert config_from_hf(LLAMA | {"head_dim": 64}).head_size == 64
    assert config_from_hf(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 32
    assert not config_from_hf(without(LLAMA, "tie_word_embeddings")).tied


def test_family_flags():
    bias = {"attention_bias": True}
    llama, qwen3 = config_from_hf(LLAMA | bias | {"mlp_bias": True}), config_from_hf(QWEN3 | bias)
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.mlp_bias, qwen3.qk_norm) == (True, True, False, True)
    qwen2 = config_from_hf(QWEN2)
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    assert config_from_hf(without(LLAMA, "architectures") | {"model_type": "llama"}) == config_from_hf(LLAMA)


@pytest.mark.parametrize(
    "architecture",
    ["Gemma2ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "LlamaModel"],
)
def test_unknown_architectures_are_refused_by_name(architecture):
    """W-07: soft-capping, sinks, mixtures of experts, latent attention; the supported families are listed."""
    with pytest.raises(ValueError, match=f"{architecture} is not supported") as error:
        config_from_hf(LLAMA | {"architectures": [architecture]})
    assert all(family.architecture in str(error.value) for family in FAMILIES.values())
    with pytest.raises(ValueError, match="model_type 'gemma2' is not supported"):
        config_from_hf(without(LLAMA, "architectures") | {"model_type": "gemma2"})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"attn_logit_softcapping": 50.0}, "logit soft-capping .attn_logit_softcapping = 50.0."),
        (LLAMA, {"final_logit_softcapping": 30.0}, "logit soft-capping"),
        (MISTRAL, {"num_local_experts": 8}, "mixture of experts .num_local_experts = 8."),
        (QWEN3, {"num_experts": 128}, "mixture of experts"),
        (LLAMA, {"num_attention_sinks": 4}, "attention sinks"),
        (LLAMA, {"use_attention_sinks": True}, "attention sinks .use_attention_sinks = True."),
        (LLAMA, {"num_attention_sinks": 1}, "attention sinks"),
        (LLAMA, {"is_encoder_decoder": True}, "an encoder"),
        (LLAMA, {"kv_lora_rank": 512}, "latent attention"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        (LLAMA, {"logits_scaling": 8.0}, "scaled residuals, embeddings or logits"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        (MISTRAL, {"attention_bias": True}, "attention_bias is True, but MistralForCausalLM has never"),
        (QWEN2, {"attention_bias": False}, "attention_bias is False, but Qwen2ForCausalLM has always"),
        (PHI, {"mlp_bias": True}, "mlp_bias is not implemented for Phi3ForCausalLM"),
        (LLAMA, {"hidden_size": 4097}, "hidden_size 4097 is no multiple of 32 heads"),
        (LLAMA, {"hidden_size": None}, "hidden_size is None; a positive integer"),
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        (LLAMA, {"vocab_size": 0}, "vocab_size is 0"),
        (LLAMA, {"num_key_value_heads": 5}, "num_heads is 32 and num_kv_heads is 5"),
        (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps is None"),
        (LLAMA, {"head_dim": 63}, "head size 63 turns 63 dimensions"),
        (PHI, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear', which is not implemented for Phi3"),
    ],
)
def test_features_that_are_refused(config, change, message):
    """W-07 and its kin: an error instead of a wrong forward pass."""
    with pytest.raises(ValueError, match=message):
        config_from_hf(config | change)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (MISTRAL, {"sliding_window": None}),
        (MISTRAL, {"sliding_window": 32768}),
        (PHI, {"sliding_window": 262_144}),
        (QWEN2, {"use_sliding_window": False, "sliding_window": 4096}),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}),
        (QWEN3, {"layer_types": ["full_attention"] * 36, "sliding_window": None}),
    ],
)
def test_windows_that_nobody_feels_are_full_attention(config, change):
    """K-08."""
    assert config_from_hf(config | change) == config_from_hf(without(config, "sliding_window"))


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (MISTRAL, {"sliding_window": 4096}, "sliding_window limits attention to 4096 of the model's 32768"),
        (PHI, {"sliding_window": 2047}, "sliding_window limits attention to 2047"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}, "to 4096 of"),
        (QWEN3, {"layer_types": ["chunked_attention"]}, "layer_types has chunked_attention"),
        (MISTRAL, {"sliding_window": "wide"}, "sliding_window is 'wide'"),
    ],
)
def test_active_windows_are_refused(config, change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(config | change)


def test_yarn_serves_the_scaled_length():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = config_from_hf(QWEN2 | {"max_position_embeddings": 32768, "rope_scaling": scaling})
    assert config.max_positions == 131_072


def test_requests_beyond_the_model_are_refused():
    """R-09: the error names both numbers."""
    config = public_config("Mistral-7B-v0.3")
    config.check_request(32768)
    with pytest.raises(ValueError, match="needs 32769 positions .* serves 1 to 32768"):
        config.check_request(32769)
    with pytest.raises(ValueError, match="needs 40000 positions"):
        config.for_requests(40_000)
    assert config.for_requests(100) is config.for_requests(None) is config


def test_longrope_set_is_chosen_by_the_longest_request():
    factors = {"short_factor": [1.0] * 48, "long_factor": [float(n + 1) for n in range(48)]}
    config = config_from_hf(
        PHI
        | {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
        | {"rope_scaling": {"type": "longrope", **factors}}
    )
    both = config.longrope
    assert config.rope == both.short == config.for_requests(4096).rope
    long = config.for_requests(4097)
    assert long.rope == both.long
    assert dataclasses.replace(long, rope=config.rope) == config
    assert long.for_requests(None) is long
    config.check_request(4096)
    long.check_request(4097)
    with pytest.raises(ValueError, match="5000 positions, more than the longrope boundary of 4096, but the short"):
        config.check_request(5000)
    with pytest.raises(ValueError, match="300 positions, not more than the longrope boundary of 4096, but the long"):
        long.check_request(300)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi_names_longrope_in_three_ways(kind):
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    longer = {"max_position_embeddings": 65536, "rope_scaling": {"type": kind, **factors}}
    assert config_from_hf(PHI | longer).longrope.boundary == 16384


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="'Llama-9' is|named 'Llama-9'; listed: SmolLM2-135M-Instruct"):
        public_config("Llama-9")
    with pytest.raises(ValueError, match="family is 'gemma'; use one of llama, mistral, qwen2, qwen3, phi3"):
        tiny_config("gemma")
