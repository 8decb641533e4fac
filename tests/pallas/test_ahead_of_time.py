"""The check of compiled kernels itself: it must see spills, tensor cores, and shared memory that does not fit."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton

from benchmarks.ahead_of_time import GPUS, Gpu, Kernel, available, compile_for


def needs_compilers(test):
    return pytest.mark.kernels(pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")(test))


def product(size, out, warps=4):
    """A product kernel whose accumulator of size x size float32 lives in the registers of `warps` warps."""

    def kernel(a, b, c):
        c[...] = triton.dot(a[...], b[...]).astype(c.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((size, size), out),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        name="product",
    )


def operands(size, depth, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((size, depth), dtype), jax.ShapeDtypeStruct((depth, size), dtype)


@needs_compilers
@pytest.mark.parametrize(("gpu", "instruction"), [("sm_90a", "wgmma"), ("sm_80", "mma")])
def test_a_kernel_that_fits_is_told_from_one_that_spills(gpu, instruction):
    """128 x 128 sums in 128 threads take 128 registers each; 256 x 256 take 512, which no thread has."""
    good = compile_for(gpu, product(128, jnp.bfloat16), *operands(128, 64)).kernel("product")
    assert good.spill_bytes == 0 and 128 <= good.registers <= 255 and good.threads == 128
    assert good.tensor_core.get(instruction, 0) > 0
    assert 2 * 128 * 64 * 2 <= good.shared_memory < GPUS[gpu].block_shared_memory
    bad = compile_for(gpu, product(256, jnp.bfloat16), *operands(256, 64)).kernel("product")
    assert bad.spill_bytes > 0 and bad.stack_bytes > 0


@needs_compilers
def test_too_much_shared_memory_is_an_error():
    """Two operands of 256 x 512 float32 are 1 MiB; a block of the card has 227 KiB."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Ss]hared memory"):
        compile_for("sm_90a", product(256, jnp.bfloat16, 16), *operands(256, 512))


@needs_compilers
def test_a_mosaic_kernel_is_seen_with_its_shared_memory():
    """Its bytes stand in no launch of XLA's; they are found all the same."""

    def kernel(source, target, buffer, barrier):
        mosaic_gpu.copy_gmem_to_smem(source, buffer, barrier)
        mosaic_gpu.barrier_wait(barrier)
        mosaic_gpu.copy_smem_to_gmem(buffer, target)
        mosaic_gpu.wait_smem_to_gmem(0)

    copy = mosaic_gpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128, 64), jnp.float32),
        scratch_types=[mosaic_gpu.SMEM((128, 64), jnp.float32), mosaic_gpu.Barrier()],
    )
    (found,) = compile_for("sm_90a", copy, jax.ShapeDtypeStruct((128, 64), jnp.float32)).kernels
    assert found.shared_memory >= 128 * 64 * 4 and found.copies["tma"] >= 1


@needs_compilers
def test_what_xla_makes_itself_is_listed_too():
    """A whole step has kernels of XLA's beside ours, and temporaries."""
    step = lambda a, b: jnp.tanh(product(64, jnp.float32)(a, b)).sum(0)  # noqa: E731
    executable = compile_for("sm_90a", step, *operands(64, 64))
    assert len(executable.kernels) >= 2 and executable.temporary_bytes >= 4 * 64 * 64
    assert executable.kernel("product").spill_bytes == 0
    with pytest.raises(KeyError, match="nothing"):
        executable.kernel("nothing")


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [(128, 255, 1024, 2), (128, 168, 1024, 3), (128, 32, 1024, 16), (128, 32, 100_000, 2), (384, 168, 168_016, 1)],
)
def test_occupancy_is_that_of_the_data_sheet(threads, registers, shared, blocks):
    """By registers (65,536 a core), by threads (2,048), by shared memory (228 KiB less 1 KiB a block)."""
    kernel = functools.partial(Kernel, "k", spill_bytes=0, stack_bytes=0, tensor_core={}, copies={})
    gpu: Gpu = GPUS["sm_90a"]
    assert kernel(registers=registers, threads=threads, shared_memory=shared).occupancy(gpu) == blocks
