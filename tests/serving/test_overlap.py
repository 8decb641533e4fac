"""However layers come in, from wherever, in whatever rhythm: the same bits (ID-6, pitfall 54)."""

import importlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import jfuse as jf
from jfuse.anchors import sink
from jfuse.costs import needed_layers, selection_bytes
from jfuse.generate import prefill_query
from jfuse.pipeline import begin
from jfuse.sources import Lost, StoredChunks
from jfuse.throttle import Throttle
from jfuse.types import LayerKV
from tests.serving.conftest import SELECTORS, Wrapped, same_bits
from tests.tiny import build_request, choose


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_tier_and_mode_gives_the_same_bits(kit, selector):
    """ID-6: synchronous, overlapped, host-tier and disk-tier runs."""
    expected = kit.serve(kit.resident(), selector, ahead=0)
    sources = [
        kit.resident(),
        kit.stored(),
        kit.stored(kit.memory),
        kit.hosted(),
        kit.stored(computed=dict(enumerate(kit.chunks))),
        kit.stored(computed={1: kit.chunks[1]}),
        Throttle(1e9)(kit.stored()),
    ]
    sources += [kit.hosted(pinned=True)] if selector == "qcfuse" else []  # pinned arrays compile everything anew
    for source in sources:
        for ahead in (0, 1, 3):
            same_bits(kit.serve(source, selector, ahead=ahead), expected)


def test_fifty_random_interleavings_equal_the_synchronous_run(kit):
    """Pitfall 54."""
    expected = {name: kit.serve(kit.stored(), name, ahead=0) for name in ("qcfuse", "prophetkv")}
    for seed in range(50):
        rng = random.Random(seed)
        name = rng.choice(list(expected))
        source = rng.choice([kit.stored(), kit.stored(kit.memory), kit.hosted()])
        delayed = Wrapped(source, lambda i, l, rng=rng: time.sleep(rng.choice((0, 0, 1e-4, 1e-3, 3e-3))))
        same_bits(kit.serve(delayed, name, ahead=rng.randint(1, 5)), expected[name])


class Refilled(Wrapped):
    """Reads every layer into one buffer and hands that out, as a careless reader would."""

    def __init__(self, source):
        super().__init__(source, lambda i, l: None)
        self.buffers = [tuple(np.empty_like(half) for half in source.layer(i, 0)) for i in range(len(source.tokens))]

    def layer(self, i, l, *, keys=True, values=True):
        for _, buffer in enumerate(self.buffers):
            for half in buffer:
                half[:] = np.nan  # whatever was handed out before
        layer = self.source.layer(i, l, keys=keys, values=values)
        for half, buffer in zip(layer, self.buffers[i], strict=True):
            buffer[: len(half)] = half
        return LayerKV(*(buffer[: len(half)] for half, buffer in zip(layer, self.buffers[i], strict=True)))


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_buffer_that_is_refilled_right_after_reading_does_no_harm(kit, ahead):
    """P-01."""
    same_bits(kit.serve(Refilled(kit.stored()), ahead=ahead), kit.serve(kit.stored()))


@pytest.mark.parametrize("selector", ["qcfuse", "prophetkv", "reuse"])
def test_every_row_is_really_loaded(kit, selector, monkeypatch):
    """P-02: the destination is full of NaN before the layers come."""
    expected = kit.serve(kit.stored(), selector)
    stitch = importlib.import_module("jfuse.stitch")  # the name itself is the function
    opened = stitch._open_buffer

    def full_of_nan(prefix, size, *shape):
        layer = opened(prefix, size, *shape)
        inside = np.zeros((size, 1, 1), bool)
        inside[kit.prefix.end : kit.prefix.end + sum(len(c.tokens) for c in kit.chunks)] = True
        return LayerKV(*(jnp.where(inside, jnp.float32(jnp.nan), half) for half in layer))

    monkeypatch.setattr(stitch, "_open_buffer", full_of_nan)
    same_bits(kit.serve(kit.stored(), selector), expected)


def test_two_questions_over_one_fused_context_in_both_orders(kit):
    """P-04: answers do not depend on the order, and neither question writes into the context."""
    context = kit.serve(kit.stored()).context
    questions = [np.arange(5, dtype=np.int32), np.arange(40, 51, dtype=np.int32)]
    forth = [np.asarray(prefill_query(kit.model, context, q)[0]) for q in questions]
    back = [np.asarray(prefill_query(kit.model, context, q)[0]) for q in reversed(questions)][::-1]
    fresh = [np.asarray(prefill_query(kit.model, kit.serve(kit.stored()).context, q)[0]) for q in questions]
    for a, b, c in zip(forth, back, fresh, strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()


def test_requests_that_share_chunks_and_run_side_by_side_equal_serial_ones(kit):
    """P-05: 100 random interleavings of two requests, from threads, over one store."""
    expected = {name: kit.serve(kit.stored(), name) for name in ("qcfuse", "prophetkv")}

    def run(name, seed):
        rng = random.Random(seed)
        source = Wrapped(kit.stored(), lambda i, l: time.sleep(rng.choice((0, 0, 1e-4, 1e-3))))
        return kit.serve(source, name, ahead=rng.randint(0, 3))

    with ThreadPoolExecutor(2) as pool:
        for seed in range(100):
            runs = {name: pool.submit(run, name, seed) for name in expected}
            for name, future in runs.items():
                same_bits(future.result(), expected[name])


def test_the_first_recomputation_starts_before_the_last_load_ends(kit):
    """P-06: a selector that needs two layers and anchors does not wait for the rest."""
    kit.serve(kit.stored())  # compiles
    events = kit.serve(Throttle(latency=0.01)(kit.stored())).events
    first_fuse = min(event.start for event in events if event.what == "fuse")
    reads = [event for event in events if event.what == "read"]
    assert first_fuse < max(event.end for event in reads)
    selecting = next(event for event in events if event.what == "select")
    assert all(event.start < selecting.end for event in reads if event.stage == "select")


def test_a_probe_over_the_whole_context_runs_while_later_layers_load(kit):
    """ProphetKV's probe takes layer after layer: one layer ahead, the third is read only after the first was run."""
    probed, read = [], []
    source = Wrapped(kit.stored(), lambda i, l: read.append((l, len(probed))))
    incoming = begin(kit.model, source, SELECTORS["prophetkv"], kit.config(ahead=1), prefix=kit.prefix)
    taken = incoming.seen

    def seen(l):
        layer = taken(l)
        probed.append(l)
        return layer

    incoming.seen = seen
    kit.serve(source, "prophetkv", incoming=incoming)
    layers = [l for l, _ in read]
    assert sorted(layers) == layers and len(layers) == len(set(layers)) * len(kit.chunks), "something is read twice"
    assert dict(read)[3] >= 1, "all layers were read before the probe ran over the first"


@pytest.mark.parametrize("name", ["qcfuse", "prophetkv", "reuse", "cacheblend", "a3", "paper", "fusionrag", "demo"])
def test_a_selector_reads_its_view_and_no_more(kit, name):
    """What is read for the selection is what `costs` says, nothing is read twice, and the choice is the usual one."""
    more = {
        "cacheblend": jf.selectors.cacheblend(),
        "paper": jf.selectors.cacheblend("paper", schedule=(0.5,)),
        "a3": jf.selectors.a3(),
        "fusionrag": jf.selectors.fusionrag(),
        "demo": jf.selectors.qcfuse_demo(2),
    }
    selector, request = {**SELECTORS, **more}[name], build_request()
    sizes = request.context.sizes(len(request.query))
    with begin(kit.model, kit.stored(), selector, kit.config(), prefix=kit.prefix) as incoming:
        evidence = jf.probe(kit.model, request.query, incoming.anchors(), incoming.context, selector.view)
        k = jf.budget_for(selector, kit.config().ratio, sizes)
        chosen = jf.select(selector, evidence, k, num_layers=4)
        layers = [incoming.pop(l) for l in range(4)]
    reads = [event for event in incoming.timeline.events() if event.what == "read"]
    selecting = sum(event.num_bytes for event in reads if event.stage == "select")
    assert selecting == selection_bytes(kit.model.config, selector.view, sizes, itemsize=4)
    anchors = sum(event.num_bytes for event in reads if event.layer is None)
    whole = sizes.context * kit.model.config.kv_bytes_per_token(4)
    assert sum(event.num_bytes for event in reads) == whole + anchors
    np.testing.assert_array_equal(chosen.recompute, choose(request, selector, kit.config().ratio).recompute)
    for ours, stitched in zip(layers, request.context.kv, strict=True):
        assert np.asarray(ours.k).tobytes() == np.asarray(stitched.k).tobytes()
        assert np.asarray(ours.v).tobytes() == np.asarray(stitched.v).tobytes()
    if name == "qcfuse":
        assert list(needed_layers(selector.view, 4)) == [1, 3] and selecting < whole / 2


@pytest.mark.parametrize("layer", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize("selector", ["qcfuse", "prophetkv"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_read_that_fails_in_any_layer(kit, layer, selector, ahead):
    """Pitfall 54: a lost chunk is encoded again and the report says so; any other error reaches the caller."""
    if layer == -1 and selector == "prophetkv":
        pytest.skip("it reads no anchors")
    expected = kit.serve(kit.stored(), selector, ahead=0)

    def failing(error):
        def before(i, l):
            if l >= layer and i == 2 and 2 not in source.source.computed:
                raise error

        source = Wrapped(kit.stored(), before)
        return source

    source = failing(Lost(2, "the disk is gone"))
    served = kit.serve(source, selector, ahead=ahead)
    same_bits(served, expected)
    assert served.lost == {2: "the disk is gone; encoded again while serving"}
    assert any(event.what == "encode" for event in served.events)
    with pytest.raises(ZeroDivisionError):
        kit.serve(failing(ZeroDivisionError()), selector, ahead=ahead)


def test_two_lost_chunks_and_one_that_stays_lost(kit):
    expected = kit.serve(kit.stored(), ahead=0)
    source = Wrapped(kit.stored(), lambda i, l: None)

    def before(i, l):
        if l >= 1 and i in (0, 3) and i not in source.source.computed:
            raise Lost(i, "gone")

    source.before = before
    served = kit.serve(source)
    same_bits(served, expected)
    assert set(served.lost) == {0, 3}

    def always(i, l):
        if l == 2 and i == 1:
            raise Lost(i, "gone")

    source.before = always
    with pytest.raises(Lost, match="chunk 1 of the request.*gone"):
        kit.serve(source)


def test_a_lost_chunk_is_encoded_with_the_anchor_rule_of_its_store(kit):
    store = jf.ChunkStore.open("memory://", kit.model, anchor_rule=sink())
    own = [jf.encode_chunk(kit.model, chunk.tokens, anchor_rule=sink()) for chunk in kit.chunks]
    source = Wrapped(StoredChunks(store, [store.put(chunk) for chunk in own]), lambda i, l: None)

    def before(i, l):
        if l >= 1 and i == 2 and i not in source.source.computed:
            raise Lost(i, "gone")

    source.before = before
    assert set(kit.serve(source).lost) == {2}
    np.testing.assert_array_equal(source.source.computed[2].anchor_score, own[2].anchor_score)
    assert not np.array_equal(own[2].anchor_score, kit.chunks[2].anchor_score)


def test_a_request_that_is_stopped_ends_at_the_next_layer(kit):
    """Cancellation: whoever waits for a layer is woken."""
    kit.serve(kit.stored())
    incoming = None

    def before(i, l):
        if l == 2:
            threading.Timer(0.01, incoming.stop).start()
            time.sleep(0.05)

    source = Wrapped(kit.stored(), before)
    incoming = begin(kit.model, source, SELECTORS["qcfuse"], kit.config(), prefix=kit.prefix)
    with pytest.raises(jf.loading.Stopped):
        kit.serve(source, incoming=incoming)
    same_bits(kit.serve(kit.stored()), kit.serve(kit.resident()))
