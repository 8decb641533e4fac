"""Sparse fusion against dense masked passes, soft fusion against float64 mixing and finite differences."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.fuse import Work, cache_error, fuse, fuse_layer, fusion_work, soft_fuse
from jfuse.generate import prefill_query
from jfuse.models.decoder import Model, prefill
from jfuse.selectors.allocate import uniform
from jfuse.selectors.base import select
from jfuse.selectors.topk import soft_top_k
from jfuse.stitch import stitch
from jfuse.types import Selection
from tests.reference import restricted_mask
from tests.tiny import build_model, build_request, choose, look

pytestmark = pytest.mark.usefixtures("strict")
fusing = importlib.import_module("jfuse.fuse")  # `jfuse.fuse` is the function
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LOGITS = {"rtol": 1e-4, "atol": 1e-4}


def selection(request, recompute, visible=None, window=0):
    visible = np.ones((1, recompute.shape[1]), bool) if visible is None else visible
    return Selection(recompute, visible, np.int32(window))


def staircase(request, seed=0):
    """Nested random sets: a position is recomputed from layer 0 to a depth of its own; prefix and padding never."""
    rng = np.random.default_rng(seed)
    depth = rng.integers(0, request.model.config.num_layers + 1, len(request.context.segments))
    depth[np.asarray(request.context.segments) < 0] = 0
    return np.arange(request.model.config.num_layers)[:, None] < depth[None, :]


def assert_cache(context, expected, end):
    for l, layer in enumerate(context.kv):
        np.testing.assert_allclose(layer.k[:end], expected.k[l, :end], err_msg=f"keys of layer {l}", **CLOSE)
        np.testing.assert_allclose(layer.v[:end], expected.v[l, :end], err_msg=f"values of layer {l}", **CLOSE)


def assert_same_cache(a, b, end, **close):
    for ours, theirs in zip(a.kv, b.kv, strict=True):
        np.testing.assert_allclose(ours.k[:end], theirs.k[:end], **(close or CLOSE))
        np.testing.assert_allclose(ours.v[:end], theirs.v[:end], **(close or CLOSE))


def bytes_of(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


VISIBLE = {"all": None, "shared": 1, "per layer": 4}


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("shape", ["uniform", "staircase"])
def test_sparse_and_dense_equal_the_masked_pass(shape, visible, window):
    """Law 4, pitfalls 8, 10, 11, 40: rows that retire are read stale below; a row sees U, prefix, window and itself."""
    request = build_request()
    recompute = staircase(request) if shape == "staircase" else request.rows(*range(1, 69, 2))
    rows = VISIBLE[visible]
    shown = None if rows is None else np.random.default_rng(1).random((rows, recompute.shape[1])) < 0.4
    chosen = selection(request, recompute, shown, window)
    expected = request.oracle(recompute, visible=shown, window=window)
    fused = fuse(request.model, request.context, chosen, row_block=32)
    assert_cache(fused, expected, request.end)
    logits, _ = prefill_query(request.model, fused, request.query)
    np.testing.assert_allclose(logits, expected.logits[-1], **LOGITS)
    assert_cache(soft_fuse(request.model, request.context, chosen), expected, request.end)


@pytest.mark.parametrize("row_block", [1, 128])
def test_row_padding_changes_nothing(row_block):
    """K-05, pitfall 32: rows of a staircase padded to any block; padding writes vanish, reads reach no real row."""
    request = build_request()
    chosen = selection(request, request.rows(*range(0, 69, 2)) if row_block == 1 else staircase(request))
    expected = fuse(request.model, request.context, chosen, row_block=32)
    actual = fuse(request.model, request.context, chosen, row_block=row_block)
    assert_same_cache(actual, expected, request.end)
    for l, layer in enumerate(actual.kv):
        rest = ~chosen.recompute[l]
        np.testing.assert_array_equal(np.asarray(layer.k)[rest], np.asarray(request.context.kv[l].k)[rest])


def test_the_last_row_is_not_a_bin_for_padding():
    """K-05: the row before the end of the buffer and the last one keep their bits, in an unpadded buffer too."""
    request = build_request(pad_to=1)
    assert len(request.context.segments) == request.end
    chosen = selection(request, request.rows(3, 30, 31))
    fused = fuse(request.model, request.context, chosen, row_block=32)
    for layer, before in zip(fused.kv, request.context.kv, strict=True):
        np.testing.assert_array_equal(layer.k[-30:], before.k[-30:])
        np.testing.assert_array_equal(layer.v[-30:], before.v[-30:])
    assert_cache(fused, request.oracle(chosen.recompute), request.end)


def test_context_padding_changes_nothing():
    """Pitfall 32: one request in an exact buffer and in a padded one, cache and logits."""
    bare, padded = build_request(pad_to=1), build_request()
    caches = [
        fuse(request.model, request.context, selection(request, request.rows(3, 30, 31)), row_block=32)
        for request in (bare, padded)
    ]
    assert_same_cache(*caches, bare.end)
    ours, theirs = (prefill_query(bare.model, cache, bare.query)[0] for cache in caches)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_poisoned_padding_reaches_nobody():
    """S-05, P-02: whatever stands in the buffer behind the last entry."""
    request = build_request()
    poisoned = request.context._replace(
        kv=tuple(
            type(kv)(kv.k.at[request.end :].set(1e4), kv.v.at[request.end :].set(1e4)) for kv in request.context.kv
        )
    )
    chosen = selection(request, staircase(request), np.random.default_rng(0).random((1, 192)) < 0.5, 2)
    clean, dirty = (fuse(request.model, context, chosen, row_block=32) for context in (request.context, poisoned))
    assert_same_cache(dirty, clean, request.end, rtol=0, atol=0)
    np.testing.assert_array_equal(
        prefill_query(request.model, dirty, request.query)[0], prefill_query(request.model, clean, request.query)[0]
    )


def test_a_recomputed_start_is_the_full_prefill():
    """Pitfall 6: rows whose every earlier key is fresh are exact, whatever stands after them."""
    request = build_request()
    fused = fuse(request.model, request.context, selection(request, request.rows(*range(30))), row_block=32)
    assert_cache(fused, request.reference.run(request.ids), request.num_prefix + 30)


def test_the_last_layer_needs_keys_and_values_only():
    """Pitfall 7: its output projection and MLP are not read, nor those of a row's own last layer."""
    request = build_request()
    blocks = request.model.params["blocks"]
    poisoned = blocks | {
        name: jax.tree.map(lambda leaf: leaf.at[-1].set(jnp.nan), blocks[name]) for name in ("o", "gate_up", "down")
    }
    model = Model(request.model.config, request.model.params | {"blocks": poisoned})
    chosen = selection(request, staircase(request))
    assert_same_cache(
        fuse(model, request.context, chosen, row_block=32),
        fuse(request.model, request.context, chosen, row_block=32),
        request.end,
        rtol=0,
        atol=0,
    )


def test_nothing_runs_when_nothing_is_selected():
    """ID-2, S-01: no layer is copied, none compiled, none launched; rows that all stop early leave deeper layers be."""
    request = build_request()
    compiled = fuse_layer._cache_size()
    fused = fuse(request.model, request.context, selection(request, request.rows()), row_block=17)
    assert all(ours is theirs for ours, theirs in zip(fused.kv, request.context.kv, strict=True))
    assert fuse_layer._cache_size() == compiled
    shallow = request.rows(5, 6, 7)
    shallow[2:] = False
    fused = fuse(request.model, request.context, selection(request, shallow), row_block=32)
    assert fused.kv[2] is request.context.kv[2] and fused.kv[3] is request.context.kv[3]
    assert_cache(fused, request.oracle(shallow), request.end)


def test_fusing_is_pure():
    """Pitfalls 13, 28, P-04: A, B, A again; nothing that was given is changed."""
    a, b = build_request(), build_request(lengths=(40, 17, 9), seed=2)
    before = bytes_of((a.context, b.context, a.chunks, a.prefix))
    chosen = selection(a, staircase(a))
    first = fuse(a.model, a.context, chosen, row_block=32)
    fuse(b.model, b.context, selection(b, staircase(b, 1)), row_block=32)
    assert bytes_of(fuse(a.model, a.context, chosen, row_block=32)) == bytes_of(first)
    assert bytes_of((a.context, b.context, a.chunks, a.prefix)) == before


def test_donating_gives_the_same_bits():
    """Serving overwrites the given layers; the result does not depend on it."""
    request = build_request()
    chosen = selection(request, staircase(request))
    kept = fuse(request.model, request.context, chosen, row_block=32)
    copy = jax.tree.map(jnp.array, request.context.kv)
    given = fuse(request.model, request.context._replace(kv=iter(copy)), chosen, row_block=32, donate=True)
    assert bytes_of(given.kv) == bytes_of(kept.kv)


def test_an_iterator_may_be_read_once_layer_by_layer():
    """Law 5: layer l + 1 is not asked for before layer l is fused."""
    request = build_request()
    asked = []

    def layers():
        for l, layer in enumerate(request.context.kv):
            asked.append(l)
            yield layer

    fused = fuse(
        request.model, request.context._replace(kv=layers()), selection(request, staircase(request)), row_block=32
    )
    assert asked == [0, 1, 2, 3] and len(fused.kv) == 4


def test_fuse_inside_a_trace_leaves_no_tracer_behind():
    """Law 5: a model that a jitted function closes over serves outside of it afterwards."""
    request = build_request()
    fresh = Model(request.model.config, request.model.params)
    chosen = selection(request, staircase(request))
    work = fusion_work(chosen)
    traced = jax.jit(lambda context: fuse(fresh, context, chosen, work=work, row_block=32))(request.context)
    outside = fuse(fresh, request.context, chosen, row_block=32)
    assert_same_cache(traced, outside, request.end)
    np.testing.assert_allclose(
        prefill(fresh, request.context.tokens, request.context.positions, hidden="none").kv[1].k[:9],
        request.context.kv[1].k[:9],
        **CLOSE,
    )


def test_selections_that_make_no_sense_are_refused():
    """S-09, pitfall 40: sets must be nested; soft weights are not rounded."""
    request = build_request()
    swapped = request.rows(1, 2)
    swapped[1:] = request.rows(3, 4)[1:]  # as many rows, other ones
    for wrong in (staircase(request)[::-1], swapped):
        with pytest.raises(ValueError, match="one before|nested|depth"):
            fuse(request.model, request.context, selection(request, wrong))
    with pytest.raises(TypeError, match="soft_fuse"):
        fuse(request.model, request.context, selection(request, staircase(request).astype(np.float32)))


@pytest.mark.parametrize(
    ("lengths", "prefix", "query"),
    [
        ((1,), 0, 5),  # T-06: one token alone
        ((13, 7, 1, 9, 5), 0, 1),  # T-06: as the third of five; a query of one token
        ((34, 34), 0, 11),
        ((13, 7), 9, 600),  # T-08
    ],
)
def test_extreme_requests(lengths, prefix, query):
    """Pitfall 59: nothing, some and everything recomputed, logits included."""
    request = build_request(lengths=lengths, prefix=prefix, query=query)
    count = request.num_context
    for picked in ((), range(0, count, 2), range(count)):
        chosen = selection(request, request.rows(*picked))
        fused = fuse(request.model, request.context, chosen, row_block=96)
        expected = request.oracle(chosen.recompute)
        assert_cache(fused, expected, request.end)
        np.testing.assert_allclose(prefill_query(request.model, fused, request.query)[0], expected.logits[-1], **LOGITS)


def test_the_same_chunk_twice_does_not_alias():
    """Pitfall 59: recomputing one placement leaves the other alone."""
    request = build_request(lengths=(34, 34))
    twin = build_request(lengths=(34,), seed=0).chunks[0]
    context = stitch([twin, twin], request.model.config.rope, pad_to=192)
    request = request._replace(chunks=(twin, twin), prefix=None, context=context)
    chosen = selection(request, request.rows(*range(34, 68)))
    fused = fuse(request.model, context, chosen, row_block=96)
    assert_cache(fused, request.reference.run(request.ids), request.end)
    for layer, before in zip(fused.kv, context.kv, strict=True):
        np.testing.assert_array_equal(layer.k[:34], before.k[:34])


# Soft fusion -----------------------------------------------------------------------------------------------------


def soft_case():
    """A short request; the visible weights and recompute weights are proper fractions, prefix and padding apart."""
    request = build_request(lengths=(7, 5), prefix=3, query=4, pad_to=1)
    rng = np.random.default_rng(5)
    size = len(request.context.segments)
    recompute = np.sort(rng.random((4, size)), axis=0)[::-1].astype(np.float32)
    recompute[:, :3] = 0
    return request, recompute, rng.random((4, size)).astype(np.float32)


def soft_oracle(request, recompute, visible, window):
    """float64: w * new + (1 - w) * stale; keys weigh in the softmax; the prefix is exact and seen in full."""
    end, at = request.end, np.arange(request.end)
    stale = [part[:, :end] for part in request.stale()]
    exact = request.reference.run(request.ids)
    for part, full in zip(stale, (exact.k, exact.v), strict=True):
        part[:, :3] = full[:, :3]
    mask = np.zeros((4, end, end))
    for l in range(4):
        near = restricted_mask(at, request.context.segments, np.zeros(end, bool), window)
        mask[l] = np.where(near, 1.0, np.tril(np.broadcast_to(visible[l], (end, end))))
    return request.reference.run(request.ids[:end], mask=mask, stale=stale, fresh=recompute)


@pytest.mark.parametrize("window", [0, 2])
def test_soft_fusion_mixes_by_its_definition(window):
    """Section 3 of the method: w * KV^New + (1 - w) * KV^PIC at every layer, for weights strictly between 0 and 1."""
    request, recompute, visible = soft_case()
    actual = soft_fuse(request.model, request.context, selection(request, recompute, visible, window))
    assert_cache(actual, soft_oracle(request, recompute, visible, window), request.end)


def test_soft_fusion_gradient_against_finite_differences():
    """With respect to recompute and visible weights, against central differences of the float64 definition."""
    request, recompute, visible = soft_case()
    mix = np.random.default_rng(6).standard_normal((4, request.end, 2, 16))

    def loss(recompute, visible):
        fused = soft_fuse(request.model, request.context, selection(request, recompute, visible))
        return sum((kv.k * jnp.asarray(m, jnp.float32) + kv.v).sum() for kv, m in zip(fused.kv, mix, strict=True))

    def exact(recompute, visible):
        out = soft_oracle(request, recompute, visible, 0)
        return (out.k * mix).sum() + out.v.sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(recompute, visible)
    inputs, step = (recompute.astype(float), visible.astype(float)), 1e-5
    for which, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all()
        for place in [(0, 4), (1, 9), (2, 5), (3, 14), (2, 3)]:
            up, down = ([a.copy() for a in inputs] for _ in range(2))
            up[which][place] += step
            down[which][place] -= step
            expected = (exact(*up) - exact(*down)) / (2 * step)
            np.testing.assert_allclose(np.asarray(gradient)[place], expected, rtol=2e-3, atol=2e-3)


def test_gradient_from_the_cache_error_to_the_scores():
    """Scores, soft pick, soft fusion, error against full prefill: finite, and the slope of the whole chain."""
    request, _, _ = soft_case()
    full = request.full()
    real = np.asarray(request.context.segments) >= 0
    scores = np.where(real, np.random.default_rng(7).standard_normal(len(real)), -np.inf).astype(np.float32)
    pick = functools.partial(soft_top_k, temperature=0.5)

    def loss(scores):
        chosen = uniform(scores[None], lambda s: pick(s, 5), (0,), 4)
        return cache_error(soft_fuse(request.model, request.context, chosen), full).sum()

    run = jax.jit(jax.value_and_grad(loss))
    value, gradient = run(scores)
    assert np.isfinite(value) and np.isfinite(gradient).all() and not np.asarray(gradient)[~real].any()
    assert np.abs(gradient).max() > 1e-3
    direction = np.where(real, np.random.default_rng(8).standard_normal(len(real)), 0).astype(np.float32)
    step = np.float32(1e-2)
    plus, minus = (float(run(np.where(real, scores + sign * step * direction, -np.inf))[0]) for sign in (1, -1))
    np.testing.assert_allclose((plus - minus) / (2 * step), (np.asarray(gradient) * direction).sum(), rtol=2e-2)


@pytest.mark.slow
def test_checkpointing_does_not_change_the_gradient():
    request, recompute, visible = soft_case()

    def loss(recompute, remat):
        fused = soft_fuse(request.model, request.context, selection(request, recompute, visible), remat=remat)
        return sum((kv.k**2 + kv.v**2).sum() for kv in fused.kv)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(gradient(recompute, True), gradient(recompute, False), rtol=1e-4, atol=1e-4)


def shapes_inside(jaxpr):
    """Every array shape that a traced function makes, at any depth."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars if hasattr(variable.aval, "shape"))
        for value in equation.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from shapes_inside(inner)


def test_soft_fusion_never_holds_scores_of_all_rows():
    """Pitfall 57: nothing as large as layers x heads x rows x context, nor heads x rows x context, in either pass."""
    request = build_request(lengths=(128,) * 4, prefix=0, pad_to=1)
    size, heads = 512, 4
    weights = np.full((4, size), 0.5, np.float32)

    def loss(weights):
        fused = soft_fuse(request.model, request.context, selection(request, weights, weights))
        return sum((kv.k + kv.v).sum() for kv in fused.kv)

    for run in (loss, jax.grad(loss)):
        largest = max(int(np.prod(shape)) for shape in shapes_inside(jax.make_jaxpr(run)(weights).jaxpr))
        assert largest < heads * size * size


def test_cache_error_counts_context_positions():
    """Zero against itself, one against zeros; prefix and padding do not count."""
    request = build_request()
    zeros = request.context._replace(kv=jax.tree.map(jnp.zeros_like, request.context.kv))
    np.testing.assert_array_equal(cache_error(request.context, request.context), np.zeros(4))
    np.testing.assert_allclose(cache_error(zeros, request.context), np.ones(4), rtol=1e-6)
    outside = np.asarray(request.context.segments) < 0
    other = request.context._replace(
        kv=jax.tree.map(lambda a: jnp.where(outside[:, None, None], 1e3, a), request.context.kv)
    )
    np.testing.assert_array_equal(cache_error(other, request.context), np.zeros(4))
    full = request.full()
    for l, error in enumerate(np.asarray(cache_error(request.context, full))):
        ours, theirs = (np.concatenate([np.asarray(a)[9:78].ravel() for a in c.kv[l]]) for c in (request.context, full))
        np.testing.assert_allclose(error, np.linalg.norm(ours - theirs) / np.linalg.norm(theirs), rtol=1e-4, atol=1e-6)


def test_work_is_counted_exactly():
    """S-09: rows per layer, and whether anything is hidden from them."""
    request = build_request()
    recompute = staircase(request)
    assert fusion_work(selection(request, recompute))[:2] == Work(tuple(recompute.sum(-1).tolist()), False)[:2]
    hidden = np.ones((1, 192), bool)
    hidden[0, 20] = False
    assert fusion_work(selection(request, recompute, hidden)).restricted
    assert build_model().config.num_layers == 4


BEGINNING = {
    "cacheblend": selectors.cacheblend(),
    "lmcache": selectors.cacheblend("lmcache"),
    "paper": selectors.cacheblend("paper", schedule=(0.6,)),
    "deeper check": selectors.cacheblend(check_layer=2),
    "a3": selectors.a3(),
}


@pytest.mark.parametrize("row_block", [1, 32])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("name", BEGINNING)
def test_layers_that_the_probe_has_run_are_not_run_again(name, ratio, row_block, monkeypatch):
    """The cache is that of a fusion from the start, and its first layers are taken from the probe.

    At ratio 1 the gradual filter's last budget lets everyone through, and the probe has run fewer.
    """
    request, selector = build_request(), BEGINNING[name]
    evidence, chosen = look(request, selector), choose(request, selector, ratio)
    whole = fuse(request.model, request.context, chosen)
    work = fusion_work(chosen, begun=evidence.begun)
    assert work.begun == (0 if (name, ratio) == ("paper", 1.0) else selector.view.fresh)
    ran = []
    monkeypatch.setattr(
        fusing,
        "fuse_layer",
        lambda config, block, *given, **how: ran.append(block) or fuse_layer(config, block, *given, **how),
    )
    short = fuse(request.model, request.context, chosen, begun=evidence.begun, row_block=row_block)
    assert_same_cache(short, whole, request.end)
    assert len(ran) == request.model.config.num_layers - max(work.begun, 1)  # the last layer has a function of its own


@pytest.mark.parametrize(("name", "ratio"), [("cacheblend", 0.0), ("qcfuse", 0.3)])
def test_a_probe_that_began_otherwise_is_not_taken(name, ratio):
    """A budget of 0, and targets that are not everyone at the first layers: then fusion starts from the embeddings."""
    request = build_request()
    evidence = look(request, selectors.cacheblend())
    chosen = choose(request, selectors.by_name(name, layers=(1, 2)), ratio)
    assert fusion_work(chosen, begun=evidence.begun).begun == 0
    ours = fuse(request.model, request.context, chosen, begun=evidence.begun)
    assert bytes_of(ours) == bytes_of(fuse(request.model, request.context, chosen))


def test_a_traced_selection_needs_its_count():
    request = build_request()
    chosen = choose(request, selectors.epic(), 0.3)
    with pytest.raises(TypeError, match=r"selection is traced.*work=fusion_work\(selection\)"):
        jax.jit(lambda chosen: fuse(request.model, request.context, chosen).kv)(chosen)


def test_evidence_of_another_view_is_refused():
    """As far as the number of layers tells."""
    request = build_request()
    evidence = look(request, selectors.qcfuse((1, 2)))
    num_layers = request.model.config.num_layers
    for other in (selectors.prophetkv(), selectors.qcfuse((1,)), selectors.cacheblend()):
        with pytest.raises(ValueError, match=r"evidence holds 2 layers.*probe\(\.\.\., selector\.view\)"):
            select(other, evidence, 3, num_layers=num_layers)
    assert select(selectors.epic(), evidence, 3, num_layers=num_layers).recompute[0].sum() == 3  # it looks at none
