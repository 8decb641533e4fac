"""Gradients through pick and soft fusion: logit KL and evidence recall by differences, and never a NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.fuse import cache_error, soft_fuse
from jfuse.generate import prefill_query
from jfuse.probe import probe
from jfuse.selectors.allocate import layerwise, restricted, uniform, union
from jfuse.selectors.base import Selector, select
from jfuse.selectors.topk import perturbed, soft_top_k, straight_through, top_k
from tests import tiny

pytestmark = pytest.mark.usefixtures("strict")
ANSWER = np.array([12, 13, 30])  # entries of the context that stand for the evidence


@pytest.fixture(scope="module")
def made():
    return tiny.build_request()


@pytest.fixture(scope="module")
def losses(made):
    """`losses(scores, k, temperature, allocate=, pick=)`: what a selection of raw scores costs, in three ways."""
    model, context = made.model, made.context
    full = made.full()
    wanted, _ = prefill_query(model, full, made.query)
    evidence = probe(model, made.query, None, context, selectors.reuse().view)

    def compute(scores, k, temperature=0.3, *, allocate=uniform, pick=None):
        view = selectors.prophetkv().view if scores.shape[0] > 1 else selectors.reuse().view
        selector = Selector(view, lambda evidence, params=None: params, allocate)
        pick = pick or functools.partial(soft_top_k, temperature=temperature)
        selection = select(selector, evidence, k, num_layers=4, pick=pick, params=scores)
        fused = context._replace(kv=soft_fuse(model, context, selection).kv)
        got, _ = prefill_query(model, fused, made.query)
        log_p, log_q = jax.nn.log_softmax(wanted), jax.nn.log_softmax(got)
        return {
            "cache_error": cache_error(fused, full).mean(),
            "kl": (jnp.exp(log_p) * (log_p - log_q)).sum(),
            "recall": selection.recompute[-1, ANSWER].mean(dtype=jnp.float32),
        }

    return compute


RELAXED = restricted(layerwise, union, 2)


@pytest.fixture(scope="module")
def slopes(losses):
    """Every loss and its gradient with respect to the scores, compiled once per allocator."""
    return jax.jit(
        lambda scores, k, temperature=0.3, allocate=uniform: (
            losses(scores, k, temperature, allocate=allocate),
            jax.jacrev(lambda s: losses(s, k, temperature, allocate=allocate))(scores),
        ),
        static_argnames="allocate",
    )


def draw(rows, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, 192)), jnp.float32)


@pytest.mark.parametrize("allocate", [uniform, RELAXED], ids=["uniform", "restricted"])
def test_gradients_of_scores_against_finite_differences(losses, slopes, allocate):
    """Directional derivative of cache error, logit KL and recall, for one set and for RelaxKV's sets and window."""
    scores, direction = (draw(1 if allocate is uniform else 4, seed) for seed in (0, 1))
    _, gradients = slopes(scores, 20, allocate=allocate)
    step = 5e-3
    above, below = (slopes(scores + sign * step * direction, 20, allocate=allocate)[0] for sign in (1, -1))
    for name, gradient in gradients.items():
        slope = (float(above[name]) - float(below[name])) / (2 * step)
        assert np.isfinite(gradient).all() and abs(slope) > 1e-4, name
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=0.03, abs=5e-5), name
        assert not np.asarray(gradient)[:, :9].any() and not np.asarray(gradient)[:, 78:].any(), name


@pytest.mark.parametrize("case", ["none", "all", "ties", "cold"])
def test_no_gradient_is_nan(slopes, case):
    """Ratio 0, ratio 1, tied scores, a temperature near 0: losses and gradients stay finite, the ends without slope."""
    scores = jnp.zeros((4, 192), jnp.float32) if case == "ties" else draw(4)
    k = {"none": 0, "all": 69}.get(case, 20)
    values, gradients = slopes(scores, k, 1e-4 if case == "cold" else 0.3, allocate=RELAXED)
    assert all(np.isfinite(value) for value in values.values())
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    if case in ("none", "all"):
        assert not any(np.asarray(gradient).any() for gradient in gradients.values())
    if case == "all":
        assert values["cache_error"] < 1e-5 and abs(values["kl"]) < 1e-5 and values["recall"] == 1


def test_bfloat16_gradient_is_finite(made):
    """The whole chain in bfloat16, ties and padding included."""
    low = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)  # noqa: E731
    model = made.model.replace(params=low(made.model.params))
    context = made.context._replace(kv=low(made.context.kv))
    evidence = probe(model, made.query, None, context, selectors.reuse().view)
    selector = Selector(selectors.reuse().view, lambda evidence, params=None: params)
    full = made.full()._replace(kv=low(made.full().kv))

    def loss(scores, k):
        pick = functools.partial(soft_top_k, temperature=0.1)
        selection = select(selector, evidence, k, num_layers=4, pick=pick, params=scores)
        return cache_error(soft_fuse(model, context, selection), full).mean()

    for k in (0, 20, 69):
        value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.round(draw(1)), k)
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_straight_through_is_hard_forward_and_soft_backward():
    """The weights of `top_k`, the gradient of `soft_top_k`; made once, so that jit compiles once."""
    scores, along = draw(1)[0, :40], jnp.arange(40.0)
    pick = straight_through(0.2)
    assert pick is straight_through(temperature=0.2)
    np.testing.assert_array_equal(pick(scores, 7), np.asarray(top_k(scores, 7), np.float32))
    hard = jax.grad(lambda s: (pick(s, 7) * along).sum())(scores)
    soft = jax.grad(lambda s: (soft_top_k(s, 7, temperature=0.2) * along).sum())(scores)
    np.testing.assert_allclose(hard, soft, rtol=1e-6)


def test_perturbed_pick_is_the_mean_of_hard_ones():
    """Weights sum to k, lie in [0, 1], leave padding out, tell apart clear scores; its gradient has the right sign."""
    scores = jnp.asarray([2.0, 1.9, 0.0, -9.0, -jnp.inf])
    pick = perturbed(jax.random.key(0), sigma=0.5, num_samples=400)
    weights = np.asarray(pick(scores, 2))
    assert weights.sum() == pytest.approx(2) and weights.min() >= 0 and weights.max() <= 1
    assert weights[4] == 0 and weights[3] == 0 and weights[0] >= weights[1] > weights[2] > 0
    rows = np.asarray(pick(jnp.stack([scores, scores[::-1]]), 2))
    np.testing.assert_allclose(rows.sum(-1), 2)
    gradient = np.asarray(jax.grad(lambda s: pick(s, 2)[2])(scores))
    assert np.isfinite(gradient).all() and gradient[2] > 0 > gradient[1] and gradient[4] == 0
    np.testing.assert_array_equal(pick(scores, 0), 0)
    np.testing.assert_array_equal(pick(scores, 4), [1, 1, 1, 1, 0])


@pytest.mark.slow
def test_soft_picks_train_through_fusion(losses):
    """Every pick gives a finite, non-zero gradient of the cache error."""
    for pick in (straight_through(0.3), perturbed(jax.random.key(1), sigma=0.3, num_samples=20)):
        gradient = jax.jit(jax.grad(lambda s, p=pick: losses(s, 20, pick=p)["cache_error"]))(draw(1))
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
