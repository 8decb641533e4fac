"""The learned score against plain NumPy; fitting, keeping and using its weights."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors, train
from jfuse.fuse import cache_error, soft_fuse
from jfuse.selectors.base import select
from jfuse.selectors.learned import ScoreWeights, equal_weights, features, span_loss, weighted
from jfuse.selectors.topk import soft_top_k
from tests.selectors import plain

LAYERS = (1, 3)


def plain_features(request, layers):
    """log(attention + 1e-6), averaged over rows first, centred over the context: [Lv, N, context]."""
    q, own = plain.query_states(request, plain.everything_before(request))
    keys, _ = plain.cached(request)
    mass = np.stack([plain.head_mass(request, q[l], own[l], keys[l]).mean(0)[:, request.num_prefix :] for l in layers])
    logs = np.log(mass + 1e-6)
    return logs - logs.mean(-1, keepdims=True)


def random_weights(shape, seed=0):
    rng = np.random.default_rng(seed)
    return ScoreWeights(*(rng.random(size).astype(np.float32) + 0.1 for size in (shape[:1], shape, shape)))


def test_score_and_selection(request_, evidence, score, choose):
    """w * log-attention / spread, added up over heads and layers; uniform weights without params."""
    selector = selectors.learned(LAYERS, tokens="context")
    expected = plain_features(request_, LAYERS)
    seen = evidence(request_, selector)
    np.testing.assert_allclose(plain.on_context(request_, jax.jit(features)(seen)), expected, rtol=1e-3, atol=1e-4)
    weights = random_weights((2, 4))
    factor = (weights.layer[:, None] * weights.head / weights.scale)[..., None]
    actual = plain.on_context(request_, score(selector, seen, weights))
    np.testing.assert_allclose(actual, (factor * expected).sum(1), rtol=1e-3, atol=1e-4)
    equal = plain.on_context(request_, score(selector, seen))
    np.testing.assert_allclose(equal, expected.sum(1) / 8, rtol=1e-3, atol=1e-4)
    selection = choose(request_, selector, 0.2, params=weights)
    assert plain.picked(request_, selection.recompute[0]) == plain.best((factor * expected).sum((0, 1)), 13)


def made_examples(count, signal, seed=0, shape=(2, 3), size=40):
    """Features of noise in which head (1, 2) alone points at the answer."""
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        context = np.arange(size) < size - i % 3
        seen = rng.standard_normal((*shape, size)).astype(np.float32) * np.array([1, 5, 0.2])[None, :, None]
        span = np.zeros(size, bool)
        span[rng.integers(0, size - 5) + np.arange(2)] = True
        seen[1, 2] += signal * span
        seen = np.where(context, seen - seen[..., context].mean(-1, keepdims=True), 0).astype(np.float32)
        examples.append(train.Example(seen, span, context))
    return examples


def recall(weights, examples, k):
    hits = []
    for one in examples:
        scores = np.asarray(weighted(weights, jnp.asarray(one.features)).sum((0, 1)))
        hits.append(one.span[np.argsort(-np.where(one.context, scores, -np.inf))[:k]].sum() / one.span.sum())
    return np.mean(hits)


def test_fit_finds_the_head_that_localises():
    """The loss falls, weights stay non-negative, and the one head that knows gets the weight, on other questions."""
    fit = train.fit(made_examples(24, 0.6))
    assert fit.losses[-1] < 0.7 * fit.losses[0] and fit.num_dropped == 0
    assert (fit.weights.head >= 0).all() and np.unravel_index(fit.weights.head.argmax(), (2, 3)) == (1, 2)
    fresh = made_examples(40, 0.6, seed=1)
    assert recall(fit.weights, fresh, 4) > recall(equal_weights(2, 3)._replace(scale=fit.weights.scale), fresh, 4) + 0.1
    layers = train.fit(made_examples(24, 0.6), learn="layers").weights
    np.testing.assert_array_equal(layers.head, equal_weights(2, 3).head)
    assert layers.layer[1] > layers.layer[0]
    np.testing.assert_allclose(fit.weights.scale[0], [1, 5, 0.2], rtol=0.1)  # a head's spread is measured


def test_training_data_is_checked():
    """Examples without a marked position are left out and counted; none at all is an error."""
    marked, blank = made_examples(1, 1.0)[0], made_examples(1, 1.0)[0]
    blank = blank._replace(span=np.zeros_like(blank.span))
    assert train.fit([marked, blank], steps=1).num_dropped == 1
    with pytest.raises(ValueError, match="None of the 2 examples"):
        train.fit([blank, blank])
    with pytest.raises(ValueError, match="learn is 'head'; use one of 'heads', 'layers', 'both'"):
        inspect.unwrap(train.fit)([marked], learn="head")  # the type hook of the tests would refuse first


def test_loss_is_the_listwise_cross_entropy():
    """Against NumPy in float64, padding left out, gradient against finite differences."""
    one, weights = made_examples(2, 1.0)[1], random_weights((2, 3))
    factor = np.float64(weights.layer)[:, None] * weights.head / weights.scale
    scores = (factor[..., None] * one.features).sum((0, 1))[one.context]
    shares = np.exp(scores - scores.max())
    expected = -np.log(shares / shares.sum())[one.span[one.context]].mean()
    loss = lambda head: span_loss(weights._replace(head=head), jnp.asarray(one.features), one.span, one.context)  # noqa: E731
    assert float(loss(jnp.asarray(weights.head))) == pytest.approx(expected, rel=1e-5)
    gradient = jax.grad(loss)(jnp.asarray(weights.head))
    for at in ((0, 1), (1, 2)):
        step = np.zeros((2, 3), np.float32)
        step[at] = 1e-2
        slope = (float(loss(weights.head + step)) - float(loss(weights.head - step))) / 2e-2
        assert float(gradient[at]) == pytest.approx(slope, rel=2e-2)


def test_an_example_marks_positions_of_the_context(request_, evidence):
    """Answer positions count from the first context token, behind the prefix."""
    seen = evidence(request_, selectors.learned(LAYERS))
    one = train.example(seen, np.array([0, 5, 68]))
    assert np.flatnonzero(one.span).tolist() == [9, 14, 77] and one.context.sum() == 69
    assert one.features.shape == (2, 4, 192)
    for outside in ([0, 69], [-1]):
        with pytest.raises(ValueError, match=rf"{outside[-1]}; use 0 to 68"):
            train.example(seen, np.array(outside))


def test_weights_belong_to_their_model(tmp_path, request_, choose):
    """S-10: saved and loaded bit for bit, used hard unchanged; refused for another model, naming both."""
    model = request_.model.replace(weights_id="a")
    weights = random_weights((2, 4))
    train.save_weights(tmp_path / "w", model, weights, layers=LAYERS, tokens="context")
    selector, loaded = train.load_weights(tmp_path / "w", model)
    assert selector is selectors.learned(LAYERS, tokens="context", anchor_ratio=0.1, denominator="all")
    jax.tree.map(np.testing.assert_array_equal, weights, loaded)
    a, b = (choose(request_, selector, 0.2, params=w).recompute for w in (weights, loaded))
    np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="set of learned weights was made for the model with fingerprint"):
        train.load_weights(tmp_path / "w", model.replace(weights_id="b"))
    with pytest.raises(ValueError, match="give a new folder"):
        train.save_weights(tmp_path / "w", model, weights, layers=LAYERS)
    with pytest.raises(ValueError, match=r"shape \(2, 4\), but this selector scores 4 layers"):
        train.save_weights(tmp_path / "other", model, weights)
    with pytest.raises(ValueError, match="absent"):
        train.load_weights(tmp_path / "nothing", model)


@pytest.mark.slow
def test_gradient_reaches_the_weights_through_fusion(request_, evidence):
    """The gradient of the cache's error with respect to head weights, through pick and fusion, by differences."""
    selector = selectors.learned(LAYERS, tokens="context")
    seen, full = evidence(request_, selector), request_.full()
    start = random_weights((2, 4))

    @jax.jit
    def loss(head):
        pick = functools.partial(soft_top_k, temperature=0.5)
        selection = select(selector, seen, 20, num_layers=4, pick=pick, params=start._replace(head=head))
        return cache_error(soft_fuse(request_.model, request_.context, selection), full).sum()

    head = jnp.asarray(start.head)
    gradient = np.asarray(jax.grad(loss)(head))
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4
    direction = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    slope = (float(loss(head + 0.01 * direction)) - float(loss(head - 0.01 * direction))) / 0.02
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=0.03, abs=1e-4)
