"""The context of one request on its way in: planned, loaded in the background, placed when it is asked for.

First comes what the selector's view declares, and only that is needed to choose; then layer after layer, a few of them
in flight while the ones before are recomputed. Nothing is read or placed twice: layers placed for the probe are kept
for the fusion, and where the probe needed keys alone, only the values are read later.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar, cast

import jax

from jfuse.config import View, chunk_bucket
from jfuse.costs import KEYS, WHOLE, Halves, needed_layers
from jfuse.loading import Load, Loader
from jfuse.models.decoder import Model
from jfuse.offload import device_of, staged, to_device
from jfuse.sources import Lost, Source
from jfuse.stitch import LayerWriter, Layout, stitch_anchors
from jfuse.timeline import Event, Timeline
from jfuse.types import AnchorCache, Chunk, ChunkAnchors, ContextCache, KVCache, LayerKV

T = TypeVar("T")
ANCHORS = "anchors"


class Incoming:
    """The layers of a context, each placed when it is first asked for and kept until it is popped.

    `seen` gives what the view declares, with values that may still be zeros; `pop` gives whole layers. A chunk that
    cannot be read after all is encoded again from its tokens, and `lost` says why. Enter it as a context manager,
    `start` it earlier if the request has to wait anyway, and leave it whatever happens: then no thread is left.

    Args:
        encode: makes a chunk from its tokens, for those that are lost. Runs where layers are asked for.
        ahead: layers in flight beyond the one asked for; 0 reads each when it is asked for.
        put: starts moving one layer's pieces to the device; injected by tests.
    """

    def __init__(
        self,
        model: Model,
        source: Source,
        layout: Layout,
        view: View,
        *,
        encode: Callable[[Any], Chunk],
        prefix: ContextCache | None = None,
        pad_to: int = 1,
        ahead: int = 2,
        put: Callable[[Any], Any] | None = None,
    ):
        config, device = model.config, device_of(model.params["embed"])
        self.layout, self.lost, self.timeline = layout, {}, Timeline(threads=ahead > 0)
        self._source, self._view, self._encode, self._prefix = source, view, encode, prefix
        self._rope, self._num_layers, self._pad_to = config.rope, config.num_layers, pad_to
        self._put = partial(to_device, device=device) if put is None else put
        self._on_cpu = device.platform == "cpu"
        self._write = LayerWriter(layout, config.rope)
        self._kept: dict[int, LayerKV] = {}
        self._needed = needed_layers(view, config.num_layers)
        first, later = self._plan()
        # Layers that the probe runs over come one by one; all else that a view names is wanted at once.
        free = 0 if view.tokens == "context" else len(first)
        self._loads = dict(first + later)
        self._loader = Loader(first + later, ahead=ahead, free=free, background=source.waits)

    @property
    def context(self) -> ContextCache:
        """The context, whose layers are those that are `seen`, each as it is asked for."""
        tokens, positions, segments = self.layout[:3]
        return ContextCache(tokens, positions, segments, cast(KVCache, _Layers(self.seen)))

    def anchors(self) -> AnchorCache | None:
        """The compact cache that the token view asks for. The view's deepest layer attends to nothing."""
        view = self._view
        if view.tokens not in ("prefix", "anchors"):
            return None
        return stitch_anchors(
            self._take(ANCHORS) if view.tokens == "anchors" else [],
            self._rope,
            self.layout,
            prefix=self._prefix,
            ratio=view.anchor_ratio,
            pad_to=self._pad_to,
            layers=range(self._depth),
        )

    def seen(self, l: int) -> LayerKV:
        """A layer for probe and scores, at least with what the view needs of it."""
        if l not in self._kept:
            self._kept[l] = self._place(l, self._needed.setdefault(l, WHOLE))
        return self._kept[l]

    def pop(self, l: int) -> LayerKV:
        """The whole layer, handed over."""
        if l not in self._kept:
            return self._place(l, WHOLE)
        layer = self._kept.pop(l)
        return self._write.values(layer, self._take((l, "values"))) if self._needed.get(l) == KEYS else layer

    def start(self) -> "Incoming":
        """Begins loading."""
        self._loader.start()
        return self

    def stop(self) -> None:
        """Stops loading, from any thread; whoever asks for a layer then meets `Stopped`."""
        self._loader.stop()

    def __enter__(self) -> "Incoming":
        self._loader.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loader.__exit__(*exception)
        self.timeline.__exit__(*exception)
        self._kept.clear()

    @property
    def _depth(self) -> int:
        return max(self._view.layer_indices(self._num_layers))

    def _plan(self) -> tuple[list[Load], list[Load]]:
        """What is needed to select, and the rest, in the order of use."""
        first: list[Load] = [(ANCHORS, self._load_anchors)] if self._view.tokens == "anchors" else []
        first += [((l, _name(halves)), partial(self._load, l, halves, "select")) for l, halves in self._needed.items()]
        later: list[Load] = []
        for l in range(self._num_layers):
            read = self._needed.get(l, Halves(False, False))
            rest = Halves(not read.keys, not read.values)
            if any(rest):
                later.append(((l, _name(rest)), partial(self._load, l, rest, "fuse")))
        return first, later

    def _place(self, l: int, halves: Halves) -> LayerKV:
        pieces = self._take((l, _name(halves)))
        write = self._write.whole if halves.values else self._write.keys
        return write(pieces, None if self._prefix is None else self._prefix.kv[l])

    def _take(self, key: Hashable) -> Any:
        """A load's result; chunks that are lost meanwhile are encoded again."""
        try:
            return self._loader.take(key)
        except Lost as lost:
            self._mend(lost)
        while True:
            try:
                return self._loads[key]()
            except Lost as lost:
                if lost.index in self.lost:  # this read began after it was encoded again
                    raise
                self._mend(lost)

    def _mend(self, lost: Lost) -> None:
        if lost.index in self.lost:  # found by a read that had begun before
            return
        began, tokens = self.timeline.now, self._source.tokens[lost.index]
        self._source.mend(lost.index, self._encode(tokens))
        self.lost[lost.index] = f"{lost.reason}; encoded again while serving"
        self.timeline.add(Event("encode", None, began, self.timeline.now))

    def _load_anchors(self) -> list[ChunkAnchors]:
        depth, ratio = self._depth, self._view.anchor_ratio

        def read(i: int) -> ChunkAnchors:
            block = self._source.anchors(i, ratio, depth)
            return ChunkAnchors(block.offsets[:depth], block.kv[:depth])

        def keep(i: int, block: ChunkAnchors) -> ChunkAnchors:
            return jax.tree.map(lambda a: staged(a, a.shape[0]), block)

        return self._timed(read, keep, None, "select")

    def _load(self, l: int, halves: Halves, stage: str) -> Any:
        """Reads one layer of every chunk, or one half of it, and starts moving it. May run in the loader's thread."""

        def read(i: int) -> LayerKV:
            return self._source.layer(i, l, keys=halves.keys, values=halves.values)

        def keep(i: int, layer: LayerKV) -> Any:
            rows = chunk_bucket(len(self._source.tokens[i]))
            wanted = layer if all(halves) else layer.k if halves.keys else layer.v
            return jax.tree.map(lambda half: staged(half, rows), wanted)

        pieces = self._timed(read, keep, l, stage)
        began = self.timeline.now
        moved = self._put(pieces)
        if self._crosses_link(pieces, moved):
            self.timeline.follow(Event("move", l, began, began, stage, "link", _num_bytes(pieces)), moved)
        return moved

    def _crosses_link(self, pieces: Any, moved: Any) -> bool:
        """Whether a transfer is under way that is worth timing; a CPU device mostly uses host arrays in place."""
        before, after = jax.tree.leaves(pieces), jax.tree.leaves(moved)
        there = all(new is old for new, old in zip(after, before, strict=True))
        return not there and (not self._on_cpu or any(isinstance(leaf, jax.Array) for leaf in before))

    def _timed(self, read: Callable[[int], T], keep: Callable[[int, T], Any], l: int | None, stage: str) -> list[Any]:
        """Reads every chunk's part, and keeps it safe before the next is read. Neighbours of one tier are one event."""
        results, runs = [], []
        for i in range(len(self._source.tokens)):
            began, tier = self.timeline.now, self._source.tier(i)
            part = read(i)
            event = Event("read", l, began, self.timeline.now, stage, tier, _num_bytes(part))
            results.append(keep(i, part))
            if runs and runs[-1].tier == tier:
                last = runs.pop()
                event = event._replace(start=last.start, num_bytes=last.num_bytes + event.num_bytes)
            runs.append(event)
        for event in runs:
            if event.tier != "device":
                self.timeline.add(event)
        return results


class _Layers:
    """Layers by their index, made on demand. Not a `Mapping`: run-time type checks look into those."""

    def __init__(self, layer: Callable[[int], LayerKV]):
        self._layer = layer

    def __getitem__(self, l: int) -> LayerKV:
        return self._layer(l)


def _name(halves: Halves) -> str:
    return "whole" if all(halves) else "keys" if halves.keys else "values"


def _num_bytes(part: Any) -> int:
    """Bytes of keys and values."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(part.kv if isinstance(part, ChunkAnchors) else part))
