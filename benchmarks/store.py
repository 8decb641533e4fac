"""Reading chunks back: jfuse's `file://` store against a raw memory map, TensorStore, safetensors and Orbax.

One chunk of 512 tokens in the shape of Qwen3-8B (36 layers, 8 KV heads of 128, bfloat16: 75.5 MB, 2.1 MB a layer).
Warm: one layer, copied into a buffer, files open and in the page cache, jfuse's checksum already verified; layers in
random order, the same for all, the stores taking turns. Cold: the whole chunk with its file dropped from the page
cache; jfuse's figure includes opening the store and verifying every checksum.
Usage: python benchmarks/store.py [--repeats 9] [--folder DIR]
"""

import argparse
import errno
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import setting

LAYERS, TOKENS, HEADS, SIZE = 36, 512, 8, 128
LAYER_BYTES = 2 * TOKENS * HEADS * SIZE * 2


class Raw:
    """A plain file of the same bytes: `np.memmap` for one layer, `readinto` for the whole."""

    name = "raw"

    def __init__(self, folder: Path, kv: np.ndarray):
        self.path = folder / "raw.bin"
        kv.tofile(self.path)
        self.whole = np.empty(kv.nbytes, np.uint8)

    def open(self) -> None:
        """Maps the file."""
        self.map = np.memmap(self.path, ml_dtypes.bfloat16, "r", shape=(LAYERS, 2, TOKENS, HEADS, SIZE))

    def layer(self, l: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies one layer out."""
        np.copyto(k, self.map[l, 0])
        np.copyto(v, self.map[l, 1])

    def read(self) -> None:
        """Reads the whole file into a buffer."""
        with open(self.path, "rb", buffering=0) as file:
            view, filled = self.whole.data, 0
            while count := file.readinto(view[filled:]):
                filled += count

    def close(self) -> None:
        """Unmaps the file, so that the page cache can drop it."""
        del self.map


class Jfuse:
    """A `ChunkStore` in a folder."""

    name = "jfuse"

    def __init__(self, folder: Path, kv: np.ndarray):
        from jfuse.fingerprint import Fingerprint
        from jfuse.types import Chunk, LayerKV

        self.path = folder / "jfuse"
        self.fingerprint = Fingerprint("weights", "config", "rope", "none", "none", "none", (), 0, "bfloat16")
        self.open()
        layers = tuple(LayerKV(k, v) for k, v in kv)
        score = np.random.default_rng(1).random((LAYERS, TOKENS), np.float32)
        self.ids = [self.store.put(Chunk(np.arange(TOKENS), layers, score))]
        self.close()

    def open(self) -> None:
        """Opens the store."""
        from jfuse.store import ChunkStore

        self.store = ChunkStore.open(self.path, self.fingerprint)

    def layer(self, l: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies one layer out."""
        ((key, value),) = self.store.layer(self.ids, l)
        np.copyto(k, key)
        np.copyto(v, value)

    def read(self) -> None:
        """Opens the store and verifies the whole chunk: every byte is in memory then."""
        self.open()
        self.store.read(self.ids)

    def close(self) -> None:
        """Closes the store, which unmaps the file."""
        del self.store


class Safetensors:
    """The safetensors library, two tensors a layer."""

    name = "safetensors"

    def __init__(self, folder: Path, kv: np.ndarray):
        from safetensors.flax import save_file

        self.path = folder / "chunk.safetensors"
        save_file({f"{l:02d}.{i}": kv[l, i] for l in range(LAYERS) for i in range(2)}, str(self.path))

    def open(self) -> None:
        """Opens the file."""
        from safetensors import safe_open

        self.file = safe_open(str(self.path), "flax")

    def layer(self, l: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies one layer out."""
        np.copyto(k, np.asarray(self.file.get_tensor(f"{l:02d}.0")))
        np.copyto(v, np.asarray(self.file.get_tensor(f"{l:02d}.1")))

    def read(self) -> None:
        """Opens the file and reads every tensor."""
        self.open()
        for name in self.file.keys():
            np.asarray(self.file.get_tensor(name))

    def close(self) -> None:
        """Closes the file."""
        del self.file


class TensorStore:
    """TensorStore's zarr3 driver, uncompressed, one storage chunk a layer."""

    name = "tensorstore"

    def __init__(self, folder: Path, kv: np.ndarray):
        self.path = folder / "zarr"
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(self.path)},
            "metadata": {
                "shape": list(kv.shape),
                "data_type": "bfloat16",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, *kv.shape[1:]]}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
        }
        import tensorstore

        tensorstore.open(spec, create=True).result().write(kv).result()

    def open(self) -> None:
        """Opens the array."""
        import tensorstore

        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self.path)}}
        self.array = tensorstore.open(spec).result()

    def layer(self, l: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies one layer out."""
        pair = self.array[l].read().result()
        np.copyto(k, pair[0])
        np.copyto(v, pair[1])

    def read(self) -> None:
        """Opens the array and reads it whole, its layers in parallel."""
        self.open()
        self.array.read().result()

    def close(self) -> None:
        """Closes the array."""
        del self.array


class Orbax:
    """An Orbax checkpoint with one item a layer; one layer is a partial restore."""

    name = "orbax"

    def __init__(self, folder: Path, kv: np.ndarray):
        import orbax.checkpoint as ocp

        self.path = folder / "orbax"
        self.ocp = ocp
        self.checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        self.checkpointer.save(self.path, args=ocp.args.PyTreeSave({f"{l:02d}": kv[l] for l in range(LAYERS)}))

    def open(self) -> None:
        """Nothing to keep open."""

    def _restore(self, layers: list[int]) -> dict[str, np.ndarray]:
        item = {f"{l:02d}": np.empty((2, TOKENS, HEADS, SIZE), ml_dtypes.bfloat16) for l in layers}
        how = {name: self.ocp.RestoreArgs(restore_type=np.ndarray) for name in item}
        args = self.ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        return self.checkpointer.restore(self.path, args=args)

    def layer(self, l: int, k: np.ndarray, v: np.ndarray) -> None:
        """Copies one layer out."""
        pair = self._restore([l])[f"{l:02d}"]
        np.copyto(k, pair[0])
        np.copyto(v, pair[1])

    def read(self) -> None:
        """Restores everything."""
        self._restore(list(range(LAYERS)))

    def close(self) -> None:
        """Nothing is open."""


def seconds(call: Callable[[], None]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def drop_from_page_cache(path: Path) -> bool:
    """Drops the files under `path` from the page cache; False if the system kept any of them."""
    dropped = True
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.fstat(descriptor).st_size:
                os.preadv(descriptor, [bytearray(1)], os.fstat(descriptor).st_size // 2, os.RWF_NOWAIT)
                dropped = False
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
        finally:
            os.close(descriptor)
    return dropped


def main() -> None:
    """Runs all stores interleaved and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=None, help="where the files go; a temporary folder by default")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((LAYERS, 2, TOKENS, HEADS, SIZE), np.float32).astype(ml_dtypes.bfloat16)
    try:
        stores = [kind(folder, kv) for kind in (Raw, Jfuse, Safetensors, TensorStore, Orbax)]
        warm, cold, dropped = measure(stores, kv, arguments.repeats, rng)
    finally:
        shutil.rmtree(folder)
    rows = {}
    print(f"{'store':12} {'one layer, warm':>16} {'x raw':>6} {'whole, cold':>12} {'of plain':>9}")
    for store in stores:
        layer, whole = statistics.median(warm[store.name]), statistics.median(cold[store.name])
        row = {
            "layer_warm_ms": layer * 1e3,
            "layer_over_raw": layer / statistics.median(warm["raw"]),
            "whole_cold_mb_per_s": kv.nbytes / whole / 1e6,
            "whole_over_plain_reading": statistics.median(cold["raw"]) / whole,
        }
        rows[store.name] = row
        print(
            f"{store.name:12} {row['layer_warm_ms']:13.3f} ms {row['layer_over_raw']:6.2f} "
            f"{row['whole_cold_mb_per_s']:7.0f} MB/s {row['whole_over_plain_reading']:9.2f}",
            flush=True,
        )
    if not dropped:
        print("The system kept some files in its page cache: the cold figures are warm for them.")
    shape = {"layers": LAYERS, "tokens": TOKENS, "heads": HEADS, "size": SIZE, "dtype": "bfloat16"}
    result = {"shape": shape, "repeats": arguments.repeats, "page_cache_dropped": dropped, "rows": rows}
    print(setting.save("store", result))


def measure(
    stores: list, kv: np.ndarray, repeats: int, rng: np.random.Generator
) -> tuple[dict[str, list[float]], dict[str, list[float]], bool]:
    """Seconds of each warm layer read and each cold whole read, the stores taking turns."""
    warm: dict[str, list[float]] = {store.name: [] for store in stores}
    cold: dict[str, list[float]] = {store.name: [] for store in stores}
    k, v = np.empty_like(kv[0, 0]), np.empty_like(kv[0, 0])
    for store in stores:
        store.open()
        for l in range(LAYERS):
            store.layer(l, k, v)
            assert k.tobytes() == kv[l, 0].tobytes() and v.tobytes() == kv[l, 1].tobytes(), (store.name, l)
    for _ in range(repeats):
        for l in rng.permutation(LAYERS)[:8]:
            for store in stores:
                warm[store.name].append(seconds(functools.partial(store.layer, int(l), k, v)))
    dropped = True
    for store in stores:
        store.close()
    for _ in range(repeats):
        for store in stores:
            dropped = drop_from_page_cache(store.path) and dropped
            cold[store.name].append(seconds(store.read))
            if store.name != "raw":
                store.close()
    return warm, cold, dropped


if __name__ == "__main__":
    main()
