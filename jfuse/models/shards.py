"""The safetensors files of a model folder, distrusted: each header is checked against its file before tensors are read.

In: a folder in Hugging Face layout. Out: `Shards`, whose tensors are memory-mapped and read on demand.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
WEIGHT_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8} | {
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8
}  # fmt: skip


class TensorEntry(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int


class Shards(NamedTuple):
    """All tensors of a model folder by name."""

    folder: Path
    entries: Mapping[str, TensorEntry]
    bytes_of: Mapping[Path, np.ndarray]

    def raw(self, name: str) -> np.ndarray:
        """One tensor's bytes, memory-mapped."""
        entry = self.entries[name]
        return self.bytes_of[entry.file][entry.start : entry.stop]

    def read(self, name: str) -> np.ndarray:
        """One tensor as a memory-mapped array of its own dtype.

        Raises:
            ValueError: the dtype is none that weights come in; quantised weights need their own loader.
        """
        entry = self.entries[name]
        if entry.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; weights must be {', '.join(WEIGHT_DTYPES)}. "
                "Quantised safetensors are not supported: use the unquantised model or a GGUF file."
            )
        return self.raw(name).view(WEIGHT_DTYPES[entry.dtype]).reshape(entry.shape)

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes of all tensors, however they are spread over files."""

        def one(name: str) -> bytes:
            entry = self.entries[name]
            head = f"{name} {entry.dtype} {list(entry.shape)} ".encode()
            return head + hashlib.sha256(self.raw(name).data).digest()

        with ThreadPoolExecutor() as pool:
            return hashlib.sha256(b"".join(pool.map(one, sorted(self.entries)))).hexdigest()


def open_shards(folder: Path) -> Shards:
    """Finds and checks the safetensors files of a folder: `model.safetensors`, or those its index names.

    Raises:
        ValueError: no safetensors weights, a malformed index or header, a shard outside the folder or absent, or a
            tensor in two shards.
    """
    if (folder / SINGLE).is_file():
        files, weight_map = [folder / SINGLE], {}
    else:
        weight_map = _weight_map(folder)
        files = [folder / name for name in sorted(set(weight_map.values()))]
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{folder / INDEX} names the shard {file.name}, which is absent. Download it again.")
        for name, entry in read_header(file).items():
            if name in entries:
                raise ValueError(f"Tensor {name} is in both {entries[name].file} and {file}. Remove the stale shard.")
            entries[name] = entry
    for name, file_name in weight_map.items():
        if name not in entries or entries[name].file.name != file_name:
            raise ValueError(f"{folder / INDEX} places tensor {name} in {file_name}, which does not hold it.")
    return Shards(folder, entries, {file: np.memmap(file, np.uint8, mode="r") for file in files})


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, after checking that they fill it exactly; no tensor data is read.

    Raises:
        ValueError: the header is cut off or no JSON, or an entry's dtype, shape or offsets do not hold.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(
                f"{file}: the header claims {length} bytes, but the file has {size}. It is damaged or cut off."
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        header.pop("__metadata__", None)
        entries = {name: _entry(file, name, fields, 8 + length) for name, fields in header.items()}
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{file}: the safetensors header is invalid: {error}. Download the file again.") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise ValueError(f"{file}: tensor {name} {what} (starts at byte {entry.start}, expected {end}).")
        end = entry.stop
    if end != size:
        raise ValueError(f"{file}: the tensors end at byte {end}, but the file has {size}. It is damaged or cut off.")
    return entries


def _entry(file: Path, name: str, fields: Any, origin: int) -> TensorEntry:
    """One checked header entry; Python integers do not overflow, so a huge shape is just a wrong size."""
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name} has the unknown dtype {dtype!r}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or len(numbers) > 8 or not all(map(_is_count, numbers)):
            raise ValueError(f"tensor {name} has the {what} {numbers!r}")
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"tensor {name} of shape {shape} and dtype {dtype} does not fit its data_offsets {offsets}")
    return TensorEntry(file, dtype, tuple(shape), origin + offsets[0], origin + offsets[1])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _weight_map(folder: Path) -> dict[str, str]:
    """The index's map from tensor to shard, each shard a plain file name."""
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(_no_weights(folder))
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: no valid index ({error}). Download it again.") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must map tensor names to shards.")
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or shard != Path(shard).name
            or "\\" in shard
            or not shard.endswith(".safetensors")
        ):
            raise ValueError(
                f"{index} places tensor {name} in {shard!r}; "
                "a shard must be a .safetensors file inside the model folder."
            )
    return weight_map


def _no_weights(folder: Path) -> str:
    """What to do about a folder without safetensors weights."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickled = [name for name in names if Path(name).suffix in PICKLED]
    if pickled:
        return (
            f"{folder} holds only pickled weights ({', '.join(pickled[:4])}), which can run code when loaded and are "
            "refused. Convert them to safetensors."
        )
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return f"{folder} holds no {SINGLE}. To load the GGUF file, give its own path: {folder / gguf[0]}."
    return f"{folder} holds neither {SINGLE} nor {INDEX}. Give a model folder in Hugging Face layout."


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a name occurs twice")
    return keys
