"""Text to token ids and back, so that no text can spell a control token and no answer shows half a character.

In: the content of a `tokenizer.json`, the names of its special tokens, a chat template. Out: a `Tokenizer`. Text
(passages, queries) goes through `encode`; only pieces rendered by the chat template go through `encode_template`.
Neither ever adds a token: the one BOS of a request, where the model wants one, is the first of `chat_parts(...).head`.
"""

import codecs
import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import tokenizers
from jaxtyping import Int

from jfuse.models.pieces import piece_reader
from jfuse.models.tokenizer_spec import build, checked_spec, without_control

TEMPLATE_DATE = "26 Jul 2024"
"""The date shown to chat templates that print one (Llama 3): fixed, so that a prefix stays the same from day to day."""

_SENTINEL = "JFUSEUSERCONTENT"


class ChatParts(NamedTuple):
    """What the chat template writes before and after the user's content; both go through `encode_template`."""

    head: str
    tail: str


class Tokenizer:
    """A tokenizer that treats text as text and control tokens as control tokens.

    Equal tokenizers compare and hash equal, so that a model that holds one can be a static argument of `jax.jit`.

    Attributes:
        bos_id: The id that every request starts with, or None where this tokenizer adds none.
        stop_ids: Every id that ends an answer: the generation config's list and the tokenizer's own EOS.
        special_ids: Ids that `decode` leaves out.
        vocab_size: One more than the largest id.
        bos_policy: `none`, or `first:<id>` where every request starts with exactly one BOS; a field of fingerprints.
        chat_template: The Jinja source, or None for a base model.
        identity: SHA-256 over everything that decides which ids a text gets; any changed merge changes it.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        special_tokens: Mapping[str, str] | None = None,
        add_bos: bool = False,
        stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        """Builds the tokenizer from parsed content; `jfuse.models.tokenizer_files` reads it from files.

        Args:
            spec: The content of a `tokenizer.json`. Its truncation, padding and post-processor are dropped.
            special_tokens: Spelling by role (`bos_token`, `eos_token`, ...), as chat templates name them.
            add_bos: Whether a request starts with the BOS token.
            stop_ids: Ids that end an answer, in addition to the `eos_token`.
            chat_template: Jinja source of the chat template.

        Raises:
            ValueError: damaged content, an unsupported kind of tokenizer, or a special token that has no id.
        """
        spec = {**checked_spec(spec), "truncation": None, "padding": None, "post_processor": None}
        self._json = json.dumps(spec, sort_keys=True, ensure_ascii=False)
        self._with_control = build(self._json)
        self._plain = build(json.dumps(without_control(spec), ensure_ascii=False))
        self._piece = piece_reader(spec.get("decoder"), self._with_control.id_to_token)

        self.special_tokens = dict(special_tokens or {})
        roles = {role: self._role_id(role) for role in ("bos_token", "eos_token") if role in self.special_tokens}
        vocab = self._with_control.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.bos_id: int | None = roles.get("bos_token") if add_bos else None
        self.bos_policy = "none" if self.bos_id is None else f"first:{self.bos_id}"
        own_stop = [roles["eos_token"]] if "eos_token" in roles else []
        self.stop_ids = frozenset(
            check_ids([*stop_ids, *own_stop], self.vocab_size, "stop_ids", allow_empty=True).tolist()
        )
        special = {token["id"] for token in spec["added_tokens"] if token["special"]}
        self.special_ids = self.stop_ids | special
        self.chat_template = chat_template
        self.identity = hashlib.sha256(self._json.encode()).hexdigest()

    def encode(self, text: str) -> Int[np.ndarray, " T"]:
        """Ids of plain text. A control token spelled in it is text like any other; nothing is added.

        SentencePiece-style tokenizers (Mistral, Phi-3) read every text as if it began with a space, so that for them
        `decode` cannot tell a text that did from one that did not.

        Raises:
            ValueError: text that is not valid Unicode (a lone surrogate).
        """
        return np.asarray(_encode(self._plain, text).ids, np.int32)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters `[start, end)` of each token of `encode(text)`, for carrying answer spans to positions."""
        return _encode(self._plain, text).offsets

    def encode_template(self, text: str) -> Int[np.ndarray, " T"]:
        """Ids of a piece that the chat template rendered: spellings of control tokens are control tokens.

        Never give it retrieved or user text.
        """
        return np.asarray(_encode(self._with_control, text).ids, np.int32)

    def decode(self, ids: npt.ArrayLike, *, skip_special: bool = True) -> str:
        """The text of `ids`, up to its last complete character; ids without a token (padded vocabularies) have none."""
        return "".join(self.stream(np.asarray(ids, np.int64).tolist(), skip_special=skip_special))

    def stream(self, ids: Iterable[SupportsIndex], *, skip_special: bool = True) -> Iterator[str]:
        """Text as the ids arrive, never part of a character; joined, it is what `decode` returns.

        Raises:
            ValueError: a negative id.
        """
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        at_start = True
        for token_id in map(operator.index, ids):
            if token_id < 0:
                raise ValueError(f"Cannot decode id {token_id}; ids count from 0.")
            if skip_special and token_id in self.special_ids:
                continue
            text = characters.decode(self._piece.read(token_id))
            if at_start and text:
                text, at_start = text.removeprefix(" ") if self._piece.strip_start else text, False
            if text:
                yield text

    def chat_parts(self, system: str | None, *, thinking: bool = False) -> ChatParts:
        """What stands before and after the user's content, from one rendering of the chat template.

        A base model without a template has no parts but its BOS and the system text. The system text may spell control
        tokens, and it comes from the caller: never pass retrieved text.

        Args:
            system: The system message; None for the template's own default.
            thinking: Whether the model may think aloud first, for templates that know `enable_thinking`.

        Raises:
            ValueError: a template that is damaged, refuses the messages, changes the user's content or repeats the BOS.
        """
        if self.chat_template is None:
            return self._with_one_bos(system + "\n\n" if system else "", "")
        from transformers.utils.chat_template_utils import render_jinja_template  # a second to import: only when needed

        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": _SENTINEL})
        settings = {**self.special_tokens, "enable_thinking": thinking, "date_string": TEMPLATE_DATE}
        try:
            (text,), _ = render_jinja_template(
                [messages], chat_template=self.chat_template, add_generation_prompt=True, **settings
            )
        except Exception as error:  # a template is a program from a stranger: it may raise anything
            remedy = " Try system=None." if system is not None else ""
            raise ValueError(f"The chat template cannot be rendered: {error}.{remedy}") from error
        head, *rest = text.split(_SENTINEL)
        if len(rest) != 1:
            raise ValueError(
                f"The chat template writes the user's content {len(rest)} times; jfuse needs it exactly once. "
                "Use another chat_template.jinja."
            )
        return self._with_one_bos(head, rest[0])

    def _with_one_bos(self, head: str, tail: str) -> ChatParts:
        if self.bos_id is None:
            return ChatParts(head, tail)
        bos = self.special_tokens["bos_token"]
        while head.startswith(bos):
            head = head[len(bos) :]
        if bos in head or bos in tail:
            raise ValueError(f"The chat template writes the BOS token {bos!r} inside the prompt; it may only start it.")
        return ChatParts(bos + head, tail)

    def _role_id(self, role: str) -> int:
        spelling = self.special_tokens[role]
        token_id = self._with_control.token_to_id(spelling)
        if token_id is None:
            raise ValueError(f"The tokenizer's {role} is {spelling!r}, which is not in its vocabulary.")
        return token_id

    @property
    def files(self) -> dict[str, str]:
        """The Hugging Face files that describe this tokenizer, as text by file name."""
        spec = json.loads(self._json) | {"post_processor": self._post_processor()}
        config = {**self.special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        files = {
            "tokenizer.json": json.dumps(spec, ensure_ascii=False),
            "tokenizer_config.json": json.dumps(config, indent=2),
            "generation_config.json": json.dumps({"eos_token_id": sorted(self.stop_ids)}, indent=2),
        }
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template
        return files

    def _post_processor(self) -> dict[str, Any] | None:
        """What tells other readers of `tokenizer.json` to put BOS first."""
        if self.bos_id is None:
            return None
        bos = self.special_tokens["bos_token"]
        first = {"SpecialToken": {"id": bos, "type_id": 0}}
        text, second_text = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        special = {bos: {"id": bos, "ids": [self.bos_id], "tokens": [bos]}}
        templates = {"single": [first, text], "pair": [first, text, second_text]}
        return {"type": "TemplateProcessing", "special_tokens": special, **templates}

    def _key(self) -> tuple:
        special = tuple(sorted(self.special_tokens.items()))
        return self.identity, self.bos_policy, self.stop_ids, self.chat_template, special

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, bos_policy={self.bos_policy!r}, identity={self.identity[:12]})"


def check_ids(ids: npt.ArrayLike, vocab_size: int, name: str, *, allow_empty: bool = False) -> Int[np.ndarray, " T"]:
    """`ids` as an int32 array, after checking that each one is in the vocabulary.

    Args:
        ids: Token ids.
        vocab_size: Size of the vocabulary, usually the model's.
        name: What the ids are, for the error message ("query", "chunk 3").
        allow_empty: Whether there may be none.

    Raises:
        ValueError: no ids, ids that are not one row of integers, or an id outside 0..vocab_size-1.
    """
    array = np.asarray(ids)
    if array.size == 0:
        if allow_empty:
            return np.zeros(0, np.int32)
        raise ValueError(f"{name} is empty; give at least one token.")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}; give one row of integer token ids.")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        where = int(outside[0])
        raise ValueError(
            f"{name} holds id {array[where]} at index {where}, but the vocabulary has ids 0..{vocab_size - 1}. "
            "Encode the text with this model's own tokenizer."
        )
    return array.astype(np.int32)


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text is not valid Unicode at character {error.start}; decode it with errors='replace'."
        ) from error
    return tokenizer.encode(text, add_special_tokens=False)
