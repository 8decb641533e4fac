"""Picks: exact counts and ties of the hard one; budget, gradient and limits of the soft one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.selectors.topk import soft_top_k, top_k

pytestmark = pytest.mark.usefixtures("strict")
SOFT = jax.jit(soft_top_k)
NOISE = np.random.default_rng(0).standard_normal(40).astype(np.float32)


def loop_top_k(scores, k):
    """The definition, one position at a time: the best by score, then by lower index; NaN is as bad as -inf."""
    order = sorted(range(len(scores)), key=lambda i: (np.inf if np.isnan(scores[i]) else -scores[i], i))
    picked = np.zeros(len(scores), bool)
    picked[order[: max(int(k), 0)]] = True
    return picked


CASES = {
    "noise": NOISE,
    "descending": np.arange(40, 0, -1, dtype=np.float32),  # S-03
    "constant": np.ones(40, np.float32),  # pitfall 31
    "few values": np.round(NOISE),
    "padded": np.r_[NOISE[:30], np.full(10, -np.inf, np.float32)],
    "signed zeros": np.where(NOISE > 0, 0.0, -0.0).astype(np.float32),
    "nan and infinities": np.r_[np.nan, np.inf, NOISE[:36], np.nan, -np.inf].astype(np.float32),
    "denormals": (NOISE * 1e-42).astype(np.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_top_k_equals_a_loop(case):
    """Pitfall 31, S-03: score descending, then index ascending, whatever the input and for every k."""
    scores = CASES[case]
    if case == "denormals":  # XLA on a CPU may flush them to zero; either answer has exactly k positions
        assert all(int(top_k(jnp.asarray(scores), k).sum()) == k for k in (0, 7, 40))
        return
    for k in (0, 1, 7, 39, 40, 41):
        np.testing.assert_array_equal(top_k(jnp.asarray(scores), k), loop_top_k(scores, k))


def test_top_k_of_rows_with_a_traced_budget_compiles_once():
    """Pitfall 53: a ratio sweep is one program, and every row of a batch is picked on its own."""
    picks = jax.jit(top_k)
    rows = np.stack([NOISE, NOISE[::-1], np.zeros_like(NOISE)])
    for k in range(5):
        np.testing.assert_array_equal(picks(rows, k), [loop_top_k(row, k) for row in rows])
    assert picks._cache_size() == 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 0.1, 1.0, 30.0])
def test_soft_weights_sum_to_the_budget(temperature):
    """Weights lie in [0, 1], follow the order of the scores, and sum to k; padding weighs nothing."""
    scores = CASES["padded"]
    for k in (1, 7, 15, 29):
        weights = np.asarray(SOFT(scores, k, temperature=temperature), np.float64)
        assert weights.sum() == pytest.approx(k, rel=1e-4, abs=1e-4)
        assert weights.min() >= 0 and weights.max() <= 1 and not weights[30:].any()
        assert (np.diff(weights[np.argsort(scores[:30], kind="stable")]) >= -1e-6).all()


def test_soft_weights_become_hard():
    """As the temperature falls, weights go to the hard pick of distinct scores; tied scores share what is left."""
    for k in (1, 7, 29):
        np.testing.assert_allclose(SOFT(NOISE, k, temperature=1e-4), top_k(jnp.asarray(NOISE), k), atol=1e-3)
    tied = np.array([2.0, 1.0, 1.0, 0.0], np.float32)
    np.testing.assert_allclose(SOFT(tied, 2, temperature=1e-3), [1, 0.5, 0.5, 0], atol=1e-6)


def reference_soft_top_k(scores, k, temperature):
    """Bisection in float64."""
    low, high = scores.min() - 60 * temperature, scores.max() + 60 * temperature
    for _ in range(200):
        middle = (low + high) / 2
        total = (1 / (1 + np.exp(-np.clip((scores - middle) / temperature, -500, 500)))).sum()
        low, high = (middle, high) if total > k else (low, middle)
    return 1 / (1 + np.exp(-np.clip((scores - low) / temperature, -500, 500)))


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_gradient_is_the_implicit_one(temperature):
    """The Jacobian against central differences of a float64 bisection; its columns keep the budget."""
    scores, k = NOISE[:12].astype(np.float64), 5
    actual = jax.jacrev(functools.partial(soft_top_k, k=k, temperature=temperature))(jnp.asarray(scores, jnp.float32))
    step = 1e-5
    expected = np.stack(
        [
            (
                reference_soft_top_k(scores + step * row, k, temperature)
                - reference_soft_top_k(scores - step * row, k, temperature)
            )
            / (2 * step)
            for row in np.eye(12)
        ],
        axis=1,
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(actual).sum(0), 0, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(
        SOFT(scores.astype(np.float32), k, temperature=temperature),
        reference_soft_top_k(scores, k, temperature),
        atol=1e-5,
    )


@pytest.mark.parametrize("case", ["noise", "constant", "few values", "padded", "all padded"])
def test_soft_gradient_is_never_nan(case):
    """k = 0, k = all, more than all, ties and padding: weights and gradients stay finite, the ends exact."""
    scores = np.full(40, -np.inf, np.float32) if case == "all padded" else CASES[case]
    real = np.isfinite(scores)
    for temperature in (1e-4, 0.1):
        for k in (0, 1, int(real.sum()), 41):
            weights, gradient = jax.value_and_grad(
                lambda s, k=k, t=temperature: (jnp.arange(40.0) * SOFT(s, k, temperature=t)).sum()
            )(jnp.asarray(scores))
            assert np.isfinite(weights) and np.isfinite(gradient).all()
            if k == 0 or k >= real.sum():
                np.testing.assert_array_equal(SOFT(scores, k, temperature=temperature), real & (k > 0))
                assert not np.asarray(gradient).any()


@pytest.mark.parametrize("scale", [1e-6, 1e3, 1e6])
def test_soft_budget_holds_for_scores_of_any_size(scale):
    """Scores need not be probabilities: far from 1 the budget still holds, in a batch of rows too."""
    rows = np.stack([NOISE, NOISE[::-1]]) * np.float32(scale)
    for temperature in (1e-3, 0.1):
        weights = np.asarray(SOFT(rows, 7, temperature=temperature), np.float64)
        np.testing.assert_allclose(weights.sum(-1), 7, atol=1e-3)
    tied = np.float32(scale) * np.array([1, 1, 1, 0, 2], np.float32)
    np.testing.assert_allclose(SOFT(tied, 3, temperature=scale * 1e-5), [2 / 3, 2 / 3, 2 / 3, 0, 1], atol=1e-3)


@pytest.mark.parametrize("temperature", [0, 0.0, -0.1, float("nan")])
def test_temperatures_are_above_zero(temperature):
    with pytest.raises(ValueError, match=r"temperature is .*; use a number above 0, or top_k"):
        soft_top_k(jnp.arange(4.0), 2, temperature=temperature)
