"""Layouts, placement of whole chunks, and the compact anchor cache, at the positions of the request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.anchors import chunk_anchors
from jfuse.pipeline import encode_prefix
from jfuse.stitch import make_layout, stitch, stitch_anchors
from jfuse.types import PAD_POSITION, PADDING_SEGMENT, PREFIX_SEGMENT, Chunk
from tests import tiny
from tests.tiny import LENGTHS, build_chunk, build_model, build_request

pytestmark = pytest.mark.usefixtures("strict")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def fingerprint(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("num_prefix", [0, 1, 9, 63, 64, 65])
@pytest.mark.parametrize("pad_to", [1, 64, 512])
def test_layout(num_prefix, pad_to):
    """R-08, pitfalls 22, 30, T-10: positions count on from the prefix; segments say what a budget counts."""
    prefix = np.arange(num_prefix, dtype=np.int32) + 1
    pieces = [np.full(length, 7 + i, np.int32) for i, length in enumerate(LENGTHS)]
    layout = make_layout(pieces, prefix, pad_to=pad_to)
    end = num_prefix + 69
    assert layout.starts == tuple(num_prefix + s for s in (0, 21, 22, 56)) and layout.lengths == LENGTHS
    assert layout.num_prefix == num_prefix and layout.end == end
    np.testing.assert_array_equal(layout.tokens[:end], np.concatenate([prefix, *pieces]))
    np.testing.assert_array_equal(layout.positions[:end], np.arange(end))
    expected = [PREFIX_SEGMENT] * num_prefix + [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    np.testing.assert_array_equal(layout.segments[:end], expected)
    assert (layout.positions[end:] == PAD_POSITION).all() and (layout.segments[end:] == PADDING_SEGMENT).all()
    size = end if pad_to == 1 else -(-num_prefix // 64) * 64 + -(-69 // pad_to) * pad_to
    assert len(layout.tokens) == len(layout.positions) == len(layout.segments) == size


def test_nothing_to_stitch_is_refused():
    """Pitfall 59."""
    with pytest.raises(ValueError, match="at least one"):
        stitch([], build_model().config.rope)


@pytest.mark.parametrize(
    ("lengths", "num_prefix"),
    [((1,), 0), ((128,), 1), ((129, 1), 65), ((1,) * 30, 3), ((34, 34), 0)],
)
def test_any_lengths(lengths, num_prefix):
    """K-01, T-06, pitfalls 17, 22: exact buffer and padded buffer hold the reference's stitched cache, then zeros."""
    request = build_request(lengths=lengths, prefix=num_prefix, pad_to=192)
    exact = build_request(lengths=lengths, prefix=num_prefix, pad_to=1)
    assert len(exact.context.tokens) == exact.context.end == request.end == exact.end
    assert request.context.num_tokens == sum(lengths)
    k, v = request.stale()
    for l, (padded, bare) in enumerate(zip(request.context.kv, exact.context.kv, strict=True)):
        at = slice(num_prefix, request.end)
        np.testing.assert_allclose(padded.k[at], k[l][at], **CLOSE)
        np.testing.assert_allclose(padded.v[at], v[l][at], **CLOSE)
        for ours, theirs in zip(padded, bare, strict=True):
            np.testing.assert_array_equal(ours[: request.end], theirs)
    if num_prefix:
        full = request.reference.run(request.ids)  # the prefix is exact
        for l, layer in enumerate(request.context.kv):
            np.testing.assert_allclose(layer.k[:num_prefix], full.k[l, :num_prefix], **CLOSE)


def test_one_stored_chunk_serves_any_place():
    """R-07, pitfalls 13, 59, 60: the same chunk twice in a request does not alias; stored arrays stay as they were."""
    a, b, c = (build_chunk("llama", n, s) for n, s in ((21, 0), (34, 2), (13, 3)))
    rope = build_model().config.rope
    before = fingerprint((a, b, c))
    first = stitch([a, b, c], rope, pad_to=192)
    second = stitch([c, a, b, a], rope, pad_to=192)
    again = stitch([a, b, c], rope, pad_to=192)
    assert fingerprint(first) == fingerprint(again) and fingerprint((a, b, c)) == before
    for one, two in zip(first.kv, second.kv, strict=True):
        np.testing.assert_array_equal(one.v[:21], two.v[13:34])
        np.testing.assert_array_equal(one.v[:21], two.v[68:89])
        np.testing.assert_array_equal(one.v[55:68], two.v[:13])
        assert np.abs(np.asarray(one.k[:21]) - two.k[13:34]).max() > 0.1
    copied = [Chunk(*jax.tree.map(np.array, chunk)) for chunk in (a, b, c)]  # other storage, same content
    assert fingerprint(stitch(copied, rope, pad_to=192)) == fingerprint(first)


def test_dtype_is_kept():
    chunk = build_chunk("llama", 21, 0)
    low = chunk._replace(kv=jax.tree.map(lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16)), chunk.kv))
    context = stitch([low], build_model().config.rope)
    assert context.kv[0].k.dtype == jnp.bfloat16
    np.testing.assert_array_equal(context.kv[0].v, low.kv[0].v)


def anchor_case(order=(0, 1, 2, 3), **settings):
    request = build_request()
    chunks = [request.chunks[i] for i in order]
    layout = make_layout(
        [chunk.tokens for chunk in chunks], request.prefix.tokens[:9], pad_to=settings.get("pad_to", 1)
    )
    blocks = [chunk_anchors(chunk, 0.3) for chunk in chunks]
    return blocks, layout, stitch_anchors(blocks, request.model.config.rope, layout, prefix=request.prefix, **settings)


def test_anchors_keep_their_request_positions():
    """Pitfall 21, QCFuse eq. 16: every anchor has position, rotation and value of its place in the full request."""
    request, (blocks, layout, cache) = build_request(), anchor_case()
    width = len(request.prefix.tokens)
    assert cache.positions.shape == (4, width + 7 + 1 + 11 + 4)
    for l, layer in enumerate(cache.kv):
        real = np.concatenate([block.offsets[l] + start for block, start in zip(blocks, layout.starts, strict=True)])
        np.testing.assert_array_equal(cache.positions[l, width:], real)
        np.testing.assert_array_equal(cache.positions[l, :9], np.arange(9))
        assert (cache.positions[l, 9:width] == PAD_POSITION).all()
        np.testing.assert_allclose(layer.k[width:], request.context.kv[l].k[real], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(layer.v[width:], request.context.kv[l].v[real])
        np.testing.assert_array_equal(layer.k[:9], request.context.kv[l].k[:9])


def test_anchor_positions_follow_swapped_chunks():
    """Pitfall 21."""
    (_, _, cache), (_, _, swapped) = anchor_case(), anchor_case((2, 1, 0, 3))
    first, third = cache.positions[0, 64:71] - 9, cache.positions[0, 72:83] - 31
    np.testing.assert_array_equal(swapped.positions[0, 64:75] - 9, third)
    np.testing.assert_array_equal(swapped.positions[0, 76:83] - 44, first)


def test_anchor_padding_and_layer_choice():
    """Padding stands at PAD_POSITION; only the layers that a probe reads are placed."""
    (_, _, bare), (_, _, padded) = anchor_case(), anchor_case(pad_to=128)
    count = bare.positions.shape[1]
    np.testing.assert_array_equal(padded.positions[:, :count], bare.positions)
    assert padded.positions.shape[1] > count and (padded.positions[:, count:] == PAD_POSITION).all()
    for layer, other in zip(padded.kv, bare.kv, strict=True):
        assert layer.k.shape[0] == padded.positions.shape[1]
        np.testing.assert_array_equal(layer.k[:count], other.k)
    _, _, two = anchor_case(layers=(2, 0))
    assert two.positions.shape[0] == len(two.kv) == 2
    np.testing.assert_array_equal(two.positions, bare.positions[[2, 0]])
    np.testing.assert_array_equal(two.kv[0].k, bare.kv[2].k)


@pytest.mark.parametrize("pad_to", [1, 128])
def test_no_anchors_leave_the_prefix_alone(pad_to):
    """The token view "prefix": positions and entries agree in number."""
    request = build_request()
    layout = make_layout([chunk.tokens for chunk in request.chunks], request.prefix.tokens[:9], pad_to=pad_to)
    no_tokens = [chunk_anchors(chunk, 0.0) for chunk in request.chunks]
    for blocks in ([], no_tokens):
        cache = stitch_anchors(
            blocks, request.model.config.rope, layout, prefix=request.prefix, ratio=0.0, pad_to=pad_to
        )
        assert len(cache.kv) == 4
        for l, layer in enumerate(cache.kv):
            assert layer.k.shape[0] == layer.v.shape[0] == cache.positions.shape[1]
            np.testing.assert_array_equal(cache.positions[l][cache.positions[l] < PAD_POSITION], np.arange(9))
            np.testing.assert_array_equal(layer.k[:9], request.prefix.kv[l].k[:9])


def test_prefix_is_exact_and_padded_apart():
    """R-08: one padded length for prefixes of one bucket."""
    model = build_model()
    for length in (1, 9, 64, 65):
        ids = np.arange(length, dtype=np.int32) % 128
        prefix = encode_prefix(model, ids)
        assert prefix.end == length and len(prefix.tokens) == -(-length // 64) * 64 and prefix.num_tokens == 0
        expected = tiny.Reference(model.config, model.params).run(ids)
        for l, layer in enumerate(prefix.kv):
            np.testing.assert_allclose(layer.k[:length], expected.k[l], **CLOSE)
            np.testing.assert_allclose(layer.v[:length], expected.v[l], **CLOSE)
