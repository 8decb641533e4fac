"""What a cache belongs to: every field that decides whether stored keys and values may be used, and their digests.

A model, an anchor rule and the file format go in; a `Fingerprint` comes out. Digests are SHA-256 over canonical JSON:
the same in every process, on every machine, whatever PYTHONHASHSEED says. Nothing here imports jax.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

FORMAT_VERSION = 1
"""Version of the stored layout. Raise it whenever the bytes, or what they mean, change."""

KV_LAYOUT = "[layer][k,v][token][kv head][channel], little-endian, keys before RoPE"

MODEL_FIELDS = ("weights_id", "config", "rope")
"""The fields that say which model this is, whatever it runs in and however its text is tokenised."""


@runtime_checkable
class AnchorRuleLike(Protocol):
    """What a fingerprint needs of an anchor rule."""

    @property
    def name(self) -> str:
        """The rule's name."""
        ...

    @property
    def instruction(self) -> tuple[int, ...]:
        """Token ids that the rule runs after a chunk before it scores; empty if there are none."""
        ...


@dataclass(frozen=True)
class Fingerprint:
    """Every field that decides whether a chunk cache may be used. Equal fingerprints and tokens give equal caches.

    Attributes:
        weights_id: SHA-256 over the weights.
        config: digest of the model's config without its RoPE.
        rope: digest of the inverse frequencies and attention factor, hence of the active longrope factor set.
        tokenizer: identity of the tokenizer's files, or "none".
        bos_policy: whether a chunk cache starts with the BOS token.
        anchor_rule: name of the rule whose scores are stored, or "none".
        anchor_instruction: token ids that the rule ran after each chunk.
        anchor_sinks: first tokens of each chunk that the rule keeps whatever their score.
        kv_dtype: dtype of stored keys and values, "bfloat16" for example.
    """

    weights_id: str
    config: str
    rope: str
    tokenizer: str
    bos_policy: str
    anchor_rule: str
    anchor_instruction: tuple[int, ...]
    anchor_sinks: int
    kv_dtype: str
    kv_layout: str = KV_LAYOUT
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(cls, model: Any, *, anchor_rule: AnchorRuleLike | None = None) -> "Fingerprint":
        """The fingerprint of caches that `model` makes.

        Args:
            model: a `Model`, or anything with its `config`, `weights_id`, `tokenizer` and `params`.
            anchor_rule: the rule that scores their anchors; None where only `model_digest` matters.

        Raises:
            ValueError: the model has no weights identity, so its caches could be taken for another model's.
        """
        if not model.weights_id:
            raise ValueError(
                "the model's weights_id is empty, so its caches could be taken for another model's; "
                "load it with load_model, or set weights_id to a SHA-256 of its weights."
            )
        tokenizer = model.tokenizer
        return cls(
            weights_id=model.weights_id,
            config=_digest_of(model.config, without="rope"),
            rope=_digest_of(model.config.rope),
            tokenizer="none" if tokenizer is None else str(tokenizer.identity),
            bos_policy="none" if tokenizer is None else str(tokenizer.bos_policy),
            anchor_rule="none" if anchor_rule is None else anchor_rule.name,
            anchor_instruction=() if anchor_rule is None else tuple(int(token) for token in anchor_rule.instruction),
            anchor_sinks=getattr(anchor_rule, "num_sinks", 0),
            kv_dtype=np.dtype(model.params["embed"]["table"].dtype).name,
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields, in hex."""
        return _sha256(self.to_json())

    @cached_property
    def model_digest(self) -> str:
        """SHA-256 of the fields that identify the model alone: what a critical-layer profile belongs to."""
        return _sha256(canonical_json({name: getattr(self, name) for name in MODEL_FIELDS}))

    def to_json(self) -> str:
        """All fields as canonical JSON."""
        return canonical_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Fingerprint":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: a field is missing, unknown or of another type.
        """
        fields = json.loads(text)
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or fields.keys() != types.keys():
            raise ValueError(f"not a fingerprint: its fields must be {', '.join(types)}")
        instruction = fields["anchor_instruction"]
        if not isinstance(instruction, list) or not all(type(token) is int for token in instruction):
            raise ValueError("not a fingerprint: anchor_instruction must be a list of token ids")
        fields["anchor_instruction"] = tuple(instruction)
        for name, value in fields.items():
            if name != "anchor_instruction" and type(value) is not types[name]:
                raise ValueError(f"not a fingerprint: {name} is {value!r}")
        return cls(**fields)

    def require_model(self, model_digest: str, *, what: str = "critical-layer profile") -> None:
        """Refuses what was made for another model.

        Args:
            model_digest: the `model_digest` that was saved with it.

        Raises:
            ValueError: names both digests.
        """
        if model_digest != self.model_digest:
            raise ValueError(
                f"this {what} was made for the model with fingerprint {model_digest}, "
                f"but this model's fingerprint is {self.model_digest}; make it again for this model."
            )


def differing(a: Fingerprint, b: Fingerprint) -> tuple[str, ...]:
    """Names of the fields in which two fingerprints differ, in the order of the class."""
    names = [field.name for field in dataclasses.fields(Fingerprint)]
    return tuple(name for name in names if getattr(a, name) != getattr(b, name))


def chunk_id(fingerprint: Fingerprint, tokens: Any) -> str:
    """The content address of a chunk: 64 hex digits of SHA-256 over the fingerprint and the token ids.

    Raises:
        ValueError: no tokens, or ids outside 0..2^31-1.
    """
    return id_of_digests(fingerprint, tokens_digest(checked_tokens(tokens)))


def id_of_digests(fingerprint: Fingerprint, tokens_sha256: str) -> str:
    """`chunk_id` from the digest of the tokens, for readers of a file's header."""
    return _sha256(f"jfuse chunk\n{fingerprint.digest}\n{tokens_sha256}")


def tokens_digest(tokens: Int32[np.ndarray, " C"]) -> str:
    """SHA-256 over little-endian int32 token ids."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").data).hexdigest()


def checked_tokens(tokens: Any) -> Int32[np.ndarray, " C"]:
    """Token ids as a one-dimensional int32 array.

    Raises:
        ValueError: no tokens, not one-dimensional, not integers, or outside 0..2^31-1.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"a chunk's tokens have shape {ids.shape} and dtype {ids.dtype}; give one or more ids, one-dimensional."
        )
    if ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(f"a chunk's tokens span {ids.min()}..{ids.max()}; ids must lie in 0..{2**31 - 1}.")
    return np.ascontiguousarray(ids, np.int32)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; floats by their shortest exact form, NaN and infinity refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a fingerprint cannot hold {value!r} of type {type(value).__name__}; use numbers and strings.")


def _digest_of(settings: Any, *, without: str = "") -> str:
    fields = dataclasses.asdict(settings)
    fields.pop(without, None)
    return _sha256(canonical_json({"type": type(settings).__name__, **fields}))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
