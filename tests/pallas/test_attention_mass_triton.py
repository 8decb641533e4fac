"""The Triton kernels of attention mass: interpreted, against a dense float64 softmax, and compiled for GPUs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ahead_of_time import GPUS, available, compile_for
from jfuse import pallas
from jfuse.pallas.choice import INTERPRETED, pretended
from jfuse.types import PAD_POSITION
from tests.reference import scores, softmax

pytestmark = pytest.mark.usefixtures("strict")
attention_mass = jax.jit(pallas.attention_mass, static_argnames=("heads", "over_rows", "implementation"))
log_mass = jax.jit(pallas.log_mass, static_argnames="implementation")
REDUCTIONS = tuple(itertools.product(("mean", "max", "each"), ("mean", "max")))

# Rows, keys, heads, KV heads, head size, dtype, heads and rows reduced how.
QUICK = [
    (7, 101, 6, 2, 80, "float32", "mean", "mean"),
    (65, 131, 4, 1, 64, "bfloat16", "max", "mean"),
]
MORE = [
    (1, 1, 4, 4, 64, "float32", "each", "max"),
    *((17, 131, 4, 2, 64, "float32", *how) for how in REDUCTIONS),
    *((17, 131, 4, 2, size, dtype, "mean", "max") for size in (72, 96, 128, 256) for dtype in ("float32", "bfloat16")),
    *((5, 67, *shared, 32, "float32", "max", "mean") for shared in ((12, 12), (8, 1), (28, 4), (40, 10))),
    *((rows, keys, 2, 1, 64, "bfloat16", "mean", "mean") for rows, keys in ((1, 4092), (64, 64), (127, 257), (200, 1))),
]


def draw(rows, keys, heads, kv_heads, size, kind, *_):
    """A row before every key, padding rows and keys, keys that do not count, rows that do not score."""
    rng = np.random.default_rng([rows, keys, size])
    q, k, own = (
        jnp.asarray(rng.standard_normal(shape), kind)
        for shape in ((rows, heads, size), (keys, kv_heads, size), (rows, kv_heads, size))
    )
    places, at = np.arange(keys, dtype=np.int32), np.sort(rng.integers(0, keys, rows)).astype(np.int32)
    counted, scoring = rng.random(keys) < 0.8, rng.random(rows) < 0.7
    counted[0] = scoring[-1] = True
    if rows > 5:
        at[0], at[-2:] = -1, PAD_POSITION
        places[-3:] = PAD_POSITION
        scoring[-2:], counted[-3:] = False, False
    return q, k, own, at, places, counted, scoring


def check(case):
    """Context alone, and with the rows' own keys in the denominator: 1e-5 or 2e-2 of the largest mass."""
    *_, heads, over_rows = case
    q, k, own, at, places, counted, scoring = draw(*case)
    keep = counted & (places[None] <= at[:, None])
    every = [scores(*(np.asarray(a.astype(jnp.float32), float) for a in (q, keys))) for keys in (k, own)]
    with pretended(INTERPRETED):
        others = log_mass(q, own, at, key_positions=at, implementation="pallas")
    for mask, parts, other in (
        (keep, every[:1], None),
        (np.concatenate([keep, at[None] <= at[:, None]], -1), every, others),
    ):
        weights = softmax(np.concatenate(parts, -1), mask)[:, scoring, : len(places)]
        weights = {"mean": weights.mean(0), "max": weights.max(0), "each": weights}[heads]
        expected = weights.mean(-2) if over_rows == "mean" else weights.max(-2)
        with pretended(INTERPRETED):
            mass = attention_mass(
                q,
                k,
                at,
                key_positions=places,
                rows=scoring,
                counted=counted,
                others=other,
                heads=heads,
                over_rows=over_rows,
                implementation="pallas",
            )
        bound = 1e-5 if case[5] == "float32" else 2e-2
        np.testing.assert_allclose(mass, expected, rtol=0, atol=bound * max(expected.max(), 1e-30))
        assert mass.dtype == jnp.float32 and not np.asarray(mass)[..., ~counted].any()


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equals_a_dense_softmax(case):
    """K-01, K-02, pitfalls 23 to 26, 32."""
    check(case)


@pytest.mark.kernels
@pytest.mark.parametrize("case", MORE, ids=str)
def test_equals_a_dense_softmax_everywhere(case):
    """K-01, K-02, K-03, K-13, pitfalls 23 to 26, 32."""
    check(case)


def test_gradient_is_that_of_the_definition():
    """Learned weights and soft paths may differentiate through masses on a GPU too."""
    q, k, _, at, places, counted, scoring = draw(*QUICK[0])

    def loss(q, k):
        mass = pallas.attention_mass(q, k, at, key_positions=places, rows=scoring, counted=counted)
        return jnp.sum(mass * jnp.arange(mass.shape[0], dtype=jnp.float32))

    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k)
    with pretended(INTERPRETED):
        actual = jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
        assert np.asarray(theirs).any()


def run_for(gpu, rows, size, dtype, **how):
    shape = jax.ShapeDtypeStruct
    q, k = shape((rows, 32, size), dtype), shape((10_240, 8, size), dtype)

    def run(q, k, at, places, counted, scoring, others):
        mass = functools.partial(pallas.attention_mass, implementation="pallas", **how)
        return mass(q, k, at, key_positions=places, rows=scoring, counted=counted, others=others)

    at, places = shape((rows,), jnp.int32), shape((10_240,), jnp.int32)
    counted, scoring, others = shape((10_240,), bool), shape((rows,), bool), shape((rows, 32), jnp.float32)
    return compile_for(gpu, run, q, k, at, places, counted, scoring, others)


@pytest.mark.kernels
@pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")
@pytest.mark.parametrize(
    ("size", "dtype", "how"),
    [
        *((size, "bfloat16", {}) for size in (64, 80, 96, 128, 256)),
        (128, "bfloat16", {"heads": "each", "over_rows": "max"}),
        (64, "float32", {}),
        (128, "float32", {}),
    ],
)
@pytest.mark.parametrize(("gpu", "instruction"), [("sm_90a", "wgmma"), ("sm_80", "mma")])
def test_it_compiles_without_spills(gpu, instruction, size, dtype, how):
    """Pitfall 57: beside that, nothing of size heads x rows x keys, which are 42 MB in bfloat16."""
    done = run_for(gpu, 64, size, jnp.dtype(dtype), **how)
    assert done.temporary_bytes < 4 << 20
    for name in ("log_mass", "attention_mass"):
        kernel = done.kernel(name)
        assert kernel.spill_bytes == 0 and kernel.shared_memory <= GPUS[gpu].block_shared_memory
        assert kernel.tensor_core.get(instruction if dtype == "bfloat16" else "mma", 0) > 0
