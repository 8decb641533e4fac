"""One stored chunk, read: checked views of its bytes, each range verified when it is first read.

The bytes of a file (memory-mapped) or of the memory tier go in; read-only NumPy views come out, without a copy.
Nothing here imports jax.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int32, UInt8

from jfuse.config import anchor_offsets
from jfuse.fingerprint import tokens_digest
from jfuse.store.layout import KV_DTYPES, Damaged, Header, checksum, header_length, read_header
from jfuse.store.tier import Stamp

Half = Float[np.ndarray, "_ K H"]  # no rows where values were not asked for


class Entry:
    """A stored chunk whose header, tokens and anchor scores are checked; layers are checked on first use.

    Safe to read from several threads: a range verified twice at once is verified twice, no more.
    """

    def __init__(self, id: str, buffer: UInt8[np.ndarray, " _"], stamp: Stamp | None = None):
        """Checks the front of the chunk.

        Args:
            id: the content address it was found under.
            stamp: what the tier says of these bytes; a different stamp later means that they may have changed.

        Raises:
            Damaged: the bytes are not a whole chunk, or not the chunk that `id` promises.
            OtherFormat: a chunk of another format version.
        """
        self.id = id
        self.stamp = stamp
        self.num_bytes = len(buffer)
        start = header_length(buffer[:8].tobytes(), len(buffer))
        self.header: Header = read_header(buffer[: start + 8].tobytes(), len(buffer))
        if self.header.id != id:
            raise Damaged(f"it holds the chunk {self.header.id}")
        self._data = buffer[start:]
        self._verified: set[tuple[str, int, int]] = set()
        self._layers: dict[int, tuple[Half, Half]] = {}  # verified ones
        shape = self.header.shape
        self._table = shape.table()
        self.tokens: Int32[np.ndarray, " C"] = self._tensor("tokens", np.int32)
        self.anchor_score: Float[np.ndarray, "L C"] = self._tensor("anchor_score", np.float32)
        self._anchor_offsets: Int32[np.ndarray, "L A"] = self._tensor("anchor_offsets", np.int32)
        self._verify_front()

    @property
    def num_layers(self) -> int:
        """Layers stored."""
        return self.header.shape.layers

    def layer(self, l: int, *, values: bool = True) -> tuple[Half, Half]:
        """Keys and values of one layer; without `values` the second array has no rows and no value is read.

        Raises:
            Damaged: the layer does not match its checksum.
        """
        if (known := self._layers.get(l)) is not None:
            return known if values else (known[0], known[1][:0])
        k, v = (self._half("kv", l, part) for part in range(2))
        self._verify("layers", l, 0, k)
        if not values:
            return k, v[:0]
        self._verify("layers", l, 1, v)
        self._layers[l] = k, v
        return k, v

    def anchors(self, ratio: float, until: int) -> tuple[Int32[np.ndarray, "L A"], list[tuple[Half, Half]]]:
        """Offsets, keys and values of the anchors of the first `until` layers.

        The ratio that the chunk was stored with reads one range; any other gathers rows from the layers.

        Raises:
            Damaged: what was read does not match its checksum.
        """
        if ratio != self.header.anchor_ratio:
            offsets = anchor_offsets(self.anchor_score, ratio)[:until]
            layers = [(self.layer(l), rows) for l, rows in enumerate(offsets)]
            return offsets, [(k[rows], v[rows]) for (k, v), rows in layers]
        pairs = []
        for l in range(until):
            k, v = (self._half("anchor_kv", l, part) for part in range(2))
            self._verify("anchors", l, 0, k)
            self._verify("anchors", l, 1, v)
            pairs.append((k, v))
        return self._anchor_offsets[:until], pairs

    def verify(self) -> None:
        """Reads everything again, whatever was verified before.

        Raises:
            Damaged: names the first range that does not match.
        """
        self._verified.clear()
        self._layers.clear()
        self._verify_front()
        for l in range(self.num_layers):
            self.layer(l)
        self.anchors(self.header.anchor_ratio, self.num_layers)

    def _verify_front(self) -> None:
        """Tokens, anchor scores and offsets, which are checked when the chunk is opened."""
        shape = self.header.shape
        small = self._data[shape.seal_bytes : shape.seal_bytes + shape.small_bytes]
        if checksum(small) != self.header.checksums.small or self._data[8 : shape.seal_bytes].any():
            raise Damaged("its tokens or anchor scores do not match their checksum")
        if tokens_digest(self.tokens) != self.header.tokens_sha256:
            raise Damaged("its tokens do not match their digest")

    def _half(self, name: str, l: int, part: int) -> Half:
        return self._tensor(name, KV_DTYPES[self.header.shape.dtype][1], l, part)

    def _tensor(self, name: str, dtype: Any, *index: int) -> np.ndarray:
        place = self._table[name]
        start, stop = place["data_offsets"]
        shape = place["shape"]
        for i, extent in zip(index, shape, strict=False):
            step = (stop - start) // extent
            start, stop = start + i * step, start + (i + 1) * step
        return self._data[start:stop].view(dtype).reshape(shape[len(index) :])

    def _verify(self, kind: str, l: int, part: int, half: Half) -> None:
        if (kind, l, part) in self._verified:
            return
        expected = getattr(self.header.checksums, kind)[l][part]
        if checksum(half.reshape(-1).view(np.uint8)) != expected:
            what = ("keys", "values")[part] if kind == "layers" else ("anchor keys", "anchor values")[part]
            raise Damaged(f"the {what} of layer {l} do not match their checksum")
        self._verified.add((kind, l, part))
