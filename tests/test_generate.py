"""Greedy decoding over a cache in any state, against one dense pass per token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.chunks import encode_chunk
from jfuse.evals.compare import BANDS, compare
from jfuse.evals.fidelity import answer_logits
from jfuse.fuse import cache_error, fuse, soft_fuse
from jfuse.generate import generate, prefill_query, stream
from jfuse.stitch import stitch
from jfuse.types import Selection
from tests.tiny import build_request

pytestmark = pytest.mark.usefixtures("strict")
NEW = 20
NEVER = frozenset()


def select(request, recompute):
    return Selection(recompute, np.ones((1, recompute.shape[1]), bool), np.int32(0))


def dense_answer(request, recompute, count=NEW):
    """One dense pass per token: the answer so far is part of the query."""
    tokens = []
    for _ in range(count):
        longer = request._replace(query=np.concatenate([request.query, np.asarray(tokens, np.int32)]))
        tokens.append(int(longer.oracle(recompute).logits[-1].argmax()))
    return tokens


@pytest.mark.parametrize("picked", ["nothing", "a third", "everything"])
def test_greedy_answers_equal_dense_passes(picked):
    """Pitfalls 2, 14: first token and position, then the tail; stale, fused and full caches alike."""
    request = build_request()
    recompute = request.rows(*{"nothing": (), "a third": range(0, 69, 3), "everything": range(69)}[picked])
    context = fuse(request.model, request.context, select(request, recompute), row_block=96)
    answer = generate(request.model, context, request.query, max_new_tokens=NEW, stop=NEVER)
    assert answer.dtype == np.int32 and answer.tolist() == dense_answer(request, recompute)
    if picked == "everything":
        plain = generate(request.model, request.full(), request.query, max_new_tokens=NEW, stop=NEVER)
        assert plain.tolist() == answer.tolist()


def test_a_tail_that_outgrows_the_querys_bucket():
    """The answer crosses a multiple of 64 positions; the query fills its bucket exactly, or by all but one."""
    for length in (63, 64):
        request = build_request(query=length)
        answer = generate(request.model, request.context, request.query, max_new_tokens=6, stop=NEVER)
        assert answer.tolist() == dense_answer(request, request.rows(), 6)


def test_stopping():
    """W-06: any stop id ends the answer and is not part of it; the count is an upper limit."""
    request = build_request()
    run = lambda stop, count=NEW: generate(  # noqa: E731
        request.model, request.context, request.query, max_new_tokens=count, stop=frozenset(stop)
    ).tolist()
    free = run(())
    assert len(free) == NEW and run((), 3) == free[:3] and run((), 1) == free[:1] and run((), 0) == []
    assert run({free[0]}) == []
    cut = next(i for i in range(1, NEW) if free[i] not in free[:i])
    assert run({free[cut]}) == free[:cut]
    unused = next(token for token in range(128) if token not in free)
    assert run({unused, free[cut]}) == run({free[cut], unused, unused}) == free[:cut]


def test_decoding_reads_and_does_not_write():
    """P-04, pitfall 13: two questions over one fused cache, in both orders and again, give the same answers."""
    request, other = build_request(), build_request(query=25, seed=3).query
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(request.context)]
    run = lambda query: generate(request.model, request.context, query, max_new_tokens=5, stop=NEVER).tolist()  # noqa: E731
    first, second = run(request.query), run(other)
    assert run(other) == second and run(request.query) == first
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(request.context)] == before


def test_tokens_come_one_by_one():
    request = build_request()
    tokens = stream(request.model, request.context, request.query, max_new_tokens=NEW, stop=NEVER)
    assert [next(tokens), next(tokens)] == generate(
        request.model, request.context, request.query, max_new_tokens=2, stop=NEVER
    ).tolist()


@pytest.mark.parametrize(
    ("query", "message"), [([], "query.*at least one"), ([3, 128], r"query.*128.*0\.\.127"), ([-1], r"-1.*0\.\.127")]
)
def test_bad_queries_are_refused(query, message):
    """Pitfall 59."""
    request = build_request()
    with pytest.raises(ValueError, match=message):
        generate(request.model, request.context, np.asarray(query, np.int32))


def test_requests_beyond_the_model_are_refused():
    """R-09: with both numbers, before anything runs; a negative count of new tokens too."""
    request = build_request()
    with pytest.raises(ValueError, match="4097.*4096"):
        generate(request.model, request.context, request.query, max_new_tokens=4097 - 78 - 11)
    with pytest.raises(ValueError, match="max_new_tokens.*-1"):
        generate(request.model, request.context, request.query, max_new_tokens=-1)


def low_precision(model):
    return model.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params))


def test_low_precision_drifts_within_the_band():
    """N-01, pitfall 55: bfloat16 weights and caches stay bfloat16; logits stay near float32's on the same numbers."""
    request = build_request()
    low = low_precision(request.model)
    wide = low.replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low.params))
    chosen = select(request, np.roll(request.rows(*range(0, 69, 3)), -9, 1))  # without the prefix
    answers = []
    for model in (wide, low):
        chunks = [encode_chunk(model, chunk.tokens) for chunk in request.chunks]
        context = stitch(chunks, model.config.rope, pad_to=192)
        fused = fuse(model, context, chosen, row_block=96)
        assert all(leaf.dtype == model.dtype for leaf in jax.tree.leaves(fused.kv))
        answers.append(answer_logits(model, fused, request.query, np.arange(8)))
    assert (np.asarray(cache_error(fused, soft_fuse(low, context, chosen))) < 0.02).all()  # law 4 in low precision
    result = compare(*answers, band=BANDS["bfloat16"])
    assert result.verdict != "different", result
    assert result.drift > 1e-3  # it is low precision


def test_full_prefill_and_reuse_differ():
    """The control of all of the above: stale caches do not answer like fresh ones."""
    request = build_request()
    stale, full = (
        prefill_query(request.model, context, request.query)[0] for context in (request.context, request.full())
    )
    assert compare(np.asarray(full)[None], np.asarray(stale)[None], band=BANDS["bfloat16"]).verdict == "different"
