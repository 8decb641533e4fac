"""The tokenizer inside a GGUF file: its vocabulary and merges as the content of a `tokenizer.json`, without torch.

In: GGUF metadata. Out: a `Tokenizer`. How text is split before merging is not in the file but named by
`tokenizer.ggml.pre`; each name listed here was compared with the tokenizer it stands for, and others are refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

from jfuse.models.tokenizer import Tokenizer

_T = TypeVar("_T")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_STOP_KEYS = ("eos", "eot", "eom")


class _Split(NamedTuple):
    """How a byte-level vocabulary cuts text into words before merging, and its habits."""

    steps: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


def _regex(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_SMOLLM = _Split([{"type": "Digits", "individual_digits": True}])
_QWEN2 = _Split([_regex(_CONTRACTIONS + r"\p{N}" + _REST)], normalizer={"type": "NFC"})
_LLAMA3 = _Split([_regex(_CONTRACTIONS + r"\p{N}{1,3}" + _REST)], ignore_merges=True, add_bos=True)
_SPLITS = {"smollm": _SMOLLM, "qwen2": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes.

    Raises:
        ValueError: a kind of vocabulary or pre-tokenizer that is not supported, or lists that contradict each other.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens, types = _vocabulary(metadata)
    if kind == "gpt2":
        if pre not in _SPLITS:
            raise ValueError(f"The GGUF pre-tokenizer is {pre!r}; jfuse knows {', '.join(_SPLITS)}.")
        split = _SPLITS[pre]
        spec, add_bos = _byte_level(tokens, types, metadata, split), split.add_bos
    elif kind == "llama":
        spec, add_bos = _sentencepiece(tokens, types, metadata), True
    else:
        raise ValueError(
            f"The GGUF tokenizer model is {kind!r}; jfuse reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)."
        )
    spec["added_tokens"] = [
        {"id": i, "content": tokens[i], "special": kind == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    return Tokenizer(
        spec,
        special_tokens=_special_tokens(metadata, tokens),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        stop_ids=[metadata[key] for name in _STOP_KEYS if (key := f"tokenizer.ggml.{name}_token_id") in metadata],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _is_list(tokens, str):
        raise ValueError("The GGUF file has no vocabulary (tokenizer.ggml.tokens must be a list of texts).")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not _is_list(types, int) or len(types) != len(tokens):
        raise ValueError(
            f"The GGUF vocabulary has {len(tokens)} tokens, but tokenizer.ggml.token_type does not fit it."
        )
    return tokens, types


def _is_list(value: Any, kind: type[_T]) -> TypeGuard[list[_T]]:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    roles = {}
    for name, role in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise ValueError(
                f"The GGUF file's {role} has id {token_id!r}; its vocabulary has ids 0..{len(tokens) - 1}."
            )
        roles[role] = tokens[token_id]
    return roles


def _byte_level(tokens: list[str], types: list[int], metadata: Mapping[str, Any], split: _Split) -> dict[str, Any]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not _is_list(merges, str):
        raise ValueError("The GGUF file has no merges (tokenizer.ggml.merges must be a list of texts).")
    own_split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is _SMOLLM}
    model = {
        "vocab": _ids(tokens, types),
        "merges": merges,
        "ignore_merges": split.ignore_merges,
        "byte_fallback": False,
    }
    return {
        "version": "1.0",
        "normalizer": split.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split.steps, own_split]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "unk_token": None, "fuse_unk": False, **model},
    }


def _sentencepiece(tokens: list[str], types: list[int], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A SentencePiece BPE vocabulary with byte fallback (Llama 2, Mistral); merges follow from the scores."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not _is_list(scores, float) or len(scores) != len(tokens):
        raise ValueError("The GGUF vocabulary needs one score per token (tokenizer.ggml.scores).")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
    scheme = {"prepend_scheme": "first" if prefix else "never", "split": False}
    model = {"vocab": _ids(tokens, types), "merges": _merges(tokens, types, scores), "byte_fallback": True}
    return {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, **scheme},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "unk_token": unknown, "fuse_unk": True, "ignore_merges": False, **model},
    }


def _ids(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Padding entries of a vocabulary are no tokens: their spelling in a text is text."""
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED}
    if len(ids) != sum(kind != UNUSED for kind in types):
        raise ValueError("The GGUF vocabulary lists a token twice.")
    return ids


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """Every pair of tokens that makes up a token, best score first; no merge makes a control token or a byte."""
    normal = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    pairs = [
        (-scores[i], -len(left), normal[left], normal[right])
        for token, i in normal.items()
        for left, right in ((token[:at], token[at:]) for at in range(1, len(token)))
        if left in normal and right in normal
    ]
    return [[tokens[left], tokens[right]] for *_, left, right in sorted(pairs)]
