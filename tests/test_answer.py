"""The serving door: passages in, answer and report out, on a tiny model and a store in memory.

Like the whole suite, it runs where there is no GPU (N-04).
"""

import jax
import numpy as np
import pytest

import jfuse as jf
from jfuse import pipeline
from jfuse.anchors import sink
from jfuse.config import FusionConfig
from jfuse.fingerprint import Fingerprint
from jfuse.host_tier import HostTier
from jfuse.models.decoder import logits
from jfuse.models.tiny import tiny_model
from jfuse.pallas import choice
from jfuse.pipeline import Question
from jfuse.stitch import make_layout
from jfuse.store import ChunkMiss

SELECTOR = jf.selectors.qcfuse((1, 2))
CONFIG = FusionConfig(ratio=0.3, pad_to=64, row_block=32)


class Letters:
    """A stand-in tokenizer: one id per character."""

    identity, bos_policy, stop_ids = "letters", "none", frozenset()

    def encode(self, text):
        return np.frombuffer(text.encode("latin1"), np.uint8).astype(np.int32) % 128

    def decode(self, ids):
        return "".join(chr(i) for i in np.asarray(ids))


@pytest.fixture(scope="module")
def model():
    return tiny_model(jax.random.key(3), num_layers=3).replace(tokenizer=Letters())


@pytest.fixture
def store(model):
    return jf.ChunkStore.open("memory://", model)


@pytest.fixture
def passages():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 128, length).astype(np.int32) for length in (21, 34, 1, 13)]


def ask(model, store, chunks, query="who?", **options):
    return jf.answer(model, store, chunks, query, SELECTOR, CONFIG, max_new_tokens=4, **options)


def test_missing_passages_are_computed_reported_and_served_the_next_time(model, store, passages):
    first = ask(model, store, passages[:3])
    second = ask(model, store, passages)
    assert first.report.hits == 0 and set(first.report.missed) == {0, 1, 2}
    assert second.report.hits == 3 and second.report.missed == {3: "absent"}
    again = ask(model, store, passages)
    assert again.report.hits == 4 and not again.report.missed
    np.testing.assert_array_equal(again.tokens, second.tokens)
    assert again.text == Letters().decode(again.tokens)


def test_ids_and_passages_may_be_mixed_and_give_the_same_answer(model, store, passages):
    ids = [store.put(jf.encode_chunk(model, tokens)) for tokens in passages]
    by_passage, by_id = ask(model, store, passages), ask(model, store, [ids[0], passages[1], *ids[2:]])
    np.testing.assert_array_equal(by_id.tokens, by_passage.tokens)
    assert by_id.report.hits == len(passages)


def test_empty_passages_are_skipped_and_named_and_blank_ones_are_kept(model, store):
    """T-05."""
    chunks = [Letters().encode(text) for text in ("one", "", " ", "two")]
    report = ask(model, store, chunks).report
    assert report.skipped == (1,) and report.num_context == 7


def test_a_kernel_that_failed_stands_in_every_later_report(model, store, passages, monkeypatch):
    """K-07: what the process runs otherwise than it would like to, with the reason."""
    assert ask(model, store, passages).report.fallbacks == ()
    monkeypatch.setitem(choice._fallbacks, "op: XLA instead of triton; too little shared memory", None)
    assert ask(model, store, passages).report.fallbacks == ("op: XLA instead of triton; too little shared memory",)


def test_the_request_is_exactly_the_concatenation_of_the_given_ids(model, passages):
    """T-01, T-10 and pitfall 44: nothing stands between chunks, and full prefill runs on the same ids."""
    prefix = jf.encode_prefix(model, np.arange(5))
    layout = make_layout(passages, np.arange(5), pad_to=64)
    np.testing.assert_array_equal(layout.tokens[: layout.end], np.concatenate([np.arange(5), *passages]))
    question = Question(np.asarray([7, 8, 9], np.int32))
    full = jf.full_prefill(model, layout, question)
    plain = np.concatenate([np.arange(5), *passages, question.tokens]).astype(np.int32)
    out = jf.prefill(model, plain, np.arange(len(plain)))
    expected = np.asarray(logits(model.config, model.params, out.hidden))[-1]
    np.testing.assert_allclose(np.asarray(full.first), expected, atol=1e-4)
    assert prefix.end == 5


def test_answer_at_ratio_one_continues_as_full_prefill_does(model, store, passages):
    """ID-1 and pitfall 14 through the door."""
    prefix = jf.encode_prefix(model, np.arange(5))
    fused = jf.answer(
        model, store, passages, "who?", SELECTOR, FusionConfig(ratio=1.0, pad_to=64), prefix=prefix, max_new_tokens=16
    )
    plain = np.concatenate([np.arange(5), *passages, Letters().encode("who?")]).astype(np.int32)
    for token in fused.tokens:
        out = jf.prefill(model, plain, np.arange(len(plain)))
        assert int(np.argmax(logits(model.config, model.params, out.hidden)[-1])) == token
        plain = np.append(plain, token)
    assert fused.report.realised_ratio == 1.0


def test_the_report_accounts_for_the_request(model, store, passages):
    prefix = jf.encode_prefix(model, np.arange(5))
    report = ask(model, store, passages, prefix=prefix).report
    n = sum(len(tokens) for tokens in passages)
    assert (report.num_prefix, report.num_context, report.num_query) == (5, n, 4)
    assert report.budget == jf.budget("floor_min1", 0.3, n) and report.rows == (report.budget,) * 3
    assert report.ratio == 0.3 and report.realised_ratio == pytest.approx(report.budget / n)
    assert report.ttft > 0 and 1 < report.flop_limit < 10
    assert report.selector == "qcfuse" and report.as_dict()["flop_limit"] == report.flop_limit


def test_only_the_question_rows_score(model, store, passages):
    """Pitfall 26: tokens after the scoring span may change without changing what is selected."""
    tokens = Letters().encode("who is it? answer")
    head = ask(model, store, passages, Question(tokens, slice(0, 10)))
    whole = ask(model, store, passages, Question(tokens))
    assert not np.array_equal(head.selection.recompute, whole.selection.recompute)
    other_tail = ask(model, store, passages, Question(np.r_[tokens[:10], (tokens[10:] + 1) % 128], slice(0, 10)))
    np.testing.assert_array_equal(head.selection.recompute, other_tail.selection.recompute)
    with pytest.raises(ValueError, match="selects none of the 17 query tokens"):
        ask(model, store, passages, Question(tokens, slice(17, 20)))


def test_ttft_counts_selection_fusion_and_query_but_no_decoding(model, store, passages):
    """Pitfall 52."""
    report = ask(model, store, passages).report
    assert report.ttft == pytest.approx(sum(v for name, v in report.stages.items() if name != "decode"))
    assert {"select", "fuse", "query"} <= set(report.stages)


class Unfinished:
    """Logits that are still being computed; the log says when they were waited for."""

    def __init__(self, log):
        self.log = log

    def block_until_ready(self):
        self.log.append("finished")
        return self


def test_a_stage_ends_when_its_result_is_there(model, passages, monkeypatch):
    """B-01, pitfall 52: the clock is read after the first token's logits are finished, not when they are dispatched."""
    chunks, question = [jf.encode_chunk(model, tokens) for tokens in passages], Question(np.arange(7, 12))
    log = []
    monkeypatch.setattr(pipeline._Clock, "lap", lambda self, stage: log.append(stage))
    monkeypatch.setattr(pipeline, "prefill_query", lambda *_, **__: (Unfinished(log), None))
    jf.serve(model, pipeline.ResidentChunks(chunks), question, SELECTOR, CONFIG)
    assert log == ["select", "fuse", "finished", "query"]
    log.clear()
    monkeypatch.setattr(pipeline, "logits", lambda *_: [Unfinished(log)])
    jf.full_prefill(model, make_layout(passages, pad_to=64), question)
    assert log == ["finished", "prefill"]


def test_realised_ratio_is_counted_over_all_layers(model, store, passages):
    """S-09: RelaxKV recomputes far more layer-token states than its nominal ratio."""
    found = jf.answer(model, store, passages, "who?", jf.selectors.relaxkv(), CONFIG, max_new_tokens=1)
    recompute = np.asarray(found.selection.recompute)
    counted = sum(int(row.sum()) for row in recompute) / (3 * sum(len(tokens) for tokens in passages))
    assert found.report.realised_ratio == pytest.approx(counted) and found.report.rows == tuple(recompute.sum(1))
    assert found.report.ratio == 0.3 and found.report.realised_ratio > 0.35


@pytest.mark.parametrize(
    ("chunks", "query", "message"),
    [
        ([], "who?", "no chunk with tokens"),
        ([np.zeros(0, np.int32)], "who?", "no chunk with tokens"),
        ([np.asarray([1, 128])], "who?", "id 128 at index 1.*0..127"),
        ([np.asarray([1, -1])], "who?", "id -1 at index 1"),
        ([np.asarray([1])], "", "query is empty"),
        ([np.asarray([1])], Question(np.asarray([500])), "query holds id 500"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_computed(model, store, chunks, query, message):
    """Pitfall 59 and hostile ids."""
    with pytest.raises(ValueError, match=message):
        ask(model, store, chunks, query)


def test_requests_beyond_the_model_are_refused_with_the_numbers(model, store):
    """R-09."""
    limit = model.config.max_positions
    long = np.zeros(limit, np.int32)
    with pytest.raises(ValueError, match=rf"needs {limit + 8} positions.*1 to {limit}"):
        ask(model, store, [long])


def test_an_id_that_is_gone_is_a_miss(model, store, passages):
    chunk_id = store.put(jf.encode_chunk(model, passages[0]))
    store.clear()
    with pytest.raises(ChunkMiss):
        ask(model, store, [chunk_id])


def test_caches_of_another_model_are_refused(model, store, passages):
    """A store, or a host tier above it, that was opened for another model, rule or share of anchors."""
    other = model.replace(weights_id="other weights")
    with pytest.raises(ValueError, match="The store holds caches of another model or anchor rule: weights_id differ"):
        ask(other, store, passages)
    assert not len(store.ids()), "nothing was encoded into it"
    theirs = jf.ChunkStore.open("memory://", other)
    with pytest.raises(ValueError, match="The host tier holds caches of another model"):
        ask(model, store, passages, host=HostTier(theirs))
    with pytest.raises(ValueError, match="host tier keeps anchors at 0.2 and the store at 0.1"):
        ask(model, store, passages, host=HostTier(jf.ChunkStore.open("memory://", model, anchor_ratio=0.2)))
    by_fingerprint = jf.ChunkStore.open("memory://", Fingerprint.of(model, anchor_rule=sink()))
    with pytest.raises(ValueError, match="another model or anchor rule: anchor_rule"):
        ask(model, by_fingerprint, passages)


def test_a_store_takes_no_chunk_of_another_model_or_rule(model, passages):
    """A cache under a foreign name would be served for good; a chunk knows who made it, also when it was read back."""
    store = jf.ChunkStore.open("memory://", model, anchor_rule=sink())
    with pytest.raises(ValueError, match=r"another model or anchor rule made it.*anchor_rule=store\.anchor_rule"):
        store.put(jf.encode_chunk(model, passages[0]))
    with pytest.raises(ValueError, match="another model or anchor rule made it"):
        store.put(jf.encode_chunk(model.replace(weights_id="other"), passages[0], anchor_rule=sink()))
    id = store.put(jf.encode_chunk(model, passages[0], anchor_rule=sink()))
    (again,) = store.read([id])
    assert store.put(again) == id
    with pytest.raises(ValueError, match="another model or anchor rule made it"):
        jf.ChunkStore.open("memory://", model).put(again)


def test_other_weights_have_no_identity_until_they_are_given_one(model):
    """Caches of fine-tuned weights are not those of the weights they came from."""
    tuned = model.replace(params=jax.tree.map(lambda a: a * 2, model.params))
    assert tuned.weights_id == "" and model.replace(tokenizer=None).weights_id == model.weights_id != ""
    with pytest.raises(ValueError, match="weights_id is empty"):
        jf.ChunkStore.open("memory://", tuned)
    assert jf.ChunkStore.open("memory://", tuned.replace(params=tuned.params, weights_id="tuned")).fingerprint


def test_a_passage_found_damaged_while_it_is_read_is_a_miss_wherever_it_stands(model, passages, tmp_path):
    """The last layer's values are read after the selection; the report counts every place of the passage."""
    store = jf.ChunkStore.open(f"file://{tmp_path}", model)
    whole = ask(model, store, [passages[0], passages[1], passages[0]])
    path = tmp_path / f"{store.lookup(passages[0]).id}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = ask(model, jf.ChunkStore.open(f"file://{tmp_path}", model), [passages[0], passages[1], passages[0]])
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert again.report.hits == 1 and set(again.report.missed) == {0, 2}
    assert all("encoded again while serving" in reason for reason in again.report.missed.values())


def test_a_negative_count_of_new_tokens_is_refused(model, store, passages):
    with pytest.raises(ValueError, match=r"max_new_tokens is -1; use a count >= 0"):
        jf.answer(model, store, passages, "who?", SELECTOR, CONFIG, max_new_tokens=-1)


def test_layers_outside_the_model_are_refused(model, store, passages):
    """S-07."""
    with pytest.raises(ValueError, match=r"holds 3, but this model has layers 0..2"):
        jf.answer(model, store, passages, "who?", jf.selectors.qcfuse((1, 3)), CONFIG)


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_ratios_are_validated(ratio):
    """S-06."""
    with pytest.raises(ValueError, match="FusionConfig.ratio"):
        FusionConfig(ratio=ratio)


def test_the_same_passage_twice_is_stored_once_and_placed_twice(model, store, passages):
    """Pitfall 59: two placements of one stored cache do not alias."""
    out = ask(model, store, [passages[0], passages[1], passages[0]])
    assert len(store) == 2 and out.report.num_context == 2 * len(passages[0]) + len(passages[1])


def test_two_questions_over_one_store_do_not_disturb_each_other(model, store, passages):
    """P-04 and pitfall 13."""
    first = ask(model, store, passages, "who?").tokens
    ask(model, store, passages, "where, and when?")
    np.testing.assert_array_equal(ask(model, store, passages, "who?").tokens, first)
