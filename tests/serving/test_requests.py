"""Requests through the door and a store: orders, prefixes, partial hits, damage that shows only while it is read."""

import jax
import numpy as np
import pytest

import jfuse as jf
from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig
from jfuse.models.tiny import tiny_model
from jfuse.pipeline import Question, begin
from jfuse.sources import StoredChunks
from jfuse.stitch import make_layout
from jfuse.throttle import Throttle
from jfuse.types import PAD_POSITION, PADDING_SEGMENT, PREFIX_SEGMENT, ContextCache, LayerKV
from tests.serving.conftest import SELECTORS

SELECTOR = jf.selectors.qcfuse((1,))
QUESTION = Question(np.arange(7, dtype=np.int32))


@pytest.fixture(scope="module")
def model():
    return tiny_model(jax.random.key(5), num_layers=2)


@pytest.fixture(scope="module")
def passages():
    rng = np.random.default_rng(4)
    return [rng.integers(0, 128, length).astype(np.int32) for length in (40, 33, 47)]


@pytest.fixture
def store(model, tmp_path):
    return jf.ChunkStore.open(f"file://{tmp_path / 'store'}", model)


def ask(model, store, chunks, *, ratio=0.3, ahead=2, **options):
    config = FusionConfig(ratio=ratio, pad_to=128, row_block=128, ahead=ahead)
    return jf.answer(model, store, chunks, QUESTION, SELECTOR, config, max_new_tokens=2, **options)


def test_chunks_in_another_order_are_all_hits_and_stand_in_that_order(model, store, passages):
    """R-07: [A, B, C], then [C, A, B]; ID-1 for the new order."""
    ask(model, store, passages)
    turned = [passages[2], passages[0], passages[1]]
    second = ask(model, store, turned, ratio=1.0)
    assert second.report.hits == 3 and not second.report.missed
    full = jf.full_prefill(model, make_layout(turned, pad_to=128), QUESTION)
    source = StoredChunks(store, [store.lookup(tokens).id for tokens in turned])
    config = FusionConfig(ratio=1.0, pad_to=128, row_block=128)
    served = jf.serve(model, source, QUESTION, SELECTOR, config)
    np.testing.assert_array_equal(served.context.tokens[:120], np.concatenate(turned))
    np.testing.assert_array_equal(served.context.positions[:120], np.arange(120))
    np.testing.assert_allclose(served.first, full.first, atol=1e-4)
    for ours, theirs in zip(served.context.kv, full.context.kv, strict=True):
        np.testing.assert_allclose(ours.k[:120], theirs.k[:120], atol=1e-5)


def made_up_prefix(model, tokens):
    """A prefix of random keys and values, padded as `encode_prefix` pads."""
    rng, padding, c = np.random.default_rng(len(tokens)), -len(tokens) % 64, model.config
    shape = (c.num_layers, 2, len(tokens) + padding, c.num_kv_heads, c.head_size)
    kv = tuple(LayerKV(k, v) for k, v in rng.standard_normal(shape, np.float32))
    positions = np.pad(np.arange(len(tokens), dtype=np.int32), (0, padding), constant_values=PAD_POSITION)
    segments = np.pad(np.full(len(tokens), PREFIX_SEGMENT, np.int32), (0, padding), constant_values=PADDING_SEGMENT)
    return ContextCache(np.pad(tokens, (0, padding)), positions, segments, kv)


@pytest.mark.parametrize("length", [0, 1, 41, 255, 256, 257])
def test_the_length_of_the_prefix_never_shifts_or_voids_a_hit(model, store, passages, length):
    """R-08: every chunk is found whatever stands before it, and lands right behind the prefix."""
    ids = [store.put(encode_chunk(model, tokens)) for tokens in passages]
    head = np.random.default_rng(9).integers(0, 128, length).astype(np.int32)
    prefix = made_up_prefix(model, head) if length else None
    assert [store.lookup(tokens).hit for tokens in passages] == [True] * 3
    config = FusionConfig(ratio=0.0, pad_to=128)
    with begin(model, StoredChunks(store, ids), SELECTORS["reuse"], config, prefix=prefix) as incoming:
        context = incoming.context
        layers = [incoming.pop(l) for l in range(2)]
    assert context.end == length + 120 and context.num_tokens == 120
    np.testing.assert_array_equal(np.asarray(context.tokens)[: context.end], np.concatenate([head, *passages]))
    for l, layer in enumerate(layers):
        stored = np.concatenate([chunk.kv[l].v for chunk in store.read(ids)])
        np.testing.assert_array_equal(layer.v[length : context.end], stored)
        if prefix is not None:
            np.testing.assert_array_equal(layer.k[:length], prefix.kv[l].k[:length])
            np.testing.assert_array_equal(layer.v[:length], prefix.kv[l].v[:length])


def test_a_chunk_is_stored_free_of_what_stood_before_it(model, passages):
    """T-07: ask [A, B], then [B] alone: the stored B is the same bits."""
    stores = [jf.ChunkStore.open("memory://", model) for _ in range(2)]
    ask(model, stores[0], passages[:2])
    ask(model, stores[1], passages[1:2])
    after_a, alone = (store.read([store.lookup(passages[1]).id])[0] for store in stores)
    for ours, theirs in zip(jax.tree.leaves(after_a), jax.tree.leaves(alone), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert ask(model, stores[0], passages[1:2]).report.hits == 1


def test_missing_chunks_alone_are_computed_and_stored_after_the_answer(model, store, passages):
    """Need 21: a partial hit keeps what is there."""
    stored = store.put(encode_chunk(model, passages[1]))
    out = ask(model, store, [passages[0], passages[1], passages[0]])
    assert out.report.hits == 1 and set(out.report.missed) == {0, 2} and len(store) == 2
    assert out.report.stages["find"] > 0 and out.report.ttft >= out.report.stages["find"]
    tiers = {(part.stage, part.tier) for part in out.report.transfers}
    assert ("fuse", "disk") in tiers and ("fuse", "memory") in tiers
    again = ask(model, store, [passages[0], stored, passages[0]])
    assert again.report.hits == 3 and not again.report.missed
    np.testing.assert_array_equal(again.tokens, out.tokens)


def test_missing_chunks_are_encoded_with_the_rule_of_the_store(model, passages):
    """A store of another anchor rule never receives scores of the default one."""
    rule = jf.anchors.kvzip((3, 4, 5))
    store = jf.ChunkStore.open("memory://", model, anchor_rule=rule)
    ask(model, store, passages[:1])
    kept = store.read([store.lookup(passages[0]).id])[0].anchor_score
    np.testing.assert_array_equal(kept, encode_chunk(model, passages[0], anchor_rule=rule).anchor_score)
    assert not np.array_equal(kept, encode_chunk(model, passages[0]).anchor_score)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("by_id", [True, False])
def test_damage_that_shows_only_while_a_layer_is_read(model, store, passages, tmp_path, ahead, by_id):
    """A bit of the last layer's values is wrong: the chunk is encoded again, reported and stored, the answer is right.

    The front of the file is sound, so that the lookup is a hit and the tokens are known even to a request by id.
    """
    expected = ask(model, store, passages, ahead=ahead)
    ids = [store.lookup(tokens).id for tokens in passages]
    path = tmp_path / "store" / f"{ids[1]}.safetensors"
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    fresh = jf.ChunkStore.open(f"file://{tmp_path / 'store'}", model)  # has verified nothing yet
    out = ask(model, fresh, ids if by_id else passages, ahead=ahead)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.selection.recompute, expected.selection.recompute)
    assert out.report.hits == 2 and list(out.report.missed) == [1]
    assert "damaged: the values of layer 1" in out.report.missed[1] and "encoded again" in out.report.missed[1]
    assert not fresh.verify().damaged and fresh.usage().num_quarantined == 1
    assert ask(model, fresh, ids).report.hits == 3


def test_the_report_shows_bytes_seconds_and_bandwidth_of_every_stage(model, store, passages):
    ask(model, store, passages)
    report = ask(model, store, passages).report
    parts = {(part.stage, part.tier): part for part in report.transfers}
    assert set(parts) == {("select", "disk"), ("fuse", "disk")}
    assert parts["select", "disk"].num_bytes == report.selection_bytes
    anchors = report.selection_bytes - 120 * 2 * 16 * 4  # the keys of one layer are part of the whole
    assert sum(part.num_bytes for part in parts.values()) == report.total_bytes + anchors
    assert all(part.gb_per_s > 0 for part in parts.values())
    plain = report.as_dict()
    assert {event["what"] for event in plain["events"]} == {"read", "select", "fuse", "query"}
    assert plain["full_prefill_estimate"] > 0
    inside = sum(report.stages[name] for name in ("select", "fuse", "query"))
    assert all(0 <= event.start <= event.end <= inside + 0.05 for event in report.events)


def test_a_slow_disk_makes_the_report_advise_full_prefill(model, store, passages):
    """B-05: a short context behind a slow link is slower than no cache at all, and the report says so."""
    ids = [store.put(encode_chunk(model, tokens)) for tokens in passages]
    config = FusionConfig(ratio=0.3, pad_to=128, row_block=128)
    reports = {}
    for name, link in {"quick": Throttle(), "slow": Throttle(latency=0.5)}.items():
        for _ in range(2):  # the first one compiles
            served = jf.serve(model, link(StoredChunks(store, ids)), QUESTION, SELECTOR, config)
        reports[name] = jf.account.make_report(model, SELECTOR, config, served, 7)
    slow = reports["slow"]
    assert slow.full_prefill_faster and "full prefill would take about" in slow.advice
    assert slow.full_prefill_estimate < slow.ttft / 2
    assert sum(part.seconds for part in slow.transfers) > 1.5
