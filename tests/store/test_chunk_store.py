"""What a store promises on every tier: what is read is what was put, or a miss that says why."""

import dataclasses
import math
import threading
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jfuse.anchors import chunk_anchors
from jfuse.fingerprint import FORMAT_VERSION, differing
from jfuse.models.config import ModelConfig
from jfuse.models.rope import Rope
from jfuse.store import ChunkMiss, ChunkStore, StoreError
from jfuse.store.layout import encode
from jfuse.store.urls import tier_at
from jfuse.types import LayerKV

IDS_OF_NOTHING = ["../../etc/passwd", "/etc/passwd", "..", "", "ABC", "0" * 63, "0" * 64 + "/x", "0" * 64 + "\n"]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16])
def test_round_trip_keeps_every_bit(url, fingerprint, make_chunk, same, dtype):
    """C-09, P-02: dtype and bits, through every way of reading."""
    chunk = make_chunk(dtype=dtype)
    store = ChunkStore.open(url, dataclasses.replace(fingerprint, kv_dtype=np.dtype(dtype).name))
    id = store.put(chunk)
    assert id in store and store.lookup(chunk.tokens) == (id, True, "", ())
    (read,) = store.read([id])
    same(read, chunk)
    np.testing.assert_array_equal(store.tokens([id])[0], chunk.tokens)
    for l, kv in enumerate(chunk.kv):
        ((k, v),) = store.layer([id], l)
        assert k.dtype == v.dtype == dtype and k.dtype.name != "void"
        assert k.tobytes() == kv.k.tobytes() and v.tobytes() == kv.v.tobytes()
        ((k, v),) = store.layer([id], l, values=False)
        assert k.tobytes() == kv.k.tobytes() and v.shape == (0, *kv.v.shape[1:])


@pytest.mark.parametrize("tokens", [1, 2, 7, 23, 64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 4), (2, 1, 3)])
def test_odd_sizes(url, fingerprint, make_chunk, same, tokens, shape):
    layers, heads, size = shape
    store = ChunkStore.open(url, fingerprint)
    chunk = make_chunk(tokens=tokens, layers=layers, heads=heads, size=size)
    same(store.read([store.put(chunk)])[0], chunk)


def test_special_values_survive(store, make_chunk):
    """C-09: negative zero, subnormals and the largest numbers, bit for bit."""
    chunk = make_chunk(tokens=4, layers=1, heads=1, size=1)
    bits = np.array([0x8000, 0x0001, 0x7F7F, 0xFF7F], np.uint16).reshape(4, 1, 1)
    odd = LayerKV(bits.view(ml_dtypes.bfloat16), chunk.kv[0].v)
    ((k, _),) = store.layer([store.put(chunk._replace(kv=(odd,)))], 0)
    np.testing.assert_array_equal(k.view(np.uint16), bits)


def test_device_arrays_are_taken_as_they_are(store, make_chunk, same):
    chunk = make_chunk()
    id = store.put(jax.tree.map(jnp.asarray, chunk))
    same(store.read([id])[0], chunk)
    assert store.put(chunk) == id and len(store) == 1


@pytest.mark.parametrize("ratio", [0.1, 0.0, 0.25, 1.0, 1 / 3])
def test_anchors_are_the_best_by_score(store, make_chunk, ratio):
    """Both the stored block (0.1) and gathered rows, against a loop over sorted pairs; ties go to the lower index."""
    chunk = make_chunk(tokens=23)
    id = store.put(chunk)
    (anchors,) = store.anchors([id], ratio)
    count = math.ceil(round(ratio * 23, 6))
    assert anchors.offsets.shape == (3, count) and len(anchors.kv) == 3
    for l, (offsets, kv) in enumerate(zip(anchors.offsets, anchors.kv, strict=True)):
        best = sorted(range(23), key=lambda i: (-chunk.anchor_score[l, i], i))[:count]  # noqa: B023
        assert offsets.tolist() == sorted(best)
        for i, offset in enumerate(sorted(best)):
            assert kv.k[i].tobytes() == chunk.kv[l].k[offset].tobytes()
            assert kv.v[i].tobytes() == chunk.kv[l].v[offset].tobytes()
    (expected,) = (chunk_anchors(chunk, ratio),)
    np.testing.assert_array_equal(anchors.offsets, expected.offsets)


def test_anchors_up_to_a_layer(store, make_chunk):
    ids = [store.put(make_chunk(seed)) for seed in range(2)]
    for ratio in (None, 0.5):
        whole, part = store.anchors(ids, ratio), store.anchors(ids, ratio, until=2)
        for a, b in zip(whole, part, strict=True):
            assert len(b.kv) == len(b.offsets) == 2
            np.testing.assert_array_equal(a.offsets[:2], b.offsets)
    with pytest.raises(ValueError, match="have 3 layers"):
        store.anchors(ids, until=4)


def test_the_stored_anchor_ratio_is_the_one_chosen_at_open(url, fingerprint, make_chunk):
    store = ChunkStore.open(url, fingerprint, anchor_ratio=0.5)
    id = store.put(make_chunk())
    assert store.inspect(id).anchor_ratio == 0.5
    assert store.anchors([id])[0].offsets.shape == (3, 12)


def test_reading_is_in_request_order_and_may_repeat(store, make_chunk, same):
    """R-07, R-08, pitfalls 59, 60: any order, the same chunk twice; nothing is looked up by its place in a request."""
    chunks = [make_chunk(seed, tokens=10 + seed) for seed in range(3)]
    ids = [store.put(chunk) for chunk in chunks]
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0], []):
        found = store.read([ids[i] for i in order])
        for chunk, i in zip(found, order, strict=True):
            same(chunk, chunks[i])
        assert all(store.lookup(chunks[i].tokens).hit for i in order)


def test_addresses_follow_from_content(store, fingerprint, make_chunk, same):
    """C-13, T-07: a passage has one cache, whatever came before it in the request or in the data set."""
    chunks = [make_chunk(seed) for seed in range(4)]
    ids = [store.put(chunk) for chunk in chunks]
    other = ChunkStore.open("memory://", fingerprint)
    assert [other.put(chunk) for chunk in reversed(chunks)] == ids[::-1]
    for chunk, id in zip(chunks, ids, strict=True):
        assert store.lookup(chunk.tokens).id == id
        same(other.read([id])[0], store.read([id])[0])


def test_arrays_are_read_only_and_independent_of_the_caller(store, make_chunk):
    """P-04 at this level: neither what was put in nor what comes out can change a stored chunk."""
    chunk = make_chunk()
    id = store.put(chunk)
    before = store.read([id])[0].kv[0].k.tobytes()
    chunk.kv[0].k[:] = 0
    (read,) = store.read([id])
    assert read.kv[0].k.tobytes() == before
    for array in (read.tokens, read.anchor_score, read.kv[0].k, read.kv[0].v, store.anchors([id])[0].kv[0].k):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16])
def test_values_that_are_not_finite_are_refused(fingerprint, make_chunk, poison, dtype):
    store = ChunkStore.open("memory://", dataclasses.replace(fingerprint, kv_dtype=np.dtype(dtype).name))
    for l, name in ((0, "k"), (2, "v")):
        chunk = make_chunk(dtype=dtype)
        getattr(chunk.kv[l], name)[-1, -1, -1] = poison
        with pytest.raises(
            ValueError, match=rf"{ {'k': 'keys', 'v': 'values'}[name] } of layer {l} hold NaN or infinity"
        ):
            store.put(chunk)
    assert len(store) == 0


def test_inconsistent_chunks_are_refused(store, make_chunk):
    chunk = make_chunk()
    k, v = chunk.kv[1]
    first, last = chunk.kv[0], chunk.kv[2]
    cases = {
        r"values of layer 1 have shape \(22": chunk._replace(kv=(first, LayerKV(k, v[:-1]), last)),
        r"keys of layer 1 have shape \(23, 8\)": chunk._replace(kv=(first, LayerKV(k.reshape(23, 8), v), last)),
        "keys of layer 1 are float32": chunk._replace(kv=(first, LayerKV(k.astype(np.float32), v), last)),
        "without layers": chunk._replace(kv=()),
        r"anchor_score has shape \(2, 23\)": chunk._replace(anchor_score=chunk.anchor_score[:2]),
        "anchor_score holds NaN": chunk._replace(anchor_score=chunk.anchor_score * np.nan),
        r"tokens have shape \(0,\)": chunk._replace(tokens=chunk.tokens[:0]),
        r"keys of layer 0 have shape \(23, 2, 4\); this chunk needs \(22": chunk._replace(tokens=chunk.tokens[:-1]),
    }
    for message, bad in cases.items():
        with pytest.raises(ValueError, match=message):
            store.put(bad)
    assert len(store) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_id", "w2"),
        ("config", "other"),
        ("rope", "other"),
        ("tokenizer", "other"),
        ("bos_policy", "first:1"),
        ("anchor_rule", "sink"),
        ("anchor_instruction", (7,)),
        ("anchor_sinks", 0),
        ("kv_dtype", "float32"),
        ("kv_layout", "other"),
    ],
)
def test_another_fingerprint_is_a_miss_that_names_the_field(url, fingerprint, make_chunk, same, field, value):
    """C-01, C-02, pitfall 58: one folder, two models; neither ever gets the other's cache, by tokens or by address."""
    tier, chunk = tier_at(url), make_chunk()
    mine = ChunkStore(tier, fingerprint)
    other = ChunkStore(tier, dataclasses.replace(fingerprint, **{field: value}))
    id = mine.put(chunk)
    found = other.lookup(chunk.tokens)
    assert not found.hit and found.fields == (field,) and field in found.reason
    assert id not in other and other.ids() == []
    for read in (other.read, other.tokens, other.anchors, lambda ids: other.layer(ids, 0)):
        with pytest.raises(ChunkMiss, match=field) as miss:
            read([id])
        assert miss.value.fields == (field,)
    assert differing(other.inspect(id).fingerprint, other.fingerprint) == (field,)
    dtype = other.fingerprint.kv_dtype
    theirs = make_chunk(dtype=dtype)._replace(tokens=chunk.tokens)
    assert other.put(theirs) != id and len(mine) == len(other) == 1
    same(mine.read([id])[0], chunk)


def test_another_format_version_is_a_miss_that_names_it(url, fingerprint, make_chunk):
    """Pitfall 58: an older version's chunk is neither served nor taken for damaged."""
    tier, chunk = tier_at(url), make_chunk()
    older = dataclasses.replace(fingerprint, format_version=FORMAT_VERSION - 1)
    encoded = encode(older, chunk.tokens, chunk.kv, chunk.anchor_score)
    tier.write(encoded.id, encoded.parts, encoded.num_bytes)
    store = ChunkStore(tier, fingerprint)
    assert store.lookup(chunk.tokens).fields == ("format_version",)
    with pytest.raises(ChunkMiss, match=f"format_version is {FORMAT_VERSION - 1}, this jfuse reads {FORMAT_VERSION}"):
        store.inspect(encoded.id)
    assert encoded.id not in store and store.usage().num_quarantined == 0
    with pytest.raises(StoreError, match="writes 1 only"):
        ChunkStore.open(url, older)


def test_an_absent_chunk(store, fingerprint, make_chunk):
    absent = store.lookup([1, 2, 3])
    assert (absent.hit, absent.reason, absent.fields) == (False, "absent", ())
    assert absent.id not in store and 3 not in store
    for read in (store.read, store.tokens, store.anchors, store.inspect, lambda ids: store.layer(ids, 0)):
        with pytest.raises(ChunkMiss, match="absent") as miss:
            read(absent.id if read == store.inspect else [absent.id])
        assert miss.value.id == absent.id


@pytest.mark.parametrize("name", IDS_OF_NOTHING)
def test_only_hashes_are_names(store, name):
    for read in (store.read, store.tokens, store.anchors, lambda ids: store.layer(ids, 0)):
        with pytest.raises(ValueError, match="not a chunk's address"):
            read([name])
    assert name not in store


@pytest.mark.parametrize("l", [-1, 3, 100])
def test_layers_outside_the_model_are_refused(store, make_chunk, l):
    id = store.put(make_chunk())
    with pytest.raises(ValueError, match=r"layers 0\.\.2"):
        store.layer([id], l)


def test_clear(store, make_chunk):
    """C-12: misses afterwards, and not a byte is left."""
    baseline = store.num_bytes
    chunks = [make_chunk(seed) for seed in range(3)]
    ids = [store.put(chunk) for chunk in chunks]
    assert store.num_bytes > baseline and len(store) == 3
    store.clear()
    assert store.num_bytes == baseline == 0 and len(store) == 0 and store.ids() == []
    assert all(store.lookup(chunk.tokens).reason == "absent" for chunk in chunks)
    assert store.put(chunks[0]) == ids[0] and store.ids() == [ids[0]]


def test_verify_and_inspect(store, fingerprint, make_chunk):
    ids = [store.put(make_chunk(seed)) for seed in range(3)]
    assert store.verify() == (3, {})
    assert store.verify(ids[:1]) == (1, {})
    info = store.inspect(ids[0])
    assert info.fingerprint == fingerprint and info.id == ids[0]
    assert info.shape == (3, 23, 2, 4, 3, "bfloat16")
    assert sum(store.inspect(id).num_bytes for id in ids) == store.num_bytes == store.usage().num_bytes
    assert "3 chunks" in repr(store)


def test_a_store_without_a_model_only_looks(url, fingerprint, make_chunk):
    tier = tier_at(url)
    id = ChunkStore(tier, fingerprint).put(make_chunk())
    store = ChunkStore(tier, None)
    assert store.ids() == [id] and store.inspect(id).fingerprint == fingerprint
    assert store.verify() == (1, {})
    for call in (lambda: store.put(make_chunk()), lambda: store.lookup([1]), lambda: store.read([id])):
        with pytest.raises(StoreError, match="opened without a model"):
            call()
    store.clear()
    assert store.ids() == []


def sizes(store, make_chunk, count):
    """Bytes of one chunk, measured in a store of its own."""
    chunks = [make_chunk(seed) for seed in range(count)]
    store.put(chunks[0])
    size = store.num_bytes
    store.clear()
    return size, chunks


def test_the_cap_is_hard_and_the_least_recently_used_goes(url, store, fingerprint, make_chunk):
    size, chunks = sizes(store, make_chunk, 5)
    capped = ChunkStore.open(url, fingerprint, max_bytes=3 * size)
    ids = [capped.put(chunk) for chunk in chunks[:3]]
    capped.read([ids[0]])  # so that 1 is the oldest, then 2
    ids.append(capped.put(chunks[3]))
    assert [id in capped for id in ids] == [True, False, True, True]
    assert capped.lookup(chunks[2].tokens).hit  # so that 0 is the oldest
    ids.append(capped.put(chunks[4]))
    assert [id in capped for id in ids] == [False, False, True, True, True]
    assert capped.num_bytes == 3 * size and capped.usage()[:1] == (3,) and capped.usage().evictions == 2


@pytest.mark.parametrize(
    ("count", "tokens", "cap"), [(60, 64, 400_000), pytest.param(1000, 1000, 50_000_000, marks=pytest.mark.slow)]
)
def test_novel_chunks_never_exceed_the_cap(url, fingerprint, make_chunk, same, count, tokens, cap):
    """Growth stops at the cap, and what is left is whole."""
    template, rng = make_chunk(tokens=tokens), np.random.default_rng(0)
    store = ChunkStore.open(url, fingerprint, max_bytes=cap)
    for turn in range(count):
        chunk = template._replace(tokens=rng.integers(0, 2**31 - 1, tokens).astype(np.int32))
        id = store.put(chunk)
        assert store.num_bytes <= cap
        if turn % 10 == 0:
            same(store.read([id])[0], chunk)
    usage = store.usage()
    assert usage.num_bytes > 0.9 * cap and usage.num_chunks + usage.evictions == count and usage.evictions > 0
    assert store.verify().damaged == {}


def test_held_chunks_stay_while_others_come(url, store, fingerprint, make_chunk, same):
    """A request's own misses never evict its hits (need 21)."""
    size, chunks = sizes(store, make_chunk, 4)
    capped = ChunkStore.open(url, fingerprint, max_bytes=2 * size)
    ids = [capped.put(chunk) for chunk in chunks[:2]]
    with capped.hold(ids[:1]):
        capped.put(chunks[2])
        capped.put(chunks[3])
        assert ids[0] in capped and ids[1] not in capped
        capped.clear()
        same(capped.read(ids[:1])[0], chunks[0])
    assert ids[0] not in capped
    with pytest.raises(ChunkMiss), capped.hold(ids):
        pass


def test_what_cannot_be_stored_is_said_once_and_harms_nothing(url, store, fingerprint, make_chunk, same):
    """C-07 for a cap too small: the address comes back, the chunk stays absent, and a smaller one is stored."""
    size, _ = sizes(store, make_chunk, 1)
    capped = ChunkStore.open(url, fingerprint, max_bytes=size)
    large = make_chunk(7, tokens=80)
    with pytest.warns(RuntimeWarning, match="did not take a chunk"):
        id = capped.put(large)
    assert id not in capped and "not stored" in capped.lookup(large.tokens).reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capped.put(make_chunk(8, tokens=80))
    small = make_chunk(9)
    same(capped.read([capped.put(small)])[0], small)
    with capped.hold(capped.ids()):
        assert capped.put(make_chunk(10)) not in capped


@pytest.mark.parametrize(
    "url", ["redis://host", "s3://bucket/x", "memory://name", "file://", "", "gs://", "file://a\0b"]
)
def test_unusable_urls(fingerprint, url):
    with pytest.raises(StoreError, match=r"use (memory://|file://PATH)") as error:
        ChunkStore.open(url, fingerprint)
    assert "\n" not in str(error.value) and repr(url) in str(error.value)


@pytest.mark.parametrize("cap", [0, -1, True])
def test_unusable_caps(fingerprint, cap):
    with pytest.raises(StoreError, match="max_bytes is"):
        ChunkStore.open("memory://", fingerprint, max_bytes=cap)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_unusable_ratios(store, fingerprint, make_chunk, ratio):
    with pytest.raises(ValueError, match="ratio is"):
        ChunkStore.open("memory://", fingerprint, anchor_ratio=ratio)
    with pytest.raises(ValueError, match="ratio is"):
        store.anchors([store.put(make_chunk())], ratio)


def test_opening_for_a_model_takes_the_default_anchor_rule():
    """The fingerprint of `open(url, model)` is that of `encode_chunk(model, tokens)`."""
    config = ModelConfig("llama", 2, 16, 4, 2, 4, 32, 100, 1e-5, 256, Rope("default", (1.0, 0.1)))
    table = np.zeros((2, 2), ml_dtypes.bfloat16)
    model = SimpleNamespace(config=config, weights_id="w", tokenizer=None, params={"embed": {"table": table}})
    fingerprint = ChunkStore.open("memory://", model).fingerprint
    assert (fingerprint.anchor_rule, fingerprint.anchor_sinks, fingerprint.kv_dtype) == ("kvzip", 4, "bfloat16")
    assert fingerprint.anchor_instruction
    rule = SimpleNamespace(name="sink", instruction=())
    assert ChunkStore.open("memory://", model, anchor_rule=rule).fingerprint.anchor_rule == "sink"


def test_threads_share_a_store(url, fingerprint, make_chunk, same):
    """P-05 at this level: writers, readers and evictions at once; every read is whole or a miss."""
    chunks = [make_chunk(seed) for seed in range(12)]
    store = ChunkStore.open(url, fingerprint, max_bytes=30_000)
    failures, hits = [], []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(25):
                chunk = chunks[rng.integers(len(chunks))]
                id = store.put(chunk)
                try:
                    same(store.read([id])[0], chunk)
                    hits.append(id)
                except ChunkMiss as miss:
                    assert miss.reason == "absent"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and hits and store.num_bytes <= 30_000
    assert store.verify().damaged == {}
