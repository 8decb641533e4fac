"""One tiny request and every way to bring its chunks in; all tests share its shapes, so that little is compiled."""

import threading
from typing import NamedTuple

import numpy as np
import pytest

import jfuse as jf
from jfuse.config import FusionConfig
from jfuse.host_tier import HostTier
from jfuse.pipeline import Question, serve
from jfuse.sources import ResidentChunks, StoredChunks
from tests.tiny import build_request

RATIO = 0.4
SELECTORS = {
    "qcfuse": jf.selectors.qcfuse((1, 3)),
    "prophetkv": jf.selectors.prophetkv(),
    "reuse": jf.selectors.reuse(),
}


class Kit(NamedTuple):
    """A request with its chunks in a store on disk and in one in memory."""

    model: jf.Model
    chunks: tuple
    prefix: object
    question: Question
    disk: jf.ChunkStore
    memory: jf.ChunkStore
    ids: list[str]

    def config(self, ahead=2):
        return FusionConfig(ratio=RATIO, pad_to=128, row_block=96, ahead=ahead)

    def serve(self, source, selector="qcfuse", *, ahead=2, **options):
        chosen = SELECTORS[selector]
        return serve(self.model, source, self.question, chosen, self.config(ahead), prefix=self.prefix, **options)

    def resident(self):
        return ResidentChunks(self.chunks)

    def stored(self, store=None, **options):
        return StoredChunks(self.disk if store is None else store, self.ids, **options)

    def hosted(self, **options):
        host = HostTier(self.disk, **options)
        host.load(self.ids)
        return StoredChunks(self.disk, self.ids, host=host)


@pytest.fixture
def kit(tmp_path):
    request = build_request()
    disk = jf.ChunkStore.open(f"file://{tmp_path / 'store'}", request.model)
    memory = jf.ChunkStore.open("memory://", request.model)
    ids = [disk.put(chunk) for chunk in request.chunks]
    assert ids == [memory.put(chunk) for chunk in request.chunks]
    return Kit(request.model, request.chunks, request.prefix, Question(request.query), disk, memory, ids)


@pytest.fixture(autouse=True)
def no_threads_are_left():
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("jfuse"):
            thread.join(10)  # a timer may have a word left to say after the result is there
            assert not thread.is_alive(), thread.name


def same_bits(ours, theirs):
    """Two served requests, compared bit for bit: logits, every layer, the selection."""
    assert np.asarray(ours.first).tobytes() == np.asarray(theirs.first).tobytes()
    assert np.array_equal(ours.selection.recompute, theirs.selection.recompute)
    for l, (a, b) in enumerate(zip(ours.context.kv, theirs.context.kv, strict=True)):
        assert np.asarray(a.k).tobytes() == np.asarray(b.k).tobytes(), f"keys of layer {l}"
        assert np.asarray(a.v).tobytes() == np.asarray(b.v).tobytes(), f"values of layer {l}"


class Wrapped:
    """A source whose reads pass through `before(i, l)`, which may sleep, raise, or look on. Anchors are layer -1."""

    waits = True

    def __init__(self, source, before):
        self.source, self.before, self.tokens = source, before, source.tokens
        self.anchor_rule = source.anchor_rule

    def tier(self, i):
        return self.source.tier(i)

    def anchors(self, i, ratio, until):
        self.before(i, -1)
        return self.source.anchors(i, ratio, until)

    def layer(self, i, l, *, keys=True, values=True):
        self.before(i, l)
        return self.source.layer(i, l, keys=keys, values=values)

    def mend(self, i, chunk):
        self.source.mend(i, chunk)
