"""Reads the GGUF container: metadata and tensors, every length checked against the file before anything is allocated.

In: the path of a `.gguf` file (version 2 or 3, little-endian). Out: a `GGUFFile`. The `gguf` package supplies the
tables of types and the dequantisation; its reader is not used, because it believes what a header says and spends
seconds on the arrays of a vocabulary.
"""

import math
import mmap
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_DEQUANTISED = tuple(
    GGMLQuantizationType[name]
    for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split()
)
_SMALLEST_TENSOR_INFO = 8 + 4 + 8 + 4 + 8  # empty name, one dimension
_SMALLEST_ENTRY = 8 + 4 + 1  # empty key, one byte
_MAX_COUNT = (
    2**22
)  # entries of a list; the largest vocabularies have a tenth of it, and a Python list costs more than its file


class TensorInfo(NamedTuple):
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]  # rows first, as in NumPy; the file lists dimensions the other way round
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file whose header has been checked.

    Attributes:
        path: The file.
        metadata: Every key with its value: numbers, text, or lists of them.
        tensors: Every tensor by its name.
    """

    def __init__(self, path: str | Path):
        """Opens and checks the file; reads no weights.

        Raises:
            ValueError: not a GGUF file, a version or type that is not supported, or a header that contradicts the
                file's size or itself.
        """
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ValueError(f"{self.path} has {size} bytes; a GGUF file has at least 24. Download it again.")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self.path, self._data)
        num_tensors, num_entries = header.counts()
        self.metadata = header.metadata(num_entries)
        self.tensors = header.tensors(num_tensors, self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32, in its NumPy shape. May be called from several threads."""
        info = self.tensors[name]
        rows = self.raw(name).reshape(*info.shape[:-1], -1)
        return gguf.quants.dequantize(rows, info.kind).reshape(info.shape)

    def raw(self, name: str) -> np.ndarray:
        """One tensor's bytes, memory-mapped."""
        info = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)


class _Header:
    """A cursor over the header that refuses to step outside the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def counts(self) -> tuple[int, int]:
        """Checks magic and version; returns the numbers of tensors and of metadata entries."""
        if self.data[:4] != b"GGUF":
            raise ValueError(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}, not b'GGUF'.")
        self.at = 4
        version = self.number("I")
        if version not in _VERSIONS:
            big_endian = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"{self.path} is GGUF version {version}{big_endian}; jfuse reads versions 2 and 3.")
        num_tensors, num_entries = self.number("Q"), self.number("Q")
        if max(num_tensors, num_entries) > _MAX_COUNT:
            self.damaged(f"it claims {num_tensors} tensors and {num_entries} entries")
        self.room(num_tensors * _SMALLEST_TENSOR_INFO + num_entries * _SMALLEST_ENTRY, "the header's own counts")
        return num_tensors, num_entries

    def metadata(self, count: int) -> dict[str, Any]:
        """The key-value entries."""
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("a key")
            if key in metadata:
                self.damaged(f"the key {key!r} stands there twice")
            metadata[key] = self.value(self.value_type(key), key)
        return metadata

    def tensors(self, count: int, alignment: Any) -> dict[str, TensorInfo]:
        """The tensor table, with offsets made absolute; refuses overlaps and everything outside the file."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.damaged(f"general.alignment is {alignment!r}; it must be a power of two")
        table: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for _ in range(count):
            name = self.text("a tensor name")
            if name in table:
                self.damaged(f"the tensor {name!r} is listed twice")
            table[name] = self.tensor_entry(name, alignment)
        start = -(-self.at // alignment) * alignment
        infos = {
            name: TensorInfo(shape, kind, start + offset, _num_bytes(shape, kind))
            for name, (shape, kind, offset) in table.items()
        }
        by_place = sorted(infos, key=lambda name: infos[name].offset)
        for name, after in pairwise(by_place):
            if infos[name].offset + infos[name].num_bytes > infos[after].offset:
                self.damaged(f"the tensors {name!r} and {after!r} overlap")
        if by_place and (end := infos[by_place[-1]].offset + infos[by_place[-1]].num_bytes) > len(self.data):
            self.damaged(f"the tensor {by_place[-1]!r} ends at byte {end}, but the file has {len(self.data)}")
        return infos

    def tensor_entry(self, name: str, alignment: int) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        """Shape, type and relative offset of one tensor."""
        num_dims = self.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            self.damaged(f"the tensor {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        shape = tuple(self.number("Q") for _ in range(num_dims))[::-1]
        kind_number, offset = self.number("I"), self.number("Q")
        if kind_number not in list(GGMLQuantizationType):
            self.damaged(f"the tensor {name!r} has the unknown type {kind_number}")
        kind = GGMLQuantizationType(kind_number)
        if kind not in _DEQUANTISED:
            names = ", ".join(one.name for one in _DEQUANTISED)
            raise ValueError(f"{self.path}: the tensor {name!r} is quantised as {kind.name}; jfuse reads {names}.")
        if 0 in shape or shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            self.damaged(f"the tensor {name!r} has shape {list(shape)}, which {kind.name} blocks cannot fill")
        if offset % alignment:
            self.damaged(f"the tensor {name!r} starts at {offset}, which is not a multiple of {alignment}")
        return shape, kind, offset

    def value_type(self, key: str) -> GGUFValueType:
        """The type number that comes next."""
        number = self.number("I")
        if number not in list(GGUFValueType):
            self.damaged(f"{key!r} has the unknown type {number}")
        return GGUFValueType(number)

    def value(self, kind: GGUFValueType, key: str) -> Any:
        """A number, a text, or a flat list of either."""
        if kind == GGUFValueType.STRING:
            return self.text(repr(key))
        if kind != GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind])
        item, count = self.value_type(key), self.number("Q")
        if item == GGUFValueType.ARRAY:
            self.damaged(f"{key!r} is a list of lists")
        if count > _MAX_COUNT:
            self.damaged(f"{key!r} is a list of {count} entries; at most {_MAX_COUNT} are read")
        if item == GGUFValueType.STRING:
            self.room(8 * count, repr(key))
            return self.texts(count, key)
        layout = struct.Struct(f"<{_SCALARS[item]}")
        end = self.room(count * layout.size, repr(key))
        values = [value for (value,) in layout.iter_unpack(self.data[self.at : end])]
        self.at = end
        return values

    def text(self, what: str) -> str:
        """A length-prefixed UTF-8 text."""
        end = self.number("Q") + self.at
        self.room(end - self.at, what)
        raw, self.at = self.data[self.at : end], end
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.damaged(f"{what} is not valid UTF-8")

    def texts(self, count: int, key: str) -> list[str]:
        """Many texts, in a loop without calls: vocabularies have hundreds of thousands."""
        data, at, size, raw = self.data, self.at, len(self.data), []
        for _ in range(count):
            length = int.from_bytes(data[at : at + 8], "little")
            start, at = at + 8, at + 8 + length
            if at > size:
                self.damaged(f"{key!r} needs {at - size} bytes more than there are")
            raw.append(data[start:at])
        self.at = at
        try:
            return [text.decode("utf-8") for text in raw]
        except UnicodeDecodeError:
            self.damaged(f"{key!r} is not valid UTF-8")

    def number(self, code: str) -> Any:
        """One little-endian number."""
        size = struct.calcsize("<" + code)
        self.room(size, "the header")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def room(self, size: int, what: str) -> int:
        """The end of the next `size` bytes, which must lie inside the file."""
        if size > len(self.data) - self.at:
            self.damaged(f"{what} needs {size} bytes, but {len(self.data) - self.at} are left")
        return self.at + size

    def damaged(self, reason: str) -> NoReturn:
        """Every contradiction ends here."""
        raise ValueError(f"{self.path} is damaged or cut short: {reason}. Download or convert it again.")


def _num_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size
