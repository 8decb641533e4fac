"""The bytes that each token stands for, so that an answer can be decoded token by token.

In: the `decoder` of a `tokenizer.json`. Out: a `PieceReader`. Supported are byte-level vocabularies (SmolLM2, Llama 3,
Qwen, Phi-4), SentencePiece-style ones (Mistral, Phi-3), and words joined by spaces (no decoder at all).
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space


class PieceReader(NamedTuple):
    """Bytes by token id, and whether a text loses the space it starts with."""

    read: Callable[[int], bytes]
    strip_start: bool


def piece_reader(decoder: Mapping[str, Any] | None, id_to_token: Callable[[int], str | None]) -> PieceReader:
    """The reader for one vocabulary. Ids without a token read as no bytes.

    Raises:
        ValueError: a decoder of another kind.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if not kinds:
        to_bytes, strip_start = _word, True
    elif kinds == ["ByteLevel"]:
        to_bytes, strip_start = _byte_level, False
    elif kinds == ["Metaspace"]:
        to_bytes, strip_start = _sentencepiece, steps[0].get("prepend_scheme", "always") != "never"
    elif set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and _replaces_space(steps):
        to_bytes, strip_start = _sentencepiece, any(step.get("start") for step in steps)
    else:
        raise ValueError(
            f"The tokenizer's decoder is {' + '.join(map(str, kinds))}; "
            "jfuse supports byte-level and SentencePiece-style decoders."
        )

    def read(token_id: int) -> bytes:
        token = id_to_token(token_id)
        return b"" if token is None else to_bytes(token)

    return PieceReader(read, strip_start)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _replaces_space(steps: list[Mapping[str, Any]]) -> bool:
    replacements = [step for step in steps if step.get("type") == "Replace"]
    return bool(replacements) and all(
        step.get("pattern") == {"String": _SPACE} and step.get("content") == " " for step in replacements
    )


def _word(token: str) -> bytes:
    return b" " + token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _byte_level(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # an added token, spelled as it is
        return token.encode()


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2, `bytes_to_unicode`).

    Printable Latin-1 bytes stand for themselves; the other 68 take the characters from U+0100 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + i): byte for i, byte in enumerate(others)}
