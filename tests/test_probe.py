"""Query states under every token view, and the scores made of them, against one dense masked pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.anchors import NUM_SINKS, chunk_anchors, default_rule
from jfuse.config import View
from jfuse.models.decoder import Model
from jfuse.probe import chunk_offsets, probe
from jfuse.selectors.score import query_attention
from jfuse.stitch import make_layout, stitch_anchors
from jfuse.types import ContextCache
from tests.reference import scores, softmax
from tests.tiny import build_request

pytestmark = pytest.mark.usefixtures("strict")
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
LAYERS = (2, 0)


def run(request, view, **settings):
    return probe(request.model, request.query, request.view_cache(view), request.context, view, **settings)


def reference_anchors(request, ratio):
    """[L, N]: first tokens, then the best by the reference's own KVzip scores, ceil(ratio * C) a chunk."""
    shown = []
    for chunk in request.chunks:
        expected = request.reference.anchor_scores(chunk.tokens, default_rule(request.model).instruction)
        expected[:, :NUM_SINKS] = np.inf
        keep = int(np.ceil(round(ratio * len(chunk.tokens), 9)))
        mask = np.zeros(expected.shape, bool)
        np.put_along_axis(mask, np.argsort(-expected, axis=1, kind="stable")[:, :keep], True, axis=1)
        shown.append(mask)
    return np.concatenate(shown, axis=1)


@pytest.mark.parametrize("name", ["llama", "phi3-longrope-biases"])
@pytest.mark.parametrize("tokens", ["query", "prefix", "anchors", "context"])
def test_query_states_equal_a_masked_pass(name, tokens):
    """QCFuse eqs. 9, 17; pitfalls 20, 21: the query stands after the whole request and sees what the view shows."""
    request = build_request(name)
    view = View(tokens, LAYERS, anchor_ratio=0.3)
    evidence = run(request, view)
    expected = request.probed(view, reference_anchors(request, 0.3))
    size = len(request.query)
    for row, l in enumerate(LAYERS):
        np.testing.assert_allclose(evidence.queries[row][:size], expected.q[l, -size:], **CLOSE)
        np.testing.assert_allclose(evidence.query[row].k[:size], expected.k[l, -size:], **CLOSE)
        np.testing.assert_allclose(evidence.query[row].v[:size], expected.v[l, -size:], **CLOSE)
        assert evidence.pic[row] is request.context.kv[l]
    np.testing.assert_array_equal(evidence.query_positions[:size], np.arange(size) + request.end)
    assert evidence.scoring_rows.sum() == size


def reference_scores(request, view, layers, denominator, heads, rows, scoring):
    """Attention of the scoring rows over prefix, context and query as one softmax, then reduced."""
    expected, (stale, _) = request.probed(view, reference_anchors(request, view.anchor_ratio)), request.stale()
    first, last, ids = request.num_prefix, request.end, np.arange(len(request.ids))
    out = []
    for l in layers:
        q, keys = expected.q[l, last:], expected.k[l].copy()
        keys[first:last] = stale[l, first:last]
        mask = ids[None, :] <= ids[last:, None]
        mask &= {"all": ids >= 0, "prefix+context": ids < last, "context": (ids >= first) & (ids < last)}[denominator]
        weights = softmax(scores(q, keys), mask)[:, scoring, first:last]
        weights = weights.mean(0) if heads == "mean" else weights.max(0)
        out.append(weights.mean(0) if rows == "mean" else weights.max(0))
    return np.stack(out)


@pytest.mark.parametrize("denominator", ["all", "prefix+context", "context"])
@pytest.mark.parametrize(("heads", "rows"), [("mean", "mean"), ("max", "max"), ("mean", "max")])
def test_scores_equal_a_dense_softmax(denominator, heads, rows):
    """QCFuse eqs. 10, 18; pitfalls 23 to 26: three denominators, mean and maximum, the question's rows alone."""
    request, scoring = build_request(), slice(2, 9)
    view = View("anchors", LAYERS, anchor_ratio=0.3)
    evidence = run(request, view, scoring=scoring)
    actual = np.asarray(jax.jit(query_attention(denominator=denominator, heads=heads, rows=rows))(evidence))
    expected = reference_scores(request, view, LAYERS, denominator, heads, rows, scoring)
    first, last = request.num_prefix, request.end
    np.testing.assert_allclose(actual[:, first:last], expected, rtol=1e-4, atol=1e-7)
    assert actual.dtype == np.float32 and not actual[:, last:].any()
    if denominator == "context":
        assert not actual[:, :first].any()
        if (heads, rows) == ("mean", "mean"):
            np.testing.assert_allclose(actual.sum(-1), 1, rtol=1e-5)  # pitfall 24


def test_an_anchor_ratio_of_one_is_the_context_view():
    """Pitfall 20: all tokens as anchors show what the whole stitched cache shows."""
    request = build_request()
    all_anchors, context = (run(request, view) for view in (View("anchors", (3,), 1.0), View("context", (3,))))
    np.testing.assert_allclose(all_anchors.queries[0][:11], context.queries[0][:11], **CLOSE)


def test_the_query_stands_after_the_request_not_after_the_anchors():
    """Pitfall 20: at positions moved to the compacted length the states differ."""
    request = build_request()
    view = View("anchors", (2,))
    moved = request.context._replace(segments=np.where(np.arange(192) < 30, request.context.segments, -1))
    there, here = (probe(request.model, request.query, request.anchors(), c, view) for c in (request.context, moved))
    assert here.query_positions[0] == 30 and there.query_positions[0] == 78
    assert np.abs(np.asarray(there.queries[0] - here.queries[0])[:11]).max() > 1e-2


def test_only_the_named_rows_score():
    """Pitfall 26: an explicit span; the rest of the query is run but does not score."""
    request = build_request()
    evidence = run(request, View("query", (1,)), scoring=slice(3, 7))
    np.testing.assert_array_equal(evidence.scoring_rows, (np.arange(64) >= 3) & (np.arange(64) < 7))
    whole = run(request, View("query", (1,)))
    np.testing.assert_array_equal(evidence.queries[0], whole.queries[0])


@pytest.mark.parametrize("scoring", [slice(3, 3), slice(11, None), slice(0, 0)])
def test_an_empty_question_is_refused(scoring):
    """Pitfall 26."""
    with pytest.raises(ValueError, match="none of the 11 query tokens"):
        run(build_request(), View("query", (1,)), scoring=scoring)


def test_bad_queries_are_refused():
    """Pitfall 59: no tokens; ids that the vocabulary does not have would read NaN embeddings."""
    request, view = build_request(), View("query", (1,))
    with pytest.raises(ValueError, match="query.*at least one"):
        probe(request.model, np.zeros(0, np.int32), None, request.context, view)
    with pytest.raises(ValueError, match=r"query.*128.*0\.\.127"):
        probe(request.model, np.array([3, 128], np.int32), None, request.context, view)


def test_a_missing_anchor_cache_is_refused():
    request = build_request()
    for tokens in ("anchors", "prefix"):
        with pytest.raises(ValueError, match="stitch_anchors"):
            probe(request.model, request.query, None, request.context, View(tokens, (1,)))


def test_the_probe_stops_at_the_deepest_layer():
    """Pitfall 27: weights below the deepest layer, and that layer's output projection and MLP, are not read."""
    request = build_request()
    depth = 2
    poisoned = {
        name: {
            key: jnp.where(
                (jnp.arange(4) < (depth if name in ("o", "gate_up", "down", "mlp_norm") else depth + 1)).reshape(
                    -1, *[1] * (leaf.ndim - 1)
                ),
                leaf,
                jnp.nan,
            )
            for key, leaf in part.items()
        }
        for name, part in request.model.params["blocks"].items()
    }
    model = Model(request.model.config, request.model.params | {"blocks": poisoned})
    view = View("anchors", (0, depth))
    anchors = request.anchors()
    anchors = anchors._replace(positions=anchors.positions[:depth], kv=anchors.kv[:depth])
    evidence = probe(model, request.query, anchors, request.context, view)
    for ours, theirs in zip(evidence.queries, run(request, view).queries, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_only_the_views_layers_are_read():
    """Pitfall 28: a mapping with the view's layers will do, and nothing in it is changed."""
    request = build_request()
    view = View("anchors", (1, 3))
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(request.context.kv)]
    few = request.context._replace(kv={l: request.context.kv[l] for l in (1, 3)})
    evidence = probe(request.model, request.query, request.anchors(), few, view)
    jax.tree.map(np.testing.assert_array_equal, evidence, run(request, view))
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(request.context.kv)] == before


def test_padding_the_query_changes_nothing():
    """S-05, pitfall 32: padded query rows neither score nor change the others."""
    request = build_request()
    view = View("anchors", LAYERS, anchor_ratio=0.3)
    bare, padded = run(request, view, pad=False), run(request, view)
    assert len(bare.scoring_rows) == 11 and len(padded.scoring_rows) == 64
    for ours, theirs in zip(bare.queries, padded.queries, strict=True):
        np.testing.assert_allclose(ours, theirs[:11], rtol=1e-5, atol=1e-6)
    score = jax.jit(query_attention())
    np.testing.assert_allclose(score(bare), score(padded), rtol=1e-5, atol=1e-8)
    assert np.isfinite(score(padded)).all()


def test_a_query_longer_than_the_context():
    """T-08: 20 context tokens, 600 query tokens."""
    request = build_request(lengths=(13, 7), query=600)
    view = View("context", (1,))
    evidence = run(request, view)
    expected = request.probed(view)
    np.testing.assert_allclose(evidence.queries[0][:600], expected.q[1, -600:], **CLOSE)


def test_views_without_a_prefix():
    """Pitfall 59: without a system prefix, "prefix" shows nothing and "anchors" the anchors alone."""
    request = build_request(prefix=0)
    alone = run(request, View("query", LAYERS))
    for ours, theirs in zip(run(request, View("prefix", LAYERS, 0.0)).queries, alone.queries, strict=True):
        np.testing.assert_allclose(ours[:11], theirs[:11], **CLOSE)
    view = View("anchors", LAYERS, anchor_ratio=0.3)
    expected = request.probed(view, reference_anchors(request, 0.3))
    np.testing.assert_allclose(run(request, view).queries[0][:11], expected.q[2, -11:], **CLOSE)
    empty = stitch_anchors(
        [], request.model.config.rope, make_layout([c.tokens for c in request.chunks]), layers=range(2)
    )
    nothing = probe(request.model, request.query, empty, request.context, View("prefix", LAYERS))
    np.testing.assert_allclose(nothing.queries[0][:11], alone.queries[0][:11], **CLOSE)
    blocks = [chunk_anchors(chunk, 0.0) for chunk in request.chunks]
    bare = stitch_anchors(blocks, request.model.config.rope, make_layout([c.tokens for c in request.chunks]), ratio=0.0)
    nothing = probe(request.model, request.query, bare, request.context, View("anchors", LAYERS, 0.0))
    np.testing.assert_allclose(nothing.queries[0][:11], alone.queries[0][:11], **CLOSE)


def test_recomputed_first_layers():
    """Views that ask for fresh layers get those of the full prefill, prefix and padding apart."""
    request = build_request()
    evidence = run(request, View("none", (), fresh=2))
    full = request.reference.run(request.ids)
    assert len(evidence.fresh) == 2 and evidence.queries == ()
    for l, layer in enumerate(evidence.fresh):
        np.testing.assert_allclose(layer.k[: request.end], full.k[l, : request.end], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(layer.v[: request.end], full.v[l, : request.end], rtol=1e-5, atol=1e-5)


def test_more_fresh_layers_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="fresh.*5.*4"):
        run(build_request(), View("none", (), fresh=5))


def test_offsets_inside_chunks():
    """One chunk twice in a row starts again, whatever its content; a one-token chunk has offset 0."""
    request = build_request()
    offsets = run(request, View()).offsets
    expected = [*range(9), *range(21), 0, *range(34), *range(13)]
    np.testing.assert_array_equal(offsets[: request.end], expected)
    np.testing.assert_array_equal(chunk_offsets(np.zeros(0, np.int32)), [])
    assert isinstance(request.context, ContextCache)
