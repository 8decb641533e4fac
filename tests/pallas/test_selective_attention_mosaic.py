"""The Mosaic kernel of selective attention: compiled for Hopper, and interpreted where jax can (0.11 and later)."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks.ahead_of_time import GPUS, available, compile_for
from jfuse.pallas.selective_attention_mosaic import SIZES, selective_attention_mosaic
from tests.pallas.attention_cases import Case, assert_equal_to_dense, draw

# Packed rows go by blocks of 128, keys by blocks of 128: fewer, exactly one, and more; no step at all for some rows.
CASES = [
    Case(1, 1, dtype="bfloat16"),
    Case(13, 97, 8, 1, 64, "bfloat16"),
    Case(70, 301, dtype="bfloat16", visible=0.3, window=7, padding=9),
    Case(64, 128, 2, 1, 128, "bfloat16"),
    Case(130, 700, 2, 2, 96, "bfloat16", visible=0.6, window=40),
    Case(40, 400, 14, 2, 64, "bfloat16", padding=30, order="shuffled"),
    Case(131, 389, 3, 1, 64, "bfloat16", order="gaps"),
    Case(64, 64, 2, 1, 64, "bfloat16", padding=63),
    Case(70, 640, 2, 1, 64, "bfloat16", visible=0.0, window=0),
]


# Each warpgroup is a thread that blocks at barriers: with fewer threads than that, XLA's pool waits for ever.
THREADS = int(os.environ.get("NPROC") or os.cpu_count() or 1)


@pytest.mark.kernels
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the interpreter of Mosaic GPU kernels came with jax 0.11")
@pytest.mark.skipif(THREADS < 8, reason="needs NPROC=8, which `make kernels` sets")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_attention(case):
    """Barriers, copies and warpgroups are modelled; a barrier phase that nobody waits for is an error."""
    drawn = draw(case)
    run = jax.jit(functools.partial(selective_attention_mosaic, interpret=True))
    assert_equal_to_dense(*run(*drawn), drawn)


@pytest.mark.kernels
@pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")
@pytest.mark.parametrize("size", SIZES)
def test_it_compiles_for_hopper_without_spills(size):
    """wgmma for both products of both loops, TMA for the copies, and what 384 threads may take of a core.

    With a visible set; without one the kernel is the same, and jax compiles equal kernels once a process.
    """
    shape, gpu = jax.ShapeDtypeStruct, GPUS["sm_90a"]
    q, kv = shape((256, 32, size), jnp.bfloat16), shape((1000, 8, size), jnp.bfloat16)
    positions = shape((256,), jnp.int32), shape((1000,), jnp.int32), shape((1000,), bool)
    run = compile_for("sm_90a", selective_attention_mosaic, q, kv, kv, *positions, shape((), jnp.int32))
    kernel = run.kernel("mosaic")
    assert kernel.spill_bytes == 0 and kernel.threads == 384 and kernel.registers * 384 <= gpu.registers
    assert kernel.tensor_core.get("wgmma", 0) >= 4 and kernel.copies.get("tma", 0) >= 4
    assert kernel.shared_memory <= gpu.block_shared_memory and kernel.occupancy(gpu) == 1
