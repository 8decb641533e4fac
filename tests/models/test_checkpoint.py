"""Orbax checkpoints: a round trip changes nothing; weights that do not fit or are not the saved ones are refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.models.checkpoint import is_checkpoint, load_checkpoint, save_checkpoint
from jfuse.models.decoder import Model
from jfuse.models.params import random_params
from jfuse.models.rope import LongRope, default_rope
from jfuse.models.tiny import tiny_config
from jfuse.models.tokenizer_files import read_tokenizer


def tiny_model(family="llama", dtype=jnp.float32, tokenizer=None, **overrides) -> Model:
    config = tiny_config(family, **overrides)
    return Model(config, random_params(config, jax.random.key(0), dtype), tokenizer, "made in this test")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, family, dtype, tokenizer_folder):
    model = tiny_model(family, jnp.dtype(dtype), read_tokenizer(tokenizer_folder), tied=True)
    folder = save_checkpoint(model, tmp_path / "deep" / "model")
    again = load_checkpoint(folder, dtype=dtype)
    assert again.config == model.config and again.tokenizer == model.tokenizer
    assert jax.tree.structure(again.params) == jax.tree.structure(model.params)
    for before, after in zip(jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True):
        assert isinstance(after, jax.Array) and after.dtype == before.dtype
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before))
    assert again.weights_id == load_checkpoint(folder).weights_id != model.weights_id
    assert is_checkpoint(folder) and not is_checkpoint(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # nothing half-written beside it


def test_dtype_in_memory_is_the_callers(tmp_path):
    folder = save_checkpoint(tiny_model(dtype=jnp.bfloat16), tmp_path / "model")
    wide, stored = load_checkpoint(folder, dtype="float32"), load_checkpoint(folder, dtype="bfloat16")
    assert (wide.dtype, stored.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(wide.params["embed"]["table"], stored.params["embed"]["table"].astype(jnp.float32))
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        load_checkpoint(folder, dtype="float8")


@pytest.mark.parametrize(("stored", "asked", "word"), [(2, 4, "missing"), (4, 2, "unused")])
def test_another_number_of_layers_is_refused(tmp_path, stored, asked, word):
    """W-12: Orbax alone would load part of it."""
    folder = save_checkpoint(tiny_model(num_layers=stored), tmp_path / "model")
    with pytest.raises(ValueError, match=f"blocks/attn_norm/scale layers 2..3 are {word}.*blocks/qkv/kernel layers 2"):
        load_checkpoint(folder, config=tiny_config(num_layers=asked))
    content = json.loads((folder / "jfuse.json").read_text())
    content["config"]["num_layers"] = asked
    (folder / "jfuse.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=word):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "blocks/k_norm/scale is missing; blocks/q_norm/scale is missing"),
        ({"tied": True}, "head/kernel is unused"),
        ({"mlp_width": 80}, r"blocks/down/kernel is \[4, 64, 32\], the config needs \[4, 80, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(tmp_path, changes, message):
    """W-12."""
    model = tiny_model()
    folder = save_checkpoint(model, tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder, config=dataclasses.replace(model.config, **changes))


def test_other_weights_under_the_same_config_are_refused(tmp_path):
    model = tiny_model()
    folder = save_checkpoint(model, tmp_path / "a")
    table = model.params["embed"]["table"].at[0, 0].add(1.0)
    other = save_checkpoint(model.replace(params=model.params | {"embed": {"table": table}}), tmp_path / "b")
    (folder / "jfuse.json").write_text((other / "jfuse.json").read_text())
    with pytest.raises(ValueError, match="not those that were saved"):
        load_checkpoint(folder)


def test_damaged_weights_are_refused(tmp_path):
    folder = save_checkpoint(tiny_model(), tmp_path / "model")
    largest = max((path for path in (folder / "params").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(ValueError, match="Run jfuse convert again"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "has format 2; this jfuse reads 1"),
        (lambda c: c["config"].pop("width"), r"config's fields is \['width'\]"),
        (lambda c: c["config"].update(extra=1), r"config's fields is \['extra'\]"),
        (lambda c: c["config"].update(num_layers="4"), "num_layers is '4'"),
        (lambda c: c["config"].update(num_layers=True), "num_layers is True"),
        (lambda c: c["config"]["rope"].update(inv_freq=[1]), r"rope.inv_freq is \[1\]"),
        (lambda c: c.update(config=[]), r"config is \[\]"),
    ],
)
def test_damaged_configs_are_refused(tmp_path, change, message):
    folder = save_checkpoint(tiny_model(), tmp_path / "model")
    content = json.loads((folder / "jfuse.json").read_text())
    change(content)
    (folder / "jfuse.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


def test_longrope_is_stored_with_its_short_set_in_force(tmp_path):
    short, long = default_rope(16, 10_000.0), default_rope(16, 50_000.0)
    model = tiny_model("phi3", rope=long, longrope=LongRope(short, long, 512))
    folder = save_checkpoint(model, tmp_path / "model")
    assert load_checkpoint(folder).config.rope == short
    assert load_checkpoint(folder, longest_request=600).config == model.config


def test_folders_in_use_are_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        save_checkpoint(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="jfuse.json is absent"):
        load_checkpoint(tmp_path)
