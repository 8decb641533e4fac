"""Tiny tokenizers, made on the spot: one byte-level (Llama 3 style), one with SentencePiece habits (Mistral style)."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The river Amstel flows through Amsterdam, and the Nile through Cairo.",
    "Which river flows through Amsterdam? The question is answered in the passage below.",
    "1234 5678 émigré naïve — 世界 你好 👩‍👩‍👧 e\u0301 Ω  two spaces\n\nand lines.",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}<|end_header|>\n\n"
    "{{ message.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end_header|>\n\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end_header|>", "<|eot|>"]


def _bos(ids: dict[str, int]) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE with special tokens above its vocabulary and a post-processor that adds BOS, as in Llama 3."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.post_processor = _bos({"<s>": tokenizer.token_to_id("<s>")})
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece() -> tokenizers.Tokenizer:
    """A BPE with byte fallback, a space before every text and special tokens inside its vocabulary, as in Mistral."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([text.encode("ascii", "ignore").decode() for text in CORPUS], trainer)
    spec = json.loads(tokenizer.to_str())
    byte_tokens = {f"<0x{byte:02X}>": 500 + byte for byte in range(256)}
    spec["model"]["vocab"] |= byte_tokens
    spec["normalizer"] = None
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = _bos({"<s>": tokenizer.token_to_id("<s>")})
    return tokenizer


@pytest.fixture
def tokenizer_folder(byte_level, tmp_path) -> Path:
    """The byte-level tokenizer as a Hugging Face folder with a chat template and two stop ids."""
    return write_tokenizer_folder(byte_level, tmp_path / "tokenizer")


@pytest.fixture
def sentencepiece_folder(sentencepiece, tmp_path) -> Path:
    """The SentencePiece-style tokenizer as a Hugging Face folder."""
    return write_tokenizer_folder(sentencepiece, tmp_path / "sentencepiece")


def write_tokenizer_folder(tokenizer: tokenizers.Tokenizer, folder: Path) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    stop = [tokenizer.token_to_id("<|eot|>"), tokenizer.token_to_id("<|start|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    return folder
