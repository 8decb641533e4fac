"""The whole layer step of fusion as one program: norm, q/k/v, q/k-norm, RoPE, scatter, attention, output, MLP."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ahead_of_time import GPUS, available, compile_for
from jfuse.fuse import FusionState, fuse_layer
from jfuse.models.decoder import Rows, make_rows
from jfuse.models.params import shape_params
from jfuse.models.tiny import tiny_config, tiny_model
from jfuse.pallas.choice import INTERPRETED, pretended
from jfuse.types import PAD_POSITION, LayerKV
from jfuse.visible import Readable
from tests.reference import Reference, attention, restricted_mask

LENGTH, WINDOW = 61, 3
PLACES = np.array([2, 3, 5, 11, 17, 29, 30, 44, 58])  # nine rows under recomputation, then padding
STAY = np.array([0, 2, 3, 6, 8])  # of which these go on


def layer_inputs(dtype=jnp.bfloat16, seed=0):
    """A layer with q/k-norm, its rows in the middle of a fusion, and what they may read."""
    rng = np.random.default_rng(seed)
    model = tiny_model(jax.random.key(seed), "qwen3", dtype=dtype, num_layers=2)
    config = model.config
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    place = np.r_[PLACES, LENGTH + np.arange(3)].astype(np.int32)
    rows = make_rows(config, np.r_[PLACES, np.full(3, PAD_POSITION)].astype(np.int32))
    state = FusionState(draw(len(place), config.width), jnp.asarray(place), rows)
    pic = LayerKV(*(draw(LENGTH, config.num_kv_heads, config.head_size) for _ in range(2)))
    keys = Readable(jnp.asarray(rng.random(LENGTH) < 0.5), None)
    return model, (state, pic, jnp.arange(LENGTH), jnp.asarray(np.r_[STAY, 12, 12]), keys, jnp.int32(WINDOW))


def dense_step(model, state, pic, positions, stay, keys, window):
    """The same step in float64 NumPy, with an explicit mask."""
    reference, count = Reference(model.config, model.params), len(PLACES)
    wide = lambda a: np.asarray(a.astype(jnp.float32), float)  # noqa: E731
    x = wide(state.x)[:count]
    q, k, v = reference.project(0, x)
    new = [wide(pic.k), wide(pic.v)]
    new[0][PLACES], new[1][PLACES] = reference.rotate(k, PLACES), v
    mask = restricted_mask(positions, np.zeros(LENGTH), keys.listed, int(window))[PLACES]
    out = reference.finish(0, x, attention(reference.rotate(q, PLACES), *new, mask))
    return out[STAY], new


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_equals_a_dense_step(dtype, implementation):
    """Pitfall 56: one definition in every dtype. Rows written before they attend, padding dropped, some rows stop."""
    model, inputs = layer_inputs(dtype)
    with pretended(INTERPRETED if implementation == "pallas" else None):
        x, layer = fuse_layer(model.config, model.layers[0], *inputs, implementation=implementation)
    expected, (k, v) = dense_step(model, *inputs)
    bound = 1e-5 if dtype == jnp.float32 else 2e-2
    for ours, theirs in ((x[: len(STAY)], expected), (layer.k, k), (layer.v, v)):
        assert ours.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(ours.astype(jnp.float32)), theirs, rtol=0, atol=bound * np.abs(theirs).max()
        )
    untouched = np.delete(np.arange(LENGTH), PLACES)
    np.testing.assert_array_equal(np.asarray(layer.k)[untouched], np.asarray(inputs[1].k)[untouched])


def step(config, implementation=None):
    """The step as serving runs it: the cached layer is donated."""
    run = functools.partial(fuse_layer, config, implementation=implementation)
    return jax.jit(run, donate_argnums=2)


def test_it_is_one_program_that_accumulates_in_float32():
    """Every product of bfloat16 operands gives float32, and the donated layer is written in place."""
    model, inputs = layer_inputs()
    lowered = step(model.config, "xla").lower(model.layers[0], *inputs)
    products = re.findall(r"dot_general.*?\((.*?)\) -> tensor<([^>]*)>", lowered.as_text())
    assert len(products) >= 6 and all("bf16" in operands for operands, _ in products)
    assert all(result.endswith("xf32") for _, result in products)
    assert lowered.compile().memory_analysis().alias_size_in_bytes == 2 * inputs[1].k.size * 2


@pytest.mark.kernels
@pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("gpu", list(GPUS))
def test_it_compiles_for_gpus(gpu, restricted):
    """A layer of Qwen3-8B, a tenth of 20 x 512 tokens: our kernels without spills, temporaries of the rows alone."""
    config = tiny_config(
        "qwen3", width=4096, num_heads=32, num_kv_heads=8, head_size=128, mlp_width=12_288, num_layers=1
    )
    blocks = shape_params(config, jnp.bfloat16)["blocks"]
    block = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), blocks)
    rows, length, shape = 1024, 10_240, jax.ShapeDtypeStruct
    table = shape((rows, 64), jnp.float32)
    at = shape((rows,), jnp.int32)
    state = FusionState(shape((rows, 4096), jnp.bfloat16), at, Rows(at, table, table))
    pic = LayerKV(*[shape((length, 8, 128), jnp.bfloat16)] * 2)
    keys = Readable(shape((4096,), bool), shape((4096,), jnp.int32)) if restricted else None
    window = shape((), jnp.int32)
    positions = shape((length,), jnp.int32)
    done = compile_for(gpu, step(config, "pallas"), block, state, pic, positions, None, keys, window)
    assert done.kernel("scatter_rows").spill_bytes == 0
    # On Hopper this many rows take the Mosaic kernel.
    assert done.kernel("mosaic" if gpu == "sm_90a" else "selective_attention").spill_bytes == 0
    # Gate and up projections in float32 and bfloat16, and the gathered keys: nothing of size rows x keys x heads.
    assert done.temporary_bytes < 6 * 2 * 12_288 * rows + 4 * 4096 * 8 * 128 * 2
