"""RoPE tables against transformers and against float64; rotation laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.models.decoder import prefill
from jfuse.models.families import config_from_hf
from jfuse.models.public import PUBLIC_CONFIGS, public_config
from jfuse.models.rope import Rope, angles, default_rope
from jfuse.models.rope_scaling import make_rope, rope_settings
from jfuse.models.tiny import tiny_model
from jfuse.pallas.rotate import rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": np.linspace(1, 2, 48).tolist(),
    "long_factor": np.geomspace(1, 60, 48).tolist(),
}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn attention 1.0": YARN | {"attention_factor": 1.0},
    "yarn attention 1.2": YARN | {"attention_factor": 1.2},
    "yarn mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn lone mscale": YARN | {"mscale": 0.7},
    "yarn betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn no truncation": YARN | {"truncate": False},
    "yarn factor null": YARN | {"factor": None, "original_max_position_embeddings": 16384},
}


def vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def place(rope, x, positions):
    return rotate(jnp.asarray(x), *angles(rope, np.asarray(positions)))


def turned_float64(rope, x, positions):
    """Independent reference: each pair as one complex number, in float64."""
    half = len(rope.inv_freq)
    pairs = x[..., :half].astype(np.float64) + 1j * x[..., half : 2 * half]
    pairs = pairs * rope.attention_factor * np.exp(1j * np.outer(positions, rope.inv_freq))[:, None]
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind):
    """R-01, R-02, pitfall 19."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = KINDS[kind] | {"rope_theta": 500_000.0}
    reference = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=512, num_attention_heads=4, max_position_embeddings=65536, rope_parameters=dict(settings)
        )
    )
    rope = make_rope(rope_settings({"rope_parameters": settings}), head_size=128, max_positions=65536)
    assert isinstance(rope, Rope)
    np.testing.assert_allclose(rope.inv_freq, reference.inv_freq.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("original", [4096, 131072])
def test_longrope_sets_equal_transformers(original):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.75,
        "rope_theta": 10_000.0,
        "rope_scaling": LONGROPE,
    }
    reference = transformers.Phi3Config(hidden_size=512, num_attention_heads=4, **config)
    both = make_rope(rope_settings(config), head_size=128, max_positions=131072)
    assert both.boundary == original
    for ours, length in ((both.at(original), original), (both.at(original + 1), original + 1)):
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](reference, None, seq_len=length)
        np.testing.assert_allclose(ours.inv_freq, inv_freq.numpy(), rtol=1e-6)
        assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert both.short.inv_freq != both.long.inv_freq


def test_llama3_scaling_changes_placed_keys():
    """R-01: the control with the plain table differs by more than 1e-2."""
    small = LLAMA3 | {"original_max_position_embeddings": 64}
    scaled = make_rope(rope_settings({"rope_scaling": small}), head_size=16, max_positions=4096)
    keys = vectors(0, 48, 2, 16)
    positions = np.arange(200, 248)
    gap = np.abs(place(scaled, keys, positions) - place(default_rope(16, 10_000.0), keys, positions)).max()
    assert gap > 1e-2


@pytest.mark.parametrize(
    ("name", "position", "tolerance"),
    [
        (name, position, tolerance)
        for name in PUBLIC_CONFIGS
        for position, tolerance in ((4095, 1e-3), (32767, 3e-3), (131071, 6e-3))
        if position < public_config(name).max_positions
    ],
)
def test_phases_against_float64_table(name, position, tolerance):
    """R-05, pitfall 16: phases are float32 whatever the model's dtype."""
    rope = public_config(name).rope
    cos, sin = angles(rope, np.array([position], np.int32))
    assert cos.dtype == jnp.float32
    phase = position * np.array(rope.inv_freq)
    np.testing.assert_allclose(cos[0], np.cos(phase), rtol=0, atol=tolerance)
    np.testing.assert_allclose(sin[0], np.sin(phase), rtol=0, atol=tolerance)


def test_key_placed_far_away_equals_direct_computation():
    """Pitfall 16: position 100 000."""
    rope, keys = public_config("Llama-3.1-8B").rope, vectors(1, 4, 2, 128)
    positions = np.arange(100_000, 100_004)
    direct = turned_float64(rope, keys, positions)
    np.testing.assert_allclose(place(rope, keys, positions), direct, atol=2e-2)
    in_bfloat16 = place(rope, jnp.asarray(keys, jnp.bfloat16), positions)
    np.testing.assert_allclose(in_bfloat16.astype(jnp.float32), direct, atol=5e-2)


@pytest.mark.parametrize(("share", "rotary"), [(1.0, 128), (0.75, 96), (0.5, 64)])
def test_rotation_is_half_split_and_leaves_the_rest(share, rotary):
    """R-04, pitfall 19: pairs are (i, i + F); dimensions past the rotary part stay bit-identical, in any dtype."""
    settings = rope_settings({"rope_theta": 10_000.0, "partial_rotary_factor": share})
    rope = make_rope(settings, head_size=128, max_positions=4096)
    assert 2 * len(rope.inv_freq) == rotary
    keys, positions = vectors(2, 6, 3, 128), np.array([0, 1, 17, 200, 201, 4095])
    placed = place(rope, keys, positions)
    np.testing.assert_allclose(placed, turned_float64(rope, keys, positions), atol=2e-3)
    np.testing.assert_array_equal(placed[..., rotary:], keys[..., rotary:])
    np.testing.assert_array_equal(placed[0], keys[0])
    narrow = jnp.asarray(keys, jnp.bfloat16)
    np.testing.assert_array_equal(place(rope, narrow, positions)[..., rotary:], narrow[..., rotary:])


def test_rotations_add_up():
    """Pitfall 15: R(a)R(b) = R(a + b), and R(-a) undoes R(a)."""
    rope, keys = default_rope(64, 10_000.0), vectors(3, 1, 2, 64)
    np.testing.assert_allclose(place(rope, place(rope, keys, [70]), [130]), place(rope, keys, [200]), atol=1e-5)
    np.testing.assert_allclose(place(rope, place(rope, keys, [130]), [-130]), keys, atol=1e-5)


def test_attention_factor_multiplies_once():
    """R-02, pitfall 19: one factor on keys and one on queries, wherever they stand."""
    rope = make_rope(rope_settings({"rope_scaling": KINDS["yarn attention 1.2"]}), head_size=64, max_positions=131072)
    keys = vectors(4, 3, 2, 64)
    norms = np.linalg.norm(keys, axis=-1)
    for positions in (np.array([0, 7, 9]), np.array([200, 300, 4000])):
        np.testing.assert_allclose(np.linalg.norm(place(rope, keys, positions), axis=-1), 1.2 * norms, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "llama3"),
        ("mistral", "yarn attention 1.2"),
        ("qwen2", "yarn"),
        ("qwen3", "linear"),
    ]
    + [("phi3", "longrope"), ("phi3", "partial")],
)
def test_values_are_never_rotated(family, kind):
    """Pitfalls 17 and 18: layer-0 values do not depend on the position; keys are those of position 0, rotated."""
    settings = KINDS | {
        "partial": {"partial_rotary_factor": 0.75},
        "longrope": {"rope_type": "longrope", "attention_factor": 1.1, "original_max_position_embeddings": 64}
        | {"short_factor": [1.0] * 8, "long_factor": list(range(1, 9))},
    }
    table = make_rope(rope_settings({"rope_scaling": settings[kind]}), head_size=16, max_positions=4096)
    rope = table if isinstance(table, Rope) else table.long
    model = tiny_model(jax.random.key(0), family, rope=rope, num_layers=1)
    tokens = np.arange(8, dtype=np.int32)
    at_start = prefill(model, tokens, np.zeros(8, np.int32)).kv[0]
    away = prefill(model, tokens, np.arange(500, 508, dtype=np.int32)).kv[0]
    np.testing.assert_array_equal(at_start.v, away.v)
    turned = 2 * len(rope.inv_freq)
    unrotated = np.array(at_start.k)
    unrotated[..., :turned] /= rope.attention_factor
    np.testing.assert_allclose(place(rope, unrotated, np.arange(500, 508)), away.k, atol=1e-4)
    assert np.abs(at_start.k - away.k)[..., :turned].max() > 0.1
    np.testing.assert_array_equal(at_start.k[..., turned:], away.k[..., turned:])


def test_both_spellings_give_one_table():
    """R-06: legacy `type`, rope_scaling and rope_parameters; null is the default."""
    base = PUBLIC_CONFIGS["Llama-3.1-8B"] | {"rope_scaling": None, "rope_theta": 500_000.0}
    legacy = {"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    spellings = [
        base | {"rope_scaling": LLAMA3},
        base | {"rope_scaling": legacy},
        {key: value for key, value in base.items() if not key.startswith("rope_")}
        | {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}},
    ]
    first, *others = [config_from_hf(config).rope for config in spellings]
    assert first.kind == "llama3"
    assert all(other == first for other in others)
    without = {key: value for key, value in base.items() if key != "rope_scaling"}
    assert config_from_hf(base).rope == config_from_hf(without).rope == default_rope(128, 500_000.0)


def test_unknown_rope_settings_are_named_in_one_warning():
    """R-06."""
    settings = {"rope_type": "linear", "factor": 2.0, "finetuned": True, "beta_fast": 32}
    with pytest.warns(UserWarning, match="'linear' does not use are ignored: beta_fast, finetuned") as record:
        unusual = config_from_hf(PUBLIC_CONFIGS["Mistral-7B-v0.3"] | {"rope_scaling": settings})
    assert len(record) == 1
    plain = {"rope_type": "linear", "factor": 2.0}
    assert unusual.rope == config_from_hf(PUBLIC_CONFIGS["Mistral-7B-v0.3"] | {"rope_scaling": plain}).rope


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' .*each request's length.*not implemented"),
        ({"rope_type": "mrope"}, "'mrope', which is not implemented. Implemented: default, linear, llama3"),
        ({"rope_type": "linear"}, "factor is None"),
        ({"rope_type": "linear", "factor": -2}, "factor is -2"),
        ({"rope_type": "linear", "factor": "8"}, "factor is '8'"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is None"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0 and low_freq_factor is 1.0"),
        ({"rope_type": "yarn"}, "factor is None"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type .full_attention."),
        ([1.0], "rope_scaling is .1.0.; it must be an object"),
    ],
)
def test_rope_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(PUBLIC_CONFIGS["Mistral-7B-v0.3"] | {"rope_scaling": settings})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_local_base_freq": 10_000.0}, "rope_local_base_freq gives layers different RoPE"),
        ({"rope_theta": {"full_attention": 1e6}}, "rope_theta is {'full_attention'"),
        ({"rope_scaling": {"factor": 2}, "rope_parameters": {"factor": 4}}, "differ in factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which MistralForCausalLM does not have"),
    ],
)
def test_fields_beside_the_settings_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(PUBLIC_CONFIGS["Mistral-7B-v0.3"] | fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"long_factor": [1.0] * 47}, "long_factor must be a list of 48 positive numbers; found 47 entries"),
        ({"short_factor": None}, "short_factor must be a list of 48 positive numbers; found None"),
        ({"short_factor": [0.0] * 48}, "short_factor must be a list of 48 positive numbers"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is None"),
    ],
)
def test_longrope_settings_that_are_refused(change, message):
    settings = LONGROPE | {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=message):
        make_rope(settings | {"partial_rotary_factor": 1.0} | change, head_size=96, max_positions=131072)


def test_partial_rotation_must_be_even():
    settings = rope_settings({"partial_rotary_factor": 0.7})
    with pytest.raises(ValueError, match="0.7 of head size 10 turns 7 dimensions"):
        make_rope(settings, head_size=10, max_positions=64)
