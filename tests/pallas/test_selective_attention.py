"""Attention of gathered rows over a cache against dense NumPy attention with an explicit mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import pallas
from jfuse.pallas.choice import INTERPRETED, pretended
from jfuse.pallas.selective_attention import KEY_BLOCK, ROW_BLOCK
from jfuse.types import PAD_POSITION, LayerKV
from tests.reference import attention, restricted_mask, scores

pytestmark = pytest.mark.usefixtures("strict")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
selective_attention = jax.jit(pallas.selective_attention, static_argnames="implementation")
partial_attention = jax.jit(pallas.partial_attention)
attend, merge = jax.jit(pallas.attend), jax.jit(pallas.merge)


def draw(rows, keys, heads=4, kv_heads=2, size=16, seed=0):
    rng = np.random.default_rng([rows, keys, heads, seed])
    shapes = (rows, heads, size), (keys, kv_heads, size), (keys, kv_heads, size)
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


# K-01, K-04: lengths that are not multiples of any block, one row, one key, blocks met exactly.
LENGTHS = [(1, 1), (1, 8), (ROW_BLOCK, KEY_BLOCK), (ROW_BLOCK + 1, KEY_BLOCK + 1), (129, 2 * KEY_BLOCK + 61)]


@pytest.mark.parametrize(("rows", "keys"), LENGTHS)
def test_any_length(rows, keys):
    """K-01, K-04: every row reads the keys at or before it, itself included."""
    q, k, v = draw(rows, keys)
    at = np.sort(np.random.default_rng(0).integers(0, keys, rows)).astype(np.int32)
    expected = attention(q, k, v, np.arange(keys)[None, :] <= at[:, None])
    first = selective_attention(q, k, v, at)
    np.testing.assert_allclose(first, expected, **CLOSE)
    np.testing.assert_array_equal(first, selective_attention(q, k, v, at))


@pytest.mark.parametrize("size", [12, 80])
def test_any_head_size(size):
    """K-02: head sizes that are not powers of two."""
    q, k, v = draw(9, 40, size=size)
    at = np.arange(31, 40, dtype=np.int32)
    np.testing.assert_allclose(
        selective_attention(q, k, v, at), attention(q, k, v, np.arange(40)[None] <= at[:, None]), **CLOSE
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (8, 1), (28, 4), (40, 10)])
def test_query_heads_share_kv_heads_in_runs(heads, kv_heads):
    """K-03, pitfall 23: head h reads KV head h // (N / K). One-hot values name the KV head that was read."""
    q, k, _ = draw(3, 10, heads, kv_heads)
    v = np.broadcast_to(np.eye(kv_heads, 16, dtype=np.float32), (10, kv_heads, 16))
    out = np.asarray(selective_attention(q, k, v, np.array([7, 8, 9], np.int32)))
    np.testing.assert_array_equal(out.argmax(-1), np.tile(np.repeat(np.arange(kv_heads), heads // kv_heads), (3, 1)))


def test_heads_that_do_not_share_evenly_are_refused():
    """K-03: 10 query heads over 3 KV heads."""
    q, k, v = draw(3, 10, 10, 3)
    with pytest.raises(ValueError, match="10.*3"):
        selective_attention(q, k, v, np.arange(3, dtype=np.int32))


@pytest.mark.parametrize("window", [0, 1, 7, 600])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_restricted_context(window, share):
    """A row sees visible keys, the window before it, and itself, whatever blocks are skipped (pitfall 10)."""
    keys = 2 * KEY_BLOCK + 61
    q, k, v = draw(70, keys)
    rng = np.random.default_rng(1)
    at = np.sort(rng.choice(keys, 70, replace=False)).astype(np.int32)
    visible = rng.random(keys) < share
    mask = restricted_mask(np.arange(keys), np.zeros(keys), visible, window)[at]
    actual = selective_attention(q, k, v, at, visible=visible, window=window)
    np.testing.assert_allclose(actual, attention(q, k, v, mask), **CLOSE)


def test_a_visible_block_far_from_the_rows_is_not_skipped():
    """One visible key in the first block, rows in the last: exactly two keys are read."""
    keys = 2 * KEY_BLOCK + 61
    q, k, v = draw(70, keys)
    visible = np.zeros(keys, bool)
    visible[3] = True
    at = np.full(70, keys - 1, np.int32)
    mask = np.isin(np.arange(keys), [3, keys - 1])[None].repeat(70, 0)
    actual = selective_attention(q, k, v, at, visible=visible, window=0)
    np.testing.assert_allclose(actual, attention(q, k, v, mask), **CLOSE)


def test_row_order_does_not_matter():
    """Pitfall 9: the mask is built from positions, so permuted rows give permuted outputs."""
    keys = 2 * KEY_BLOCK + 61
    q, k, v = draw(129, keys)
    at = np.arange(keys - 129, keys, dtype=np.int32)
    order = np.random.default_rng(0).permutation(129)
    np.testing.assert_allclose(
        selective_attention(q[order], k, v, at[order]), np.asarray(selective_attention(q, k, v, at))[order], **CLOSE
    )


def test_key_order_does_not_matter():
    """Keys carry positions of their own: anchors, tails and gaps may lie in any order."""
    q, k, v = draw(6, 50)
    at, places = np.array([3, 9, 40, 90, 91, 300], np.int32), np.arange(0, 100, 2, dtype=np.int32)
    expected = attention(q, k, v, places[None, :] <= at[:, None])
    order = np.random.default_rng(0).permutation(50)
    actual = selective_attention(q, k[order], v[order], at, key_positions=places[order])
    np.testing.assert_allclose(actual, expected, **CLOSE)


def test_padding_is_never_read_and_gives_zeros():
    """S-05, K-05, pitfall 32: NaN keys at PAD_POSITION reach nobody; padding rows and empty rows are zero, not NaN."""
    q, k, v = draw(8, 30)
    at = np.array([0, 4, 9, 20, 24, -1, PAD_POSITION, PAD_POSITION], np.int32)
    places = np.r_[np.arange(25), np.full(5, PAD_POSITION)].astype(np.int32)
    expected = attention(q, k[:25], v[:25], np.arange(25)[None] <= np.minimum(at, 24)[:, None])
    k[25:], v[25:] = 1e30, 1e30
    out, lse = partial_attention(q, k, v, at, key_positions=places)
    np.testing.assert_allclose(out[:5], expected[:5], **CLOSE)
    assert not np.asarray(out[5:]).any() and (np.asarray(lse[5:]) == -1e30).all()


def test_large_scores_do_not_overflow():
    """Pitfall 33: the softmax subtracts its maximum block by block."""
    q, k, v = draw(4, KEY_BLOCK + 9)
    at = np.full(4, KEY_BLOCK + 8, np.int32)
    k[:KEY_BLOCK] *= 300
    mask = np.ones((4, KEY_BLOCK + 9), bool)
    np.testing.assert_allclose(
        selective_attention(q, k, v, at), attention(q, k.astype(float), v, mask), rtol=1e-3, atol=1e-4
    )


def test_parts_merge_to_the_whole():
    """Partial results over disjoint caches, one of them empty for some rows, equal attention over their union."""
    q, k, v = draw(5, 70)
    at, places = np.array([2, 10, 33, 69, 69], np.int32), np.arange(70, dtype=np.int32)
    cuts = [slice(0, 30), slice(30, 31), slice(31, 70)]
    expected = attention(q, k, v, places[None] <= at[:, None])
    parts = [(LayerKV(k[cut], v[cut]), places[cut]) for cut in cuts]
    np.testing.assert_allclose(attend(q, at, parts), expected, **CLOSE)
    results = [partial_attention(q, kv.k, kv.v, at, key_positions=where) for kv, where in parts]
    np.testing.assert_allclose(merge(results[::-1]), expected, **CLOSE)
    seen = np.where(places[None] <= at[:, None], scores(q, k), -np.inf)
    lse = np.log(np.exp(seen).sum(-1)).T
    np.testing.assert_allclose(partial_attention(q, k, v, at, key_positions=places)[1], lse, rtol=1e-5, atol=1e-5)


def test_low_precision_keeps_a_float32_softmax():
    """Pitfall 33: bfloat16 inputs stay within one rounding of the float64 result."""
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in draw(16, 700))
    at = np.full(16, 699, np.int32)
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (q, k, v)]
    out = selective_attention(q, k, v, at)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32), attention(*wide, np.ones((16, 700), bool)), rtol=2e-2, atol=2e-3
    )


def test_the_xla_definition_runs_on_a_cpu_and_pallas_is_refused():
    """No silent fallback: the same call runs on a CPU and on a GPU, a kernel that was asked for by name does not."""
    q, k, v = draw(5, 17)
    at = np.arange(12, 17, dtype=np.int32)
    run = functools.partial(selective_attention, q, k, v, at)
    np.testing.assert_array_equal(run(implementation="xla"), run())
    with pytest.raises(ValueError, match='selective_attention needs a CUDA GPU, .*"xla"'):
        run(implementation="pallas")


@pytest.mark.parametrize("restricted", [False, True])
def test_pallas_runs_the_kernel_where_it_may(restricted):
    """The op by name, pretending a device that interprets: the kernel's numbers are the definition's."""
    q, k, v = draw(5, 17)
    at, visible = np.arange(12, 17, dtype=np.int32), np.arange(17) % 3 == 0 if restricted else None
    run = functools.partial(partial_attention, q, k, v, at, visible=visible, window=2)
    definition = run()
    with pretended(INTERPRETED):
        assert "pallas_call" in str(jax.make_jaxpr(partial_attention)(q, jnp.asarray(k), jnp.asarray(v), at))
        kernel = run()
    for ours, theirs in zip(kernel, definition, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


def test_nothing_of_size_rows_by_keys():
    """Pitfall 57: the largest intermediate is a block of scores, not rows x keys."""
    rows, keys, heads = 8 * ROW_BLOCK, 8 * KEY_BLOCK, 4
    q, k, v = draw(rows, keys, heads)
    compiled = selective_attention.lower(q, k, v, np.arange(rows, dtype=np.int32)).compile()
    inputs = 4 * (q.size + k.size + v.size)
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * inputs
    assert 3 * inputs < 4 * heads * rows * keys / 2  # what the assertion above would let through
