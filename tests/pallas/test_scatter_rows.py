"""Recomputed rows written into a layer: by plain assignment, interpreted, and compiled for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ahead_of_time import available, compile_for
from jfuse import pallas
from jfuse.pallas.choice import INTERPRETED, pretended
from jfuse.types import LayerKV

pytestmark = pytest.mark.usefixtures("strict")
scatter_rows = jax.jit(pallas.scatter_rows, static_argnames="implementation", donate_argnames="layer")

# Layer length, rows, of which padding, KV heads, head size, dtypes of layer and rows.
QUICK = [
    (17, 5, 2, 2, 80, "float32", "float32"),
    (101, 33, 1, 3, 96, "bfloat16", "float32"),
    (7, 12, 5, 1, 72, "bfloat16", "bfloat16"),
]
MORE = [
    (1, 1, 0, 1, 64, "float32", "float32"),
    (64, 64, 0, 8, 128, "bfloat16", "bfloat16"),
    (300, 129, 129, 2, 64, "float32", "float32"),  # padding alone
    (131, 17, 3, 10, 256, "float32", "bfloat16"),  # two blocks of columns and a half
    (59, 4, 0, 1, 1, "float32", "float32"),
]


def draw(length, rows, padding, heads, size, kind, new_kind):
    rng = np.random.default_rng([length, rows, heads, size])
    values = lambda n, dtype: LayerKV(*(jnp.asarray(rng.standard_normal((n, heads, size)), dtype) for _ in range(2)))  # noqa: E731
    place = np.sort(rng.choice(length, rows - padding, replace=False))
    place = np.r_[place, length + np.arange(padding)].astype(np.int32)
    return values(length, kind), jnp.asarray(place), values(rows, new_kind)


def check(case, run):
    layer, place, rows = draw(*case)
    real = np.asarray(place) < case[0]
    expected = [np.array(half) for half in layer]
    for old, new in zip(expected, rows, strict=True):
        old[np.asarray(place)[real]] = np.asarray(new.astype(old.dtype))[real]
    for ours, theirs in zip(run(layer, place, rows), expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), theirs)


@pytest.mark.parametrize("case", QUICK + MORE, ids=str)
def test_equals_plain_assignment(case):
    """K-05, pitfall 17: padding is dropped and never lands on the last row; the rest keeps its bits."""
    check(case, scatter_rows)


def interpreted(layer, place, rows):
    with pretended(INTERPRETED):
        return scatter_rows(layer, place, rows, implementation="pallas")


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_kernel_equals_plain_assignment(case):
    check(case, interpreted)


@pytest.mark.kernels
@pytest.mark.parametrize("case", MORE, ids=str)
def test_the_kernel_equals_plain_assignment_everywhere(case):
    """K-01, K-02, K-05: prime lengths, one row, padding alone, head sizes that are no powers of two."""
    check(case, interpreted)


def test_kernel_and_definition_have_one_gradient():
    """Rows take their part of the cotangent, what they overwrote takes none."""
    layer, place, rows = draw(17, 5, 2, 2, 80, "float32", "float32")

    def loss(layer, rows):
        return sum(jnp.sum(half**2) for half in pallas.scatter_rows(layer, place, rows))

    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(layer, rows)
    with pretended(INTERPRETED):
        actual = jax.jit(jax.grad(loss, argnums=(0, 1)))(layer, rows)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert not np.asarray(actual[1].k[3:]).any() and np.asarray(actual[1].k[:3]).any()
    assert not np.asarray(actual[0].v)[np.asarray(place[:3])].any()


@pytest.mark.kernels
@pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("gpu", ["sm_90a", "sm_80"])
def test_it_compiles_in_place(gpu, size):
    """A donated layer is neither copied nor held twice; no spills."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    layer, rows = (LayerKV(*[shape((n, 8, size))] * 2) for n in (10_240, 3072))
    run = functools.partial(pallas.scatter_rows, implementation="pallas")
    done = compile_for(gpu, jax.jit(run, donate_argnums=0), layer, jax.ShapeDtypeStruct((3072,), jnp.int32), rows)
    assert done.temporary_bytes <= 16  # the two pointers of the result
    assert [kernel.name for kernel in done.kernels] == ["scatter_rows"]
    assert done.kernels[0].spill_bytes == 0
