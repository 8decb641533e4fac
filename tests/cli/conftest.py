"""A tiny model in a Hugging Face folder that the tests write, passages, a store of them, and the command line."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from jfuse.cli import main
from jfuse.models.resolve import load_model
from jfuse.models.tiny import tiny_model

PASSAGES = [
    {"id": "nile", "title": "Nile", "text": "The Nile flows through Cairo, and it is long."},
    {"id": "amstel", "text": "The Amstel flows through Amsterdam."},
    {"id": "thames", "text": "The Thames flows through London. " * 9},
]


def hf_tensors(params, config) -> dict[str, np.ndarray]:
    """The tensors of a Llama checkpoint, [out, in], by the names that Hugging Face gives them."""
    heads = config.num_heads * config.head_size
    tensors = {
        "model.embed_tokens.weight": params["embed"]["table"],
        "model.norm.weight": params["final_norm"]["scale"],
    }
    tensors["lm_head.weight"] = params["head"]["kernel"].T
    for l in range(config.num_layers):
        block = jax.tree.map(lambda leaf, l=l: np.asarray(leaf[l]), params["blocks"])
        q, k, v = np.split(block["qkv"]["kernel"].T, [heads, heads + config.num_kv_heads * config.head_size])
        gate, up = np.split(block["gate_up"]["kernel"].T, 2)
        kernels = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate}
        kernels |= {"mlp.up_proj": up, "self_attn.o_proj": block["o"]["kernel"].T}
        kernels |= {"mlp.down_proj": block["down"]["kernel"].T, "input_layernorm": block["attn_norm"]["scale"]}
        kernels |= {"post_attention_layernorm": block["mlp_norm"]["scale"]}
        tensors |= {f"model.layers.{l}.{name}.weight": kernel for name, kernel in kernels.items()}
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A Llama of two layers with a byte-level tokenizer and no chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=318, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([passage["text"] for passage in PASSAGES], trainer)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    model = tiny_model(jax.random.key(0), num_layers=2, vocab_size=320)
    c = model.config
    sizes = {"hidden_size": c.width, "intermediate_size": c.mlp_width, "num_hidden_layers": c.num_layers}
    sizes |= {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_size}
    sizes |= {"vocab_size": c.vocab_size, "max_position_embeddings": c.max_positions, "rms_norm_eps": c.norm_eps}
    config = {"architectures": ["LlamaForCausalLM"], "rope_theta": 10_000.0, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(hf_tensors(model.params, c), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="session")
def passages(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("passages") / "passages.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    return path


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """`run(*arguments)` gives exit code, stdout and stderr, from inside an empty folder."""
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()

    def call(*arguments: object) -> tuple[int, str, str]:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["jfuse", *words])  # what manifests call the command
        try:
            code = main(words)
        except SystemExit as leaving:
            code = leaving.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def as_json(run):
    """`as_json(*arguments)` gives the JSON that is all of stdout."""

    def call(*arguments: object):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, ""), err
        return json.loads(out)

    return call


@pytest.fixture(scope="session")
def store(folder, passages, tmp_path_factory) -> Path:
    """A store that holds the passages."""
    path = tmp_path_factory.mktemp("stores") / "store"
    assert main(["encode", str(passages), "--store", str(path), "--model", str(folder), "--chunk-tokens", "32"]) == 0
    return path
