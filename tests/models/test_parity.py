"""Logits, keys, values and greedy tokens against transformers (torch), on tiny random checkpoints of every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.models.decoder import logits, prefill
from jfuse.models.load import load_hf
from jfuse.models.tiny import tiny_model
from jfuse.types import PAD_POSITION

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT, NEW, BUCKET = 40, 32, 72
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.4], "long_factor": [1.0, 2.5, 6.0, 9.0]}


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),  # W-01
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-size": ("Llama", {"head_dim": 12}),
    "llama-linear": ("Llama", rope("linear", factor=2.0)),
    "llama-llama3": ("Llama", rope("llama3", **LLAMA3)),
    "llama-yarn": ("Llama", rope("yarn", **YARN)),  # R-02, attention_factor absent
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn-1.0": ("Qwen2", rope("yarn", attention_factor=1.0, **YARN)),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),  # W-03, W-05
    "qwen3-yarn-1.2": ("Qwen3", {"head_dim": 16, "attention_bias": True, **rope("yarn", attention_factor=1.2, **YARN)}),
    "phi3": ("Phi3", {"hidden_size": 160, "num_attention_heads": 40, "num_key_value_heads": 10}),  # W-04
    "phi3-partial": ("Phi3", {"hidden_size": 64, **rope("default", partial_rotary_factor=0.75)}),
    "phi3-longrope-short": ("Phi3", {"original_max_position_embeddings": 128, **rope("longrope", **FACTORS)}),
    "phi3-longrope-long": ("Phi3", {"original_max_position_embeddings": 32, **rope("longrope", **FACTORS)}),
}
SLOW = ("llama-tied", "llama-head-size", "llama-linear", "qwen2-yarn-1.0")  # seconds each; others cover their parts


def save_reference(folder, family, overrides, seed=0, **save):
    """A random transformers model, saved; its norm scales are not one and its biases not zero."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            else:
                weight.copy_((0.3 if name.endswith("bias") else weight.shape[-1] ** -0.5) * torch.randn_like(weight))
    model.save_pretrained(folder, **save)
    return model


def forward(model, tokens):
    """One length for all calls, so that the layer is compiled once a model."""
    positions = np.where(np.arange(BUCKET) < len(tokens), np.arange(BUCKET), PAD_POSITION).astype(np.int32)
    out = prefill(model, np.pad(np.asarray(tokens, np.int32), (0, BUCKET - len(tokens))), positions)
    return np.asarray(logits(model.config, model.params, out.hidden))[: len(tokens)], out.kv


def greedy(model, tokens, count):
    tokens = tokens.tolist()
    for _ in range(count):
        tokens.append(int(forward(model, tokens)[0][-1].argmax()))
    return tokens


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_parity_with_transformers(case, tmp_path):
    family, overrides = CASES[case]
    reference = save_reference(tmp_path, family, overrides, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    longest = PROMPT + NEW
    model = load_hf(tmp_path, dtype="float32", longest_request=longest)
    if "longrope" in case:
        model.config.check_request(longest)
        assert (model.config.rope == model.config.longrope.short) == case.endswith("short")
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], PROMPT)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)[None], use_cache=True)
        continued = reference.generate(torch.tensor(tokens)[None], max_new_tokens=NEW, do_sample=False)[0].tolist()

    scores, kv = forward(model, tokens)

    np.testing.assert_allclose(scores, expected.logits[0], rtol=0, atol=1e-4)
    for ours, theirs in zip(kv, expected.past_key_values.layers, strict=True):
        np.testing.assert_allclose(ours.k[:PROMPT], theirs.keys[0].transpose(0, 1), rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours.v[:PROMPT], theirs.values[0].transpose(0, 1), rtol=0, atol=1e-4)
    assert greedy(model, tokens, NEW) == continued


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_qk_norm_matters(which):
    """W-05: without its scales the logits differ."""
    model = tiny_model(jax.random.key(0), "qwen3", num_layers=2)
    blocks = model.params["blocks"]
    ones = jax.tree.map(jnp.ones_like, blocks[which])
    without = model.replace(params=model.params | {"blocks": blocks | {which: ones}})
    tokens = np.arange(PROMPT)
    assert np.abs(forward(model, tokens)[0] - forward(without, tokens)[0]).max() > 1e-2
