"""Attention mass per position against a dense softmax, for every denominator and reduction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import pallas
from jfuse.pallas.attention_mass import KEY_BLOCK
from jfuse.types import PAD_POSITION
from tests.reference import scores, softmax

pytestmark = pytest.mark.usefixtures("strict")
CLOSE = {"rtol": 2e-5, "atol": 1e-7}
attention_mass = jax.jit(pallas.attention_mass, static_argnames=("heads", "over_rows", "implementation"))
log_mass = jax.jit(pallas.log_mass)
KEYS, ROWS, PREFIX = KEY_BLOCK + 77, 7, 20


@pytest.fixture(scope="module")
def case():
    """Query rows after the keys, two of them padding; a prefix and padded keys."""
    rng = np.random.default_rng(0)
    q, k, own = (rng.standard_normal(shape, np.float32) for shape in ((ROWS, 6, 12), (KEYS, 2, 12), (ROWS, 2, 12)))
    places = np.r_[np.arange(KEYS - 30), np.full(30, PAD_POSITION)].astype(np.int32)
    at = np.r_[np.arange(5) + KEYS - 30, np.full(2, PAD_POSITION)].astype(np.int32)
    return q, k, own, places, at


def dense(case, denominator, heads, over_rows, rows):
    q, k, own, places, at = case
    real = places < PAD_POSITION
    counted = real & (np.arange(KEYS) >= PREFIX) if denominator == "context" else real
    mask = np.broadcast_to(counted, (ROWS, KEYS))
    every = scores(q, k)
    if denominator == "all":
        every = np.concatenate([every, scores(q, own)], -1)
        mask = np.concatenate([mask, at[None, :] <= at[:, None]], -1)
    weights = softmax(every, mask)[:, rows, :KEYS]  # [N, U, S]
    weights = {"mean": weights.mean(0), "max": weights.max(0), "each": weights}[heads]
    return weights.mean(-2) if over_rows == "mean" else weights.max(-2)


@pytest.mark.parametrize(
    ("denominator", "heads", "over_rows"),
    [
        ("all", "mean", "mean"),
        ("all", "max", "max"),
        ("all", "each", "max"),
        ("prefix+context", "mean", "mean"),
        ("context", "mean", "mean"),
        ("context", "mean", "max"),
    ],
)
def test_equals_a_dense_softmax(case, denominator, heads, over_rows):
    """Pitfalls 23 to 26, 32: three softmax sets, heads and rows reduced either way, only the scoring rows count."""
    q, k, own, places, at = case
    rows = np.array([False, True, True, False, True, False, False])
    counted = places < PAD_POSITION
    if denominator == "context":
        counted &= np.arange(KEYS) >= PREFIX
    mass = attention_mass(
        q,
        k,
        at,
        key_positions=places,
        rows=rows,
        counted=counted,
        others=log_mass(q, own, at, key_positions=at) if denominator == "all" else None,
        heads=heads,
        over_rows=over_rows,
    )
    expected = dense(case, denominator, heads, over_rows, rows)
    np.testing.assert_allclose(mass, expected, **CLOSE)
    assert mass.dtype == jnp.float32 and not np.asarray(mass)[..., ~counted].any()
    if denominator != "all" and heads == over_rows == "mean":
        np.testing.assert_allclose(np.asarray(mass, float).sum(), 1, rtol=1e-5)  # pitfall 24


def test_keys_later_than_the_rows_weigh_nothing(case):
    """Causality, and a row that sees nothing at all: zeros, not NaN (pitfalls 10, 32)."""
    q, k, _, places, _ = case
    at = np.array([-1, 0, 5, 100, 100, 100, 100], np.int32)
    rows = np.ones(ROWS, bool)
    mass = np.asarray(attention_mass(q, k, at, key_positions=places, rows=rows, heads="each", over_rows="max"))
    weights = softmax(scores(q, k), places[None, :] <= at[:, None])
    np.testing.assert_allclose(mass, weights.max(1), **CLOSE)
    assert not mass[:, 101:].any()
    alone = attention_mass(q, k, at, key_positions=places, rows=np.arange(ROWS) == 0)
    assert not np.asarray(alone).any()


def test_log_mass_of_no_keys_is_very_negative(case):
    q, k, own, places, at = case
    assert (
        np.asarray(log_mass(q, k, at, key_positions=places, counted=np.zeros(KEYS, bool))) == np.float32(-1e30)
    ).all()
    dense_lse = np.log(np.exp(np.where(at[None, :] <= at[:, None], scores(q, own), -np.inf)).sum(-1)).T
    np.testing.assert_allclose(log_mass(q, own, at, key_positions=at), dense_lse, rtol=1e-5, atol=1e-5)


def test_tiny_masses_do_not_underflow_together(case):
    """Pitfall 33: one dominant sink leaves the rest tiny but in order; scores far apart stay finite."""
    q, k, _, places, at = case
    k = k.copy()
    k[0] = 60 * np.repeat(q[:1, :1], 2, 1)[0]
    mass = np.asarray(attention_mass(q, k, at, key_positions=places, rows=np.arange(ROWS) == 0, heads="each")[0])
    expected = softmax(scores(q, k.astype(float)), places[None, :] <= at[:, None])[0, 0]
    assert np.isfinite(mass).all()
    np.testing.assert_allclose(mass[expected > 1e-30], expected[expected > 1e-30], rtol=1e-3)


def test_low_precision_inputs_are_summed_in_float32(case):
    q, k, _, places, at = case
    low = [jnp.asarray(a, jnp.bfloat16) for a in (q, k)]
    mass = attention_mass(*low, at, key_positions=places, rows=np.arange(ROWS) < 5)
    wide = [np.asarray(a.astype(jnp.float32), float) for a in low]
    expected = softmax(scores(*wide), np.broadcast_to(places < PAD_POSITION, (ROWS, KEYS)))[:, :5].mean((0, 1))
    np.testing.assert_allclose(mass, expected, rtol=1e-4, atol=1e-8)


def test_implementations_are_named(case):
    """No silent fallback: without a GPU "pallas" is refused, and None is the XLA definition."""
    q, k, _, places, at = case
    run = functools.partial(attention_mass, q, k, at, key_positions=places, rows=np.arange(ROWS) < 5)
    np.testing.assert_array_equal(run(implementation="xla"), run())
    with pytest.raises(ValueError, match="GPU"):
        run(implementation="pallas")
    with pytest.raises(ValueError, match="GPU"):
        pallas.log_mass(jnp.asarray(q), jnp.asarray(k), at, key_positions=places, implementation="pallas")


def test_nothing_of_size_heads_by_rows_by_keys():
    """Pitfall 57: masses are reduced block by block."""
    rows, keys, heads = 64, 32 * KEY_BLOCK, 8
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((rows, heads, 16), np.float32), rng.standard_normal((keys, 1, 16), np.float32)
    at, places = np.full(rows, keys, np.int32), np.arange(keys, dtype=np.int32)
    run = jax.jit(lambda q, k: attention_mass(q, k, at, key_positions=places, rows=np.ones(rows, bool)))
    assert run.lower(q, k).compile().memory_analysis().temp_size_in_bytes < 4 * heads * rows * keys / 4
