"""Placing chunks into a request's buffer: rotation by position, and rows outside untouched."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.models.rope import Rope, angles, default_rope
from jfuse.pallas.place import place
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
