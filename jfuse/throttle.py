"""A slower link in front of any source, so that bandwidth studies run on any machine."""

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jfuse.anchors import AnchorRule
from jfuse.sources import Source
from jfuse.types import Chunk, ChunkAnchors, LayerKV


class Throttle:
    """A slower link, for experiments: every read takes at least `latency` plus its bytes over the bandwidth.

    One throttle is one link: sources that share it, also from several threads, queue for it.
    """

    def __init__(self, bytes_per_second: float | int = math.inf, latency: float | int = 0.0):
        """Sets the link.

        Raises:
            ValueError: a bandwidth that is not positive, or a negative latency.
        """
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}; use a bandwidth above 0.")
        if not latency >= 0:
            raise ValueError(f"latency is {latency}; use seconds >= 0.")
        self.bytes_per_second, self.latency = bytes_per_second, latency
        self._lock = threading.Lock()
        self._free = 0.0

    @classmethod
    def by_load_time(
        cls, share: float | int, *, full_prefill: float | int, num_bytes: int, latency: float | int = 0.0
    ) -> "Throttle":
        """The link over which loading `num_bytes` takes `share` of the time of a full prefill.

        This ratio, unlike a bandwidth, means the same on a laptop and on a GPU: QCFuse's 10 and 3 GB/s are 0.09 and
        0.29 (2606.05875, section 4.4).

        Args:
            full_prefill: seconds of a full prefill, measured here.

        Raises:
            ValueError: a share or time that is not positive.
        """
        if not share * full_prefill > 0:
            raise ValueError(f"share is {share} and full_prefill {full_prefill} s; use numbers above 0.")
        return cls(num_bytes / (share * full_prefill), latency)

    def __call__(self, source: Source, *, tiers: Sequence[str] | None = None) -> "ThrottledChunks":
        """The source behind this link; chunks of other tiers than the given ones pass freely."""
        return ThrottledChunks(source, self, tiers)

    def wait(self, num_bytes: int, started: float) -> None:
        """Returns when a read that began at `started` (`time.perf_counter`) would be over on this link."""
        with self._lock:
            self._free = max(self._free, started) + self.latency + num_bytes / self.bytes_per_second
            until = self._free
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)


class ThrottledChunks:
    """A source behind a `Throttle`."""

    def __init__(self, source: Source, throttle: Throttle, tiers: Sequence[str] | None = None):
        self._source, self._throttle, self._tiers = source, throttle, tiers

    @property
    def tokens(self) -> Sequence[Int[np.ndarray, " _"]]:
        """The source's."""
        return self._source.tokens

    @property
    def anchor_rule(self) -> AnchorRule | None:
        """The source's."""
        return self._source.anchor_rule

    @property
    def waits(self) -> bool:
        """Always."""
        return True

    def tier(self, i: int) -> str:
        """The source's."""
        return self._source.tier(i)

    def anchors(self, i: int, ratio: float, until: int) -> ChunkAnchors:
        """The source's, later."""
        started = time.perf_counter()
        block = self._source.anchors(i, ratio, until)
        return self._slowly(i, block._replace(offsets=block.offsets[:until], kv=block.kv[:until]), started)

    def layer(self, i: int, l: int, *, keys: bool = True, values: bool = True) -> LayerKV:
        """The source's, later."""
        started = time.perf_counter()
        return self._slowly(i, self._source.layer(i, l, keys=keys, values=values), started)

    def mend(self, i: int, chunk: Chunk) -> None:
        """The source's."""
        self._source.mend(i, chunk)

    def _slowly(self, i: int, tree: Any, started: float) -> Any:
        if self._tiers is None or self.tier(i) in self._tiers:
            self._throttle.wait(sum(leaf.nbytes for leaf in jax.tree.leaves(tree)), started)
        return tree
