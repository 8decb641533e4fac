"""The bytes of one stored chunk: a safetensors file whose every byte is covered by a checksum.

```
8 bytes   length of the header
header    JSON: the tensors' places, and in __metadata__ fingerprint, digest of the tokens, checksums
front     seal (checksum of all of the above) | tokens | anchor_score | anchor_offsets
anchors   anchor_kv [L, 2, A, K, H]: layer 0 keys, layer 0 values, layer 1 keys, ...
layers    kv        [L, 2, C, K, H]: the same order, so that a layer, or its keys alone, is one range of the file
```

A chunk's arrays go in and `Encoded` comes out; `read_header` and `jfuse.store.entry` go the other way. Checksums are
xxh3-64, identities SHA-256. Offsets are checked against the file's size before anything is allocated; nothing is
pickled. Nothing here imports jax.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash
from jaxtyping import Float, Int32, UInt8

from jfuse.config import anchor_offsets
from jfuse.fingerprint import FORMAT_VERSION, Fingerprint, canonical_json, id_of_digests, tokens_digest

MAGIC = "jfuse-chunk"
MAX_HEADER_BYTES = 1 << 20
ALIGNMENT = 64  # of the anchor block and the layers, so that a CPU device can alias a mapped layer

KV_DTYPES: dict[str, tuple[str, np.dtype]] = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype(np.float16)),
}


class Damaged(Exception):
    """These bytes are not a whole, unchanged chunk; the message says what is wrong with them."""


class OtherFormat(Exception):
    """These bytes are a whole chunk of another format version."""

    def __init__(self, version: int, tokens_sha256: str):
        super().__init__(f"format_version is {version}, this jfuse reads {FORMAT_VERSION}")
        self.version = version
        self.tokens_sha256 = tokens_sha256


class Shape(NamedTuple):
    """Sizes of a stored chunk."""

    layers: int
    tokens: int
    heads: int
    size: int
    anchors: int
    dtype: str

    @property
    def half_bytes(self) -> int:
        """Bytes of the keys, or of the values, of one layer."""
        return self.tokens * self.heads * self.size * KV_DTYPES[self.dtype][1].itemsize

    @property
    def anchor_half_bytes(self) -> int:
        """Bytes of the anchors' keys, or values, of one layer."""
        return self.anchors * self.heads * self.size * KV_DTYPES[self.dtype][1].itemsize

    @property
    def seal_bytes(self) -> int:
        """Bytes of the seal: a checksum, and zeros up to where the front ends aligned."""
        return 8 + -(8 + self.small_bytes) % ALIGNMENT

    @property
    def small_bytes(self) -> int:
        """Bytes of tokens, anchor scores and anchor offsets."""
        return 4 * (self.tokens + self.layers * self.tokens + self.layers * self.anchors)

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.seal_bytes + self.small_bytes + 2 * self.layers * (self.half_bytes + self.anchor_half_bytes)

    def table(self) -> dict[str, dict[str, Any]]:
        """The safetensors table: name to dtype, shape and data_offsets."""
        kind = KV_DTYPES[self.dtype][0]
        layers, tokens, anchors, rest = self.layers, self.tokens, self.anchors, (self.heads, self.size)
        rows: list[tuple[str, str, list[int], int]] = [
            ("seal", "U8", [self.seal_bytes], self.seal_bytes),
            ("tokens", "I32", [tokens], 4 * tokens),
            ("anchor_score", "F32", [layers, tokens], 4 * layers * tokens),
            ("anchor_offsets", "I32", [layers, anchors], 4 * layers * anchors),
            ("anchor_kv", kind, [layers, 2, anchors, *rest], 2 * layers * self.anchor_half_bytes),
            ("kv", kind, [layers, 2, tokens, *rest], 2 * layers * self.half_bytes),
        ]
        table, start = {}, 0
        for name, dtype, shape, count in rows:
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + count]}
            start += count
        return table


class Checksums(NamedTuple):
    """xxh3-64, in hex, of every part of the data that is read on its own."""

    small: str
    layers: list[list[str]]  # [L][keys, values]
    anchors: list[list[str]]


class Header(NamedTuple):
    """What a file says of itself, after its seal was checked."""

    fingerprint: Fingerprint
    tokens_sha256: str
    shape: Shape
    anchor_ratio: float
    checksums: Checksums
    data_start: int

    @property
    def id(self) -> str:
        """The content address that this header amounts to."""
        return id_of_digests(self.fingerprint, self.tokens_sha256)


class Encoded(NamedTuple):
    """A chunk's bytes in parts, not yet joined."""

    id: str
    header: Header
    parts: tuple[UInt8[np.ndarray, " _"], ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.header.data_start + self.header.shape.data_bytes


def encode(
    fingerprint: Fingerprint,
    tokens: Int32[np.ndarray, " C"],
    kv: Sequence[tuple[np.ndarray, np.ndarray]],
    anchor_score: Float[np.ndarray, "L C"],
    *,
    anchor_ratio: float = 0.1,
) -> Encoded:
    """The bytes of one chunk. Arrays that are contiguous are not copied."""
    score = np.ascontiguousarray(anchor_score, np.float32)
    offsets = anchor_offsets(score, anchor_ratio)
    halves = [(np.ascontiguousarray(k), np.ascontiguousarray(v)) for k, v in kv]
    # take copies: the anchor rows of a layer become one range
    anchors = [(k[rows], v[rows]) for (k, v), rows in zip(halves, offsets, strict=True)]
    heads, size = halves[0][0].shape[1:]
    shape = Shape(len(halves), len(tokens), heads, size, offsets.shape[1], halves[0][0].dtype.name)
    small = [as_bytes(array) for array in (tokens, score, offsets)]
    checksums = Checksums(
        checksum(*small),
        [[checksum(as_bytes(k)), checksum(as_bytes(v))] for k, v in halves],
        [[checksum(as_bytes(k)), checksum(as_bytes(v))] for k, v in anchors],
    )
    header = Header(fingerprint, tokens_digest(tokens), shape, anchor_ratio, checksums, 0)
    text = _header_text(header)
    seal = np.zeros(shape.seal_bytes, np.uint8)
    seal[:8] = np.frombuffer(xxhash.xxh3_64_digest(text), np.uint8)
    head = [np.frombuffer(text, np.uint8), seal, *small]
    pairs = [as_bytes(half) for pair in (*anchors, *halves) for half in pair]
    return Encoded(header.id, header._replace(data_start=len(text)), (*head, *pairs))


def header_length(first: bytes, file_bytes: int) -> int:
    """Bytes up to the data, from the first 8 bytes of a file.

    Raises:
        Damaged: too short to be a chunk, or the header would not fit into the file.
    """
    if len(first) < 8:
        raise Damaged("the file is empty" if file_bytes == 0 else f"truncated to {file_bytes} bytes")
    length = struct.unpack("<Q", first[:8])[0]
    if length > MAX_HEADER_BYTES or 8 + length + 8 > file_bytes:
        raise Damaged(f"its header would take {length} bytes of a file of {file_bytes}")
    return 8 + length


def read_header(head: bytes, file_bytes: int) -> Header:
    """Reads and checks a header.

    Args:
        head: the first `header_length(...) + 8` bytes of the file, at least.
        file_bytes: the file's true size.

    Raises:
        Damaged: the seal is broken, or a size or offset is not what the format says.
        OtherFormat: a whole chunk of another format version.
    """
    start = header_length(head, file_bytes)
    if xxhash.xxh3_64_digest(head[:start]) != head[start : start + 8]:
        raise Damaged("its header does not match its seal (damaged, or not written by jfuse)")
    try:
        header = _parsed(json.loads(head[8:start]), start)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Damaged(f"its header is malformed ({type(error).__name__}: {error})") from error
    if start + header.shape.data_bytes != file_bytes:
        raise Damaged(f"it has {file_bytes} bytes instead of {start + header.shape.data_bytes}")
    return header


def checksum(*parts: UInt8[np.ndarray, " _"]) -> str:
    """xxh3-64 over the parts, in hex."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part.data)
    return state.hexdigest()


def as_bytes(array: np.ndarray) -> UInt8[np.ndarray, " _"]:
    """The array's bytes in C order; no copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def all_finite(array: np.ndarray) -> bool:
    """Whether no entry is NaN or infinite: no entry has all exponent bits set."""
    bits = np.ascontiguousarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)
    infinity = np.asarray(np.inf, array.dtype).view(bits.dtype)
    magnitude = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    return bits.size == 0 or bool((bits & magnitude).max() < infinity)


def _header_text(header: Header) -> bytes:
    metadata = {
        "format": MAGIC,
        "format_version": str(header.fingerprint.format_version),
        "fingerprint": header.fingerprint.to_json(),
        "tokens_sha256": header.tokens_sha256,
        "anchor_ratio": repr(header.anchor_ratio),
        "checksums": canonical_json(header.checksums._asdict()),
    }
    text = canonical_json({"__metadata__": metadata, **header.shape.table()}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _parsed(fields: dict[str, Any], start: int) -> Header:
    metadata = fields.pop("__metadata__")
    if metadata["format"] != MAGIC:
        raise ValueError(f"format is {metadata['format']!r}")
    version = int(metadata["format_version"])
    if version != FORMAT_VERSION:
        raise OtherFormat(version, str(metadata.get("tokens_sha256")))
    layers, _, tokens, heads, size = _sizes(fields["kv"]["shape"])
    dtypes = {kind: name for name, (kind, _) in KV_DTYPES.items()}
    shape = Shape(layers, tokens, heads, size, _sizes(fields["anchor_kv"]["shape"])[2], dtypes[fields["kv"]["dtype"]])
    if fields != shape.table():
        raise ValueError("the tensors do not lie where the format puts them")
    checksums = Checksums(**json.loads(metadata["checksums"]))
    if not len(checksums.layers) == len(checksums.anchors) == layers:
        raise ValueError("the number of checksums is not that of layers")
    fingerprint = Fingerprint.from_json(metadata["fingerprint"])
    return Header(fingerprint, metadata["tokens_sha256"], shape, float(metadata["anchor_ratio"]), checksums, start)


def _sizes(shape: list[int]) -> list[int]:
    if len(shape) != 5 or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise ValueError(f"a shape is {shape}")
    return shape
