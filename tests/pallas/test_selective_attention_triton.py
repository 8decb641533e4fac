"""The Triton kernel of selective attention: interpreted, against dense float64 attention, and compiled for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ahead_of_time import GPUS, available, compile_for
from jfuse.pallas.selective_attention_triton import selective_attention_triton
from tests.pallas.attention_cases import FULL, GRIDS, QUICK, Case, assert_equal_to_dense, draw

# An interpreted kernel takes seconds to compile and milliseconds to run: compiled plainly, it takes half.
PLAIN = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
interpreted = jax.jit(functools.partial(selective_attention_triton, interpret=True), compiler_options=PLAIN)


def check(case):
    drawn = draw(case)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_equal_to_dense(*interpreted(*drawn), drawn)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equals_dense_attention(case):
    check(case)


@pytest.mark.kernels
@pytest.mark.parametrize("case", FULL, ids=str)
def test_equals_dense_attention_everywhere(case):
    """K-01, K-02, K-03, K-04, K-13, pitfalls 9, 10, 32, 56."""
    check(case)


@pytest.mark.kernels
def test_one_process_runs_four_grids():
    """K-13: each call has its own grid, also once all are compiled. (The cases above may go to several processes.)"""
    for case in (*GRIDS, *reversed(GRIDS)):
        check(case)


def test_there_are_enough_shapes():
    assert len(set(QUICK + FULL)) >= 60


def test_a_batch_by_vmap():
    """The kernel is batched by a further axis of its grid."""
    drawn = [draw(Case(9, 40, size=16, dtype="float32"))] * 2
    drawn[1] = drawn[1]._replace(q=drawn[1].q * 2, window=jnp.int32(0))
    batch = jax.tree.map(lambda *a: jnp.stack(a), *drawn)
    run = jax.vmap(functools.partial(selective_attention_triton, interpret=True))
    out, lse = jax.jit(run, compiler_options=PLAIN)(*batch)
    for i, one in enumerate(drawn):
        assert_equal_to_dense(out[i], lse[i], one)


def test_lengths_of_the_visible_set_share_one_compilation(compilations):
    """Pitfall 53: rows, visible set and window are data; the trip counts are known at run time."""
    drawn = draw(Case(13, 97, size=16, visible=0.3, window=3))
    run = jax.jit(functools.partial(selective_attention_triton, interpret=True), compiler_options=PLAIN)
    run(*drawn)
    before = compilations.count
    for share, window in ((0.0, 0), (1.0, 0), (0.5, 90)):
        visible = jnp.asarray(np.arange(97) < 97 * share)
        other = drawn._replace(visible=visible, window=jnp.int32(window), row_positions=drawn.row_positions[::-1])
        run(*other)
    assert run._cache_size() == 1 and compilations.count - before <= 8  # what the arguments themselves compile


def shapes(rows, keys, size, dtype, restricted=True):
    shape = jax.ShapeDtypeStruct
    q, kv = shape((rows, 32, size), dtype), shape((keys, 8, size), dtype)
    return (
        q,
        kv,
        kv,
        shape((rows,), jnp.int32),
        shape((keys,), jnp.int32),
        *((shape((keys,), jnp.bool_) if restricted else None), shape((), jnp.int32)),
    )


@pytest.mark.kernels
@pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("gpu", "instruction"), [("sm_90a", "wgmma"), ("sm_80", "mma")])
def test_it_compiles_without_spills(gpu, instruction, size):
    """Products run on the tensor cores, keys are copied while products run, and a core holds eight warps or more."""
    kernel = compile_for(gpu, selective_attention_triton, *shapes(256, 1024, size, jnp.bfloat16)).kernel("selective")
    assert kernel.spill_bytes == 0
    assert kernel.tensor_core.get(instruction, 0) > 0 and kernel.copies.get("cp_async", 0) > 0
    assert kernel.shared_memory <= GPUS[gpu].block_shared_memory
    assert kernel.occupancy(GPUS[gpu]) * kernel.threads >= 8 * 32


@pytest.mark.kernels
@pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")
@pytest.mark.parametrize("gpu", list(GPUS))
@pytest.mark.parametrize(
    ("rows", "size", "dtype"),
    [(1, 128, "bfloat16"), (16, 128, "bfloat16"), (64, 64, "float32"), (64, 128, "float32")],
)
def test_decoding_and_float32_compile_without_spills(gpu, rows, size, dtype):
    """K-04: one row, or a few (their keys split over the card), and float32 in three products of tf32."""
    run = jax.jit(selective_attention_triton)
    kernel = compile_for(gpu, run, *shapes(rows, 4096, size, jnp.dtype(dtype), restricted=False)).kernel("selective")
    assert kernel.spill_bytes == 0 and kernel.tensor_core
