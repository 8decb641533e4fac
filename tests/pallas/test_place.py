"""Placing chunks into a request's buffer: rotation by position, and rows outside untouched."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ahead_of_time import available, compile_for
from jfuse.models.rope import Rope, angles, default_rope
from jfuse.pallas.choice import INTERPRETED, pretended
from jfuse.pallas.place import place, place_half
from jfuse.pallas.rotate import rotate
from jfuse.types import LayerKV

pytestmark = pytest.mark.usefixtures("strict")
SIZE = 16
table = jax.jit(angles, static_argnums=0)


def turned(rope, x, positions):
    """Half-split rotation in float64, one pair at a time."""
    out = np.array(x, float)
    half = len(rope.inv_freq)
    for t, position in enumerate(positions):
        for f, frequency in enumerate(rope.inv_freq):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            a, b = np.array(x[t, :, f], float), np.array(x[t, :, f + half], float)
            out[t, :, f] = rope.attention_factor * (a * cos - b * sin)
            out[t, :, f + half] = rope.attention_factor * (b * cos + a * sin)
    return out


def llama3(rotary_size, factor=8.0, low=1.0, high=4.0, original=64):
    """Llama 3.1's scaling, written from its definition."""
    frequencies = []
    for frequency in default_rope(rotary_size, 10_000.0).inv_freq:
        wavelength = 2 * math.pi / frequency
        share = min(max((original / wavelength - low) / (high - low), 0), 1)
        frequencies.append((1 - share) * frequency / factor + share * frequency)
    return Rope("llama3", tuple(frequencies))


ROPES = {
    "default": default_rope(SIZE, 10_000.0),
    "llama3": llama3(SIZE),
    "yarn with magnitude": Rope("yarn", default_rope(SIZE, 10_000.0).inv_freq, 1.2),
    "partial": default_rope(12, 10_000.0),
}


def draw(rows, seed=0):
    rng = np.random.default_rng([rows, seed])
    return LayerKV(*(rng.standard_normal((rows, 2, SIZE), np.float32) for _ in range(2)))


def write(rope, buffer, chunk, start, length):
    at = np.arange(chunk.k.shape[0], dtype=np.int32) + start
    fresh = jax.tree.map(lambda a: jnp.array(a), buffer)
    return place(fresh, chunk, np.int32(start), np.int32(length), *table(rope, at))


@pytest.mark.parametrize("name", ROPES)
def test_keys_are_rotated_to_request_positions_and_values_are_not(name):
    """R-01, R-02, R-04, pitfall 17: 48 tokens placed at 200; the magnitude enters once; trailing dims keep bits."""
    rope, chunk, buffer = ROPES[name], draw(64), draw(260, 1)
    placed = write(rope, buffer, chunk, 200, 48)
    np.testing.assert_allclose(placed.k[200:248], turned(rope, chunk.k[:48], range(200, 248)), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(placed.v[200:248], chunk.v[:48])
    rotary = 2 * len(rope.inv_freq)
    np.testing.assert_array_equal(placed.k[200:248, :, rotary:], chunk.k[:48, :, rotary:])
    norm = np.linalg.norm(chunk.k[:48, :, :rotary], axis=-1) * rope.attention_factor
    np.testing.assert_allclose(np.linalg.norm(placed.k[200:248, :, :rotary], axis=-1), norm, rtol=1e-5)


def test_llama3_scaling_matters():
    """R-01, control: plain theta gives other keys."""
    chunk, buffer = draw(64), draw(260, 1)
    plain, scaled = (write(ROPES[name], buffer, chunk, 200, 48) for name in ("default", "llama3"))
    assert np.abs(np.asarray(plain.k - scaled.k)[200:248]).max() > 1e-2


@pytest.mark.parametrize(
    ("room", "start", "length"),
    [(64, 0, 64), (64, 5, 1), (64, 63, 1), (64, 30, 34), (100, 36, 64), (100, 70, 30), (100, 0, 0), (3, 1, 2)],
)
def test_rows_outside_keep_their_bits(room, start, length):
    """K-05: a padded chunk may reach past the end of the buffer, or be larger; only its own rows are written."""
    chunk, buffer = draw(64), draw(room, 1)
    placed = write(ROPES["default"], buffer, chunk, start, length)
    inside = np.zeros(room, bool)
    inside[start : start + length] = True
    for ours, theirs in zip(placed, buffer, strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[~inside], theirs[~inside])
    np.testing.assert_array_equal(np.asarray(placed.v)[inside], chunk.v[:length])
    expected = turned(ROPES["default"], chunk.k[:length], range(start, start + length))
    np.testing.assert_allclose(np.asarray(placed.k)[inside], expected, rtol=1e-5, atol=1e-5)


def test_padding_rows_of_a_chunk_are_never_written():
    """K-05: whatever stands behind the chunk's length, NaN included, stays out of the buffer."""
    chunk, buffer = draw(64), draw(100, 1)
    chunk.k[20:], chunk.v[20:] = np.nan, np.nan
    assert all(np.isfinite(a).all() for a in write(ROPES["default"], buffer, chunk, 80, 20))


def test_lengths_and_starts_share_one_compilation():
    """Pitfall 53: only the buckets of chunk and buffer are static."""
    before = place._cache_size()
    for start, length in ((0, 3), (17, 40), (99, 1)):
        write(ROPES["default"], draw(100, 1), draw(64), start, length)
    assert place._cache_size() <= before + 1


@pytest.mark.parametrize("name", ROPES)
def test_rotations_add_up(name):
    """Pitfall 15: R(a) R(b) = R(a + b), R(-a) R(a) = I."""
    rope, x = ROPES[name], draw(5).k
    unit = Rope(rope.kind, rope.inv_freq)
    turn = jax.jit(lambda x, by: rotate(x, *angles(unit, jnp.full(5, by, jnp.int32))))
    np.testing.assert_allclose(turn(turn(x, 70), 130), turn(x, 200), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(turn(turn(x, 70), -70), x, rtol=1e-5, atol=1e-5)


def test_low_precision_keys_are_rotated_in_float32():
    """Pitfall 16, R-05: phases and products are float32 whatever the cache's dtype, rounded once."""
    rope, x = ROPES["default"], jnp.asarray(draw(6).k, jnp.bfloat16)
    at = np.array([0, 1, 300, 4095, 32_767, 131_071], np.int32)
    actual = jax.jit(rotate)(x, *table(rope, at)).astype(jnp.float32)
    expected = turned(rope, np.asarray(x.astype(jnp.float32)), at.tolist())
    np.testing.assert_allclose(actual, expected, rtol=2**-8, atol=2e-2)
    cos, sin = table(rope, at)
    exact = np.outer(at.astype(float), rope.inv_freq)
    error = np.maximum(np.abs(cos - np.cos(exact)), np.abs(sin - np.sin(exact))).max(-1)
    assert error[3] < 1e-3 and error[5] < 6e-3


# Buffer length, chunk length, KV heads, head size, rotated half, start, length, dtypes of buffer and chunk.
QUICK = [
    (67, 17, 2, 80, 40, 5, 17, "float32", "float32"),
    (100, 64, 3, 96, 32, 70, 29, "bfloat16", "bfloat16"),  # partial rotary; the chunk reaches past the end
    (40, 64, 1, 72, 36, 7, 33, "bfloat16", "float32"),  # a chunk longer than the buffer
]
MORE = [
    (1, 1, 1, 64, 32, 0, 1, "float32", "float32"),
    (300, 128, 8, 128, 64, 172, 128, "bfloat16", "bfloat16"),
    (131, 127, 2, 256, 128, 3, 101, "float32", "float32"),
    (100, 64, 2, 64, 10, 100, 0, "float32", "float32"),  # nothing at all
]


def kernel_case(room, size, heads, head_size, half, start, length, kind, chunk_kind):
    rng = np.random.default_rng([room, size, head_size])
    values = lambda n, dtype: LayerKV(*(jnp.asarray(rng.standard_normal((n, heads, head_size)), dtype) for _ in "kv"))  # noqa: E731
    at = np.arange(size, dtype=np.int32) + start
    where = jnp.int32(start), jnp.int32(length)
    return values(room, kind), values(size, chunk_kind), *where, *table(default_rope(2 * half, 1e4), at)


def check_kernel(case):
    """Keys to one rounding of the buffer's dtype, values and everything outside bit for bit."""
    buffer, chunk, *where = kernel_case(*case)
    expected = place(jax.tree.map(jnp.copy, buffer), chunk, *where)
    with pretended(INTERPRETED):
        keys = place_half(jnp.copy(buffer.k), chunk.k, *where[:2], tuple(where[2:]), implementation="pallas")
        values = place_half(jnp.copy(buffer.v), chunk.v, *where[:2], None, implementation="pallas")
        placed = place(buffer, chunk, *where, implementation="pallas")
    inside = slice(case[5], case[5] + case[6])
    for ours in (placed, LayerKV(keys, values)):
        np.testing.assert_array_equal(ours.v, expected.v)
        k, reference = (np.asarray(a.astype(jnp.float32)) for a in (ours.k, expected.k))
        bound = 1e-5 if case[7] == "float32" else 2e-2
        np.testing.assert_allclose(k[inside], reference[inside], rtol=0, atol=bound * 4)
        outside = np.delete(np.arange(case[0]), np.r_[inside])
        np.testing.assert_array_equal(k[outside], reference[outside])


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_kernel_equals_the_definition(case):
    """K-01, K-02, K-05."""
    check_kernel(case)


@pytest.mark.kernels
@pytest.mark.parametrize("case", MORE, ids=str)
def test_the_kernel_equals_the_definition_everywhere(case):
    """K-01, K-02, K-05."""
    check_kernel(case)


def test_without_a_gpu_pallas_is_refused():
    """No silent fallback."""
    with pytest.raises(ValueError, match="GPU"):
        place(*kernel_case(*QUICK[0]), implementation="pallas")


@pytest.mark.kernels
@pytest.mark.skipif(not available(), reason="`make kernels` brings the compilers")
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("gpu", ["sm_90a", "sm_80"])
def test_it_compiles_in_place(gpu, size):
    """A donated buffer is neither copied nor held twice; no spills."""
    shape = jax.ShapeDtypeStruct
    buffer, chunk = (LayerKV(*[shape((n, 8, size), jnp.bfloat16)] * 2) for n in (10_240, 512))
    tables = [shape((512, size // 2), jnp.float32)] * 2
    done = compile_for(gpu, place, buffer, chunk, *[shape((), jnp.int32)] * 2, *tables)
    assert done.temporary_bytes == 0 and [kernel.name for kernel in done.kernels] == ["place"]
    assert done.kernels[0].spill_bytes == 0
