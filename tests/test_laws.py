"""The exact identities of fusion for every family: the library against the dense float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.config import budget
from jfuse.fuse import Work, fuse, fusion_work, soft_fuse
from jfuse.generate import generate, prefill_query
from jfuse.probe import probe
from jfuse.selectors.base import select
from jfuse.stitch import stitch
from jfuse.types import Selection
from tests.tiny import choose

KV, LOGITS = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 1e-4, "atol": 1e-4}
SELECTORS = {
    "qcfuse": selectors.qcfuse((1, -1)),
    "random": selectors.random(3),
    "reuse": selectors.reuse(),
    "recompute_all": selectors.recompute_all(),
}
pytestmark = pytest.mark.usefixtures("strict")


def assert_cache(context, expected, end):
    for l, layer in enumerate(context.kv):
        np.testing.assert_allclose(layer.k[:end], expected.k[l, :end], err_msg=f"keys of layer {l}", **KV)
        np.testing.assert_allclose(layer.v[:end], expected.v[l, :end], err_msg=f"values of layer {l}", **KV)


def assert_request(request, context, expected):
    assert_cache(context, expected, request.end)
    logits, _ = prefill_query(request.model, context, request.query)
    np.testing.assert_allclose(logits, expected.logits[-1], **LOGITS)


def assert_same_bits(a, b, where=slice(None)):
    for ours, theirs in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(ours.k)[where], np.asarray(theirs.k)[where])
        np.testing.assert_array_equal(np.asarray(ours.v)[where], np.asarray(theirs.v)[where])


@pytest.mark.parametrize("family", ["llama", "phi3-longrope-biases"])
def test_full_prefill_equals_the_reference(make_request, family):
    request = make_request(family)
    assert_request(request, request.full(), request.reference.run(request.ids))


@pytest.mark.parametrize("name", SELECTORS)
def test_ends_and_middle(make_request, family, name):
    """ID-1, ID-2, ID-7, S-01, S-02; pitfalls 1, 2, 8, 11, 12: every end and the middle, K, V and logits."""
    request, selector = make_request(family), SELECTORS[name]
    for ratio in (0.0, 0.3, 1.0):
        selection = choose(request, selector, ratio)
        fused = fuse(request.model, request.context, selection, row_block=96)
        picked = np.asarray(selection.recompute)
        expected_count = {"reuse": 0, "recompute_all": 69}.get(name, budget(selector.rule, ratio, 69))
        assert picked.sum(-1).tolist() == [expected_count] * request.model.config.num_layers
        if not picked.any():
            assert all(a is b for a, b in zip(fused.kv, request.context.kv, strict=True))
        for l in range(len(picked)):
            assert_same_bits(fused.kv[l : l + 1], request.context.kv[l : l + 1], ~picked[l])
        assert_request(request, fused, request.oracle(picked))
        if expected_count == 69:
            assert_request(request, fused, request.reference.run(request.ids))


@pytest.mark.parametrize("name", SELECTORS)
def test_a_single_chunk_without_prefix_is_exact(make_request, name):
    """ID-3, pitfall 3: nothing precedes the chunk, so any selection gives the full prefill."""
    request = make_request("llama", (34,), prefix=0)
    expected = request.reference.run(request.ids)
    for ratio in (0.0, 0.3, 1.0):
        selection = choose(request, SELECTORS[name], ratio)
        assert_request(request, fuse(request.model, request.context, selection, row_block=96), expected)


def test_all_but_the_first_chunk(make_request, family):
    """ID-4: without a prefix the first chunk is exact already."""
    request = make_request(family, prefix=0)
    selection = Selection(request.rows(*range(21, 69)), np.ones((1, len(request.context.segments)), bool), np.int32(0))
    fused = fuse(request.model, request.context, selection, row_block=96)
    assert_request(request, fused, request.reference.run(request.ids))


def test_layer_zero_is_exact_and_layer_one_is_not(make_request, family):
    """ID-5, pitfalls 4, 5, 18, 22: layer 0 depends on token and position only; other chunks enter at layer 1."""
    request = make_request(family)
    full, segments = request.reference.run(request.ids), np.asarray(request.context.segments)
    k, v = request.context.kv[0]
    np.testing.assert_allclose(k[: request.end], full.k[0, : request.end], **KV)
    np.testing.assert_allclose(v[: request.end], full.v[0, : request.end], **KV)
    for segment in range(len(request.chunks)):  # the first too: it never saw the prefix
        at = segments == segment
        assert (
            np.abs(np.asarray(request.context.kv[1].v)[at] - full.v[1][at[: len(full.v[1])].nonzero()[0]]).max() > 1e-2
        )


def test_stitching_equals_the_reference(make_request, family):
    """Every layer of the stitched cache: rotation once, to request positions, values untouched (pitfalls 17, 22)."""
    request = make_request(family)
    k, v = request.stale()
    first, last = request.num_prefix, request.end
    for l, layer in enumerate(request.context.kv):
        np.testing.assert_allclose(layer.k[first:last], k[l, first:last], **KV)
        np.testing.assert_array_equal(
            layer.v[first:last], np.concatenate([np.asarray(chunk.kv[l].v) for chunk in request.chunks])
        )


def test_a_row_of_a_padded_batch_equals_the_request_alone(make_request):
    """ID-8, S-08: requests of one bucket under vmap, each with its own N and k."""
    requests = [make_request(), make_request(lengths=(40, 17, 9), seed=2), make_request(lengths=(5,), seed=4)]
    selector, model = SELECTORS["qcfuse"], requests[0].model
    evidence = [probe(model, r.query, r.view_cache(selector.view), r.context, selector.view) for r in requests]
    k = np.array([budget(selector.rule, 0.3, r.context.num_tokens) for r in requests])
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    selection = jax.vmap(lambda e, k: select(selector, e, k, num_layers=4))(stack(evidence), k)
    work = Work((int(k.max()),) * 4, restricted=False)
    fused = jax.vmap(lambda c, s: fuse(model, c, s, work=work, row_block=96))(
        stack([r.context for r in requests]), selection
    )
    for i, request in enumerate(requests):
        alone = choose(request, selector, 0.3)
        np.testing.assert_array_equal(selection.recompute[i], alone.recompute)
        expected = fuse(model, request.context, alone, row_block=96)
        for batched, single in zip(fused.kv, expected.kv, strict=True):
            np.testing.assert_allclose(batched.k[i], single.k, **KV)
            np.testing.assert_allclose(batched.v[i], single.v, **KV)


def test_fuse_over_an_iterator_under_jit_and_over_a_tuple(make_request):
    """Law 5: layers that are still arriving, a trace, and resident layers give the same bits."""
    request = make_request()
    selection = choose(request, SELECTORS["random"], 0.3)
    work = fusion_work(selection)
    fused = fuse(request.model, request.context, selection, row_block=96)
    streamed = fuse(request.model, request.context._replace(kv=iter(request.context.kv)), selection, row_block=96)
    assert_same_bits(fused.kv, streamed.kv)
    traced = jax.jit(lambda m, c, s: fuse(m, c, s, work=work, row_block=96))(request.model, request.context, selection)
    for ours, theirs in zip(fused.kv, traced.kv, strict=True):
        np.testing.assert_allclose(ours.k, theirs.k, **KV)
        np.testing.assert_allclose(ours.v, theirs.v, **KV)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fuse_equals_soft_fuse_at_zero_and_one(make_request, family):
    """Law 4: the dense path defines the sparse path."""
    request = make_request(family)
    selection = choose(request, SELECTORS["random"], 0.3)
    hard = fuse(request.model, request.context, selection, row_block=96)
    soft = soft_fuse(request.model, request.context, selection)
    assert_cache(soft, request.oracle(selection.recompute), request.end)
    for ours, theirs in zip(hard.kv, soft.kv, strict=True):
        np.testing.assert_allclose(ours.k[: request.end], theirs.k[: request.end], **KV)
        np.testing.assert_allclose(ours.v[: request.end], theirs.v[: request.end], **KV)


def test_a_chunk_never_changes_an_earlier_entry(make_request):
    """Law 7, pitfall 10: with the selection fixed, a changed later token leaves fresh entries before it alone."""
    request = make_request()
    chunks = (*request.chunks[:3], make_request(lengths=(13,), seed=90).chunks[0])
    changed = stitch(chunks, request.model.config.rope, prefix=request.prefix, pad_to=request.pad_to)
    selection = Selection(
        request.rows(3, 21, 22, 40, 55, 57, 60, 68), np.ones((1, len(changed.segments)), bool), np.int32(0)
    )
    before = fuse(request.model, request.context, selection, row_block=96)
    after = fuse(request.model, changed, selection, row_block=96)
    border = request.num_prefix + 56
    assert_same_bits(before.kv, after.kv, slice(0, border))
    assert np.abs(np.asarray(before.kv[2].v - after.kv[2].v)[border : request.end]).max() > 1e-2


def test_requests_of_one_bucket_share_everything_that_is_compiled(make_request, compilations):
    """Pitfall 53, K-06 in small: other lengths and another number of chunks, from stitching to the second token."""

    def serve(request):
        anchors = request.anchors()
        context = stitch(request.chunks, request.model.config.rope, prefix=request.prefix, pad_to=request.pad_to)
        request = request._replace(context=context)
        evidence = probe(request.model, request.query, anchors, context, SELECTORS["qcfuse"].view)
        k = budget("floor_min1", 0.3, request.num_context)
        selection = select(SELECTORS["qcfuse"], evidence, k, num_layers=4)
        fused = fuse(request.model, context, selection, row_block=96)
        return generate(request.model, fused, request.query, max_new_tokens=3, stop=frozenset()).tolist()

    requests = [
        make_request(),
        make_request(lengths=(40, 17, 9), query=25, seed=2),
        make_request(lengths=(5,), query=1, seed=4),
        make_request(lengths=(3, 1, 7, 2, 100, 8, 5), prefix=64, seed=5),
    ]
    first = serve(requests[0])
    compilations.count = 0
    answers = [serve(request) for request in requests]
    assert compilations.count == 0 and answers[0] == first
