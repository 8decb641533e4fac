"""What may enter a chunk store: a chunk of the store's model, of consistent shapes and finite entries."""

import numpy as np
from jaxtyping import Float, Int32

from jfuse.fingerprint import Fingerprint, checked_tokens
from jfuse.store.layout import KV_DTYPES, all_finite
from jfuse.types import Chunk

Halves = list[tuple[np.ndarray, np.ndarray]]


def admitted(
    chunk: Chunk, fingerprint: Fingerprint
) -> tuple[Int32[np.ndarray, " C"], Halves, Float[np.ndarray, "L C"]]:
    """Tokens, keys and values by layer, and anchor scores, on the host.

    Raises:
        ValueError: says what about the chunk cannot be stored.
    """
    tokens = checked_tokens(chunk.tokens)
    if chunk.origin is not None and chunk.origin != fingerprint.digest:
        raise ValueError(
            f"the chunk's origin is {chunk.origin[:12]}…, and this store holds caches of {fingerprint.digest[:12]}…: "
            "another model or anchor rule made it. Encode it with the model that the store was opened for, "
            "encode_chunk(model, tokens, anchor_rule=store.anchor_rule)."
        )
    if fingerprint.kv_dtype not in KV_DTYPES:
        raise ValueError(f"chunks of dtype {fingerprint.kv_dtype} cannot be stored; use one of {', '.join(KV_DTYPES)}.")
    kv = [(np.asarray(layer.k), np.asarray(layer.v)) for layer in chunk.kv]
    if not kv:
        raise ValueError("a chunk without layers cannot be stored; encode it with encode_chunk.")
    expected = (len(tokens), *kv[0][0].shape[1:])
    for l, pair in enumerate(kv):
        for name, half in zip(("keys", "values"), pair, strict=True):
            _check_half(half, expected, fingerprint.kv_dtype, f"the {name} of layer {l}")
    score = np.asarray(chunk.anchor_score)
    if score.shape != (len(kv), len(tokens)):
        raise ValueError(f"anchor_score has shape {score.shape}; it needs {(len(kv), len(tokens))} [layers, tokens].")
    score = score.astype(np.float32)
    if np.isnan(score).any():
        raise ValueError("anchor_score holds NaN; a chunk with such scores has no anchors. Encode it again.")
    return tokens, kv, score


def _check_half(half: np.ndarray, expected: tuple[int, ...], dtype: str, what: str) -> None:
    if half.ndim != 3 or half.shape != expected:
        raise ValueError(f"{what} have shape {half.shape}; this chunk needs {expected} [tokens, KV heads, head size].")
    if half.dtype.name != dtype:
        raise ValueError(
            f"{what} are {half.dtype.name}, but the store's fingerprint says {dtype}; "
            "encode the chunk with the model that the store was opened for."
        )
    if not all_finite(half):
        raise ValueError(f"{what} hold NaN or infinity, which would spoil every answer; the chunk was not stored.")
