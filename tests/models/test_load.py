"""Loading a model folder: the ledger, shards, hostile files, ties, dtypes and the weights' id."""

import json
import math
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jfuse.models.assemble import TensorSource, assemble, check_ledger, leaf_parts
from jfuse.models.families import config_from_hf
from jfuse.models.load import load_hf, parameter_dtype
from jfuse.models.params import param_shapes
from jfuse.models.shards import read_header

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
PHI = CONFIG | {"architectures": ["Phi3ForCausalLM"]}


def random_tensors(config=CONFIG, dtype=np.float32):
    parsed, rng = config_from_hf(config), np.random.default_rng(0)
    fused = parsed.family == "phi3"
    parts = [part for path in param_shapes(parsed) for layer in leaf_parts(parsed, path, fused=fused) for part in layer]
    return {part.name: rng.normal(size=part.shape).astype(dtype) for part in parts}


def write(folder, tensors, config=CONFIG):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_sharded(folder, tensors):
    names = sorted(tensors)
    shards = {f"model-0000{n + 1}-of-00003.safetensors": names[n::3] for n in range(3)}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_tensors_land_in_their_places(tmp_path):
    """W-04: q, k, v and gate, up in order; kernels transposed; layers stacked; fused and separate files alike."""
    tensors = random_tensors()
    model = load_hf(write(tmp_path, tensors), dtype="float32")
    blocks = model.params["blocks"]
    layer = "model.layers.1."
    qkv = [tensors[f"{layer}self_attn.{name}_proj.weight"].T for name in "qkv"]
    gate_up = [tensors[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up")]
    np.testing.assert_array_equal(blocks["qkv"]["kernel"][1], np.concatenate(qkv, axis=1))
    np.testing.assert_array_equal(blocks["gate_up"]["kernel"][1], np.concatenate(gate_up, axis=1))
    np.testing.assert_array_equal(blocks["down"]["kernel"][1], tensors[f"{layer}mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(model.params["head"]["kernel"], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(model.params["embed"]["table"], tensors["model.embed_tokens.weight"])

    fused = {name: tensor for name, tensor in tensors.items() if not name.endswith(("q_proj.weight", "k_proj.weight"))}
    for n in range(2):
        block = f"model.layers.{n}."
        joined = [tensors[f"{block}self_attn.{name}_proj.weight"] for name in "qkv"]
        fused[f"{block}self_attn.qkv_proj.weight"] = np.concatenate(joined)
        joined = [tensors[f"{block}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        fused[f"{block}mlp.gate_up_proj.weight"] = np.concatenate(joined)
        for name in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            del fused[f"{block}{name}.weight"]
    phi = load_hf(write(tmp_path, fused, PHI), dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, model.params, phi.params)


def test_sharded_and_single_files_are_the_same_model(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    tensors = random_tensors()
    one = load_hf(write(tmp_path / "one", tensors), dtype="float32")
    write_sharded(tmp_path / "many", tensors)
    many = load_hf(tmp_path / "many", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, one.params, many.params)
    assert one.weights_id == many.weights_id
    assert len(one.weights_id) == 64

    tensors["model.norm.weight"][3] += 1e-3
    assert load_hf(write(tmp_path / "one", tensors), dtype="float32").weights_id != one.weights_id


def test_absent_shard_is_named(tmp_path):
    """W-02."""
    write_sharded(tmp_path, random_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard model-00002-of-00003.safetensors, which is absent"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/outside.safetensors", "..\\outside.safetensors", "weights.bin", 7]
)
def test_shards_outside_the_folder_are_refused(tmp_path, shard):
    weight_map = write_sharded(tmp_path, random_tensors())
    weight_map["model.norm.weight"] = shard
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="places tensor model.norm.weight in .* inside the model folder"):
        load_hf(tmp_path)


def test_index_and_shards_must_agree(tmp_path):
    tensors = random_tensors()
    weight_map = write_sharded(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    wrong = "model-00001-of-00003.safetensors"
    wrong = wrong if weight_map["model.norm.weight"] != wrong else "model-00002-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": wrong}}))
    with pytest.raises(ValueError, match=f"places tensor model.norm.weight in {wrong}, which does not hold it"):
        load_hf(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / wrong)
    with pytest.raises(ValueError, match="Tensor model.norm.weight is in both"):
        load_hf(tmp_path)
    for content in ("{", "[]", "{}", '{"weight_map": {}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match="index.json: "):
            load_hf(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.pkl"])
def test_pickled_weights_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=f"only pickled weights .{name}., which can run code .* safetensors"):
        load_hf(tmp_path)


def test_folders_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="config.json is absent"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is no valid JSON"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        load_hf(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="give its own path: .*tiny.gguf"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (4, r"18 missing: model.layers.2.input_layernorm.weight, .*, \.\.\."),
        (1, r"9 unused: model.layers.1.input_layernorm.weight, .*"),
        (1_000_000_000, "asks for 1000000000 layers, but there are only 21 tensors"),
    ],
)
def test_layer_count_must_fit_the_weights(tmp_path, layers, message):
    """W-12: in both directions, and without spelling out an absurd one."""
    write(tmp_path, random_tensors(), CONFIG | {"num_hidden_layers": layers})
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path)


def test_ledger_lists_every_fault_at_once(tmp_path):
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 32), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    del tensors["lm_head.weight"]
    with pytest.raises(
        ValueError, match="1 missing: lm_head.weight; 1 unused: .*q_proj.bias; 1 of the wrong shape"
    ) as error:
        load_hf(write(tmp_path, tensors))
    assert "k_proj.weight is [32, 32], the config needs [16, 32]" in str(error.value)


def test_redundant_tensors_are_listed_as_ignored():
    tensors = random_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    source = TensorSource("here", {name: tensor.shape for name, tensor in tensors.items()}, tensors.__getitem__)
    assert check_ledger(config_from_hf(CONFIG), source) == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    tied = config_from_hf(CONFIG | {"tie_word_embeddings": True})
    assert "lm_head.weight" in check_ledger(tied, source)
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        assemble(tied, source, dtype=np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert "head" not in assemble(tied, source, dtype=np.float32)


def test_every_tensor_is_read_exactly_once():
    tensors, read = random_tensors(), []

    def reader(name):
        read.append(name)
        return tensors[name]

    source = TensorSource("here", {name: tensor.shape for name, tensor in tensors.items()}, reader)
    assemble(config_from_hf(CONFIG), source, dtype=np.float32)
    assert sorted(read) == sorted(tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_refused(tmp_path, value, dtype):
    tensors = random_tensors(dtype=dtype)
    tensors["model.layers.1.mlp.up_proj.weight"][47, 31] = value
    with pytest.raises(ValueError, match="tensor model.layers.1.mlp.up_proj.weight holds NaN or infinite values"):
        load_hf(write(tmp_path, tensors))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["auto", "float32", "bfloat16"])
def test_dtypes(tmp_path, stored, wanted):
    tensors = random_tensors(dtype=stored)
    model = load_hf(write(tmp_path, tensors), dtype=wanted)
    expected = parameter_dtype(wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(expected)} == {model.dtype}
    table = tensors["model.embed_tokens.weight"].astype(expected)
    np.testing.assert_array_equal(np.asarray(model.params["embed"]["table"]), table)


def test_unusable_dtypes(tmp_path):
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    with pytest.raises(ValueError, match="tensor lm_head.weight has dtype I8; weights must be F32, F16, BF16"):
        load_hf(write(tmp_path, tensors))
    with pytest.raises(ValueError, match="dtype is 'float16'; use one of auto, float32, bfloat16"):
        parameter_dtype("float16")


def test_stacking_holds_no_second_copy():
    """Only the leaf being filled is allocated: an aligned host buffer becomes the CPU array itself."""
    config = config_from_hf(CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8})
    parts = [part for path in param_shapes(config) for layer in leaf_parts(config, path) for part in layer]
    source = TensorSource(
        "here",
        {part.name: part.shape for part in parts},
        lambda name: np.broadcast_to(np.float32(1), source.shapes[name]),
    )
    size = 4 * sum(math.prod(shape) for shape in param_shapes(config).values())
    with jax.default_device(jax.devices("cpu")[0]):
        tracemalloc.start()
        params = assemble(config, source, dtype=np.float32)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == size
    assert peak < 1.2 * size


def header_file(folder, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def entry(start, stop, shape=(2, 2), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 16), "b": entry(8, 24)}, "tensor b overlaps the tensor before it"),
        ({"a": entry(0, 16), "b": entry(20, 36)}, "tensor b leaves a gap before it"),
        ({"a": entry(16, 32)}, "tensor a leaves a gap before it"),
        ({"a": entry(0, 16)}, "tensors end at byte .* but the file has"),
        ({"a": entry(0, 1 << 40, (1 << 19, 1 << 19))}, "tensors end at byte"),
        ({"a": entry(0, 16, (2, 3))}, r"shape \[2, 3\] and dtype F32 does not fit its data_offsets"),
        ({"a": entry(0, 16, (1 << 62, 1 << 62))}, "does not fit its data_offsets"),
        ({"a": entry(16, 0)}, "does not fit its data_offsets"),
        ({"a": entry(0, 16, (-2, -2))}, "has the shape"),
        ({"a": entry(0, 16, (2.0, 2))}, "has the shape"),
        ({"a": entry(0, 16, (True, 4))}, "has the shape"),
        ({"a": entry(0, 16, (1,) * 9)}, "has the shape"),
        ({"a": entry(-8, 8)}, "has the data_offsets"),
        ({"a": entry(0, 16, dtype="F33")}, "unknown dtype 'F33'"),
        ({"a": entry(0, 16, dtype=["F32"])}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "must have dtype, shape and data_offsets"),
        ({"a": 3}, "must have dtype, shape and data_offsets"),
        (b'{"a": {}, "a": {}}', "a name occurs twice"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "header is invalid"),
        (b"[" * 100_000, "header is invalid"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header is invalid"),
    ],
)
def test_hostile_headers_are_refused(tmp_path, header, message):
    file = header_file(tmp_path, header, bytes(24))
    with pytest.raises(ValueError, match=message):
        read_header(file)


def test_headers_longer_than_their_file_are_refused(tmp_path):
    for length in (1 << 63, 1 << 40, 3):
        with pytest.raises(ValueError, match=f"claims {length} bytes, but the file has"):
            read_header(header_file(tmp_path, b"{}", length=length))
    file = tmp_path / "short.safetensors"
    file.write_bytes(b"\x02\x00")
    with pytest.raises(ValueError, match="damaged or cut off"):
        read_header(file)


def test_truncated_file_is_refused(tmp_path):
    write(tmp_path, random_tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors: the tensors end at byte"):
        load_hf(tmp_path)
