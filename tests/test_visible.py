"""Restricted contexts: random staircases, visible sets and windows, gathered, masked and dense."""

import jax
import numpy as np
import pytest

from jfuse import costs
from jfuse.fuse import Work, fuse, fusion_work, soft_fuse
from jfuse.types import Selection
from jfuse.visible import gathered_size, key_counts, readable
from tests import tiny
from tests.reference import restricted_mask

pytestmark = pytest.mark.usefixtures("strict")
KV = {"rtol": 1e-4, "atol": 1e-5}


def random_selection(request, seed, *, per_layer=False, window=0, share=0.3):
    """Nested random targets of the context and a random visible set, for one layer or each."""
    rng = np.random.default_rng(seed)
    segments = np.asarray(request.context.segments)
    layers, size = request.model.config.num_layers, len(segments)
    depth = rng.integers(-layers, layers, size)  # deepest layer of each position; negative: not a target
    recompute = (depth[None] >= np.arange(layers)[:, None]) & (segments >= 0)[None]
    visible = rng.random((layers if per_layer else 1, size)) < share
    return Selection(recompute, visible, np.int32(window))


@pytest.mark.parametrize(
    ("seed", "per_layer", "window", "row_block"),
    [(0, False, 0, 16), (1, True, 0, 16), (2, False, 2, 16), (3, True, 7, 1)],
)
def test_gathered_is_masked_is_dense(seed, per_layer, window, row_block):
    """Pitfall 40: three executions of one random restricted selection; also against the float64 mask."""
    request = tiny.build_request()
    selection = random_selection(request, seed, per_layer=per_layer, window=window)
    counted = fusion_work(selection, request.context.segments)
    assert all(gathered_size(n, len(selection.recompute[0]), row_block) for n in counted.keys)
    gathered = fuse(request.model, request.context, selection, work=counted, row_block=row_block)
    masked = fuse(request.model, request.context, selection, work=Work(counted.rows, True), row_block=row_block)
    soft = soft_fuse(request.model, request.context, selection)
    expected = request.oracle(selection.recompute, visible=selection.visible, window=window)
    for l in range(request.model.config.num_layers):
        for other in (masked, soft, gathered):
            np.testing.assert_allclose(other.kv[l].k[: request.end], expected.k[l, : request.end], **KV)
            np.testing.assert_allclose(other.kv[l].v[: request.end], expected.v[l, : request.end], **KV)


@pytest.mark.parametrize("window", [0, 3, 500])
def test_counted_keys_are_those_that_some_row_reads(window):
    """The gathered set is exactly the union of what the attending rows read; and costs count the same edges."""
    request = tiny.build_request()
    selection = random_selection(request, 5, per_layer=True, window=window)
    segments, at = np.asarray(request.context.segments), np.asarray(request.context.positions)
    counts = np.asarray(key_counts(selection, segments))
    recompute = np.asarray(selection.recompute)
    for l in range(3):
        mask = restricted_mask(at[: request.end], segments[: request.end], selection.visible[l][: request.end], window)
        read = mask[recompute[l + 1][: request.end]]
        size = int(counts[l])
        keys = readable(selection, l, segments, size)
        place = set(np.asarray(keys.place).tolist())
        needed = set(np.flatnonzero(read.any(0)).tolist())
        later = set(range(int(np.flatnonzero(recompute[l + 1]).max()) + 1, request.end))
        assert needed <= place and place - needed <= later and len(place) == size
        seen = costs.keys_seen(request.context, selection)[l][: request.end]
        np.testing.assert_array_equal(seen[recompute[l + 1][: request.end]], read.sum(1))
    cost = costs.fusion_cost(request.model.config, request.context, selection)
    assert cost.edges == sum(
        int(costs.keys_seen(request.context, selection)[l][recompute[l + 1]].sum()) for l in range(3)
    )


def test_few_keys_are_gathered_and_many_are_masked():
    """Sizes are bucketed by four row blocks, and a context that is nearly whole stays where it is."""
    assert gathered_size(1, 4096, 128) == 512 and gathered_size(1400, 4096, 128) == 1536
    assert gathered_size(3072, 4096, 128) == 3072 and gathered_size(3073, 4096, 128) is None
    request = tiny.build_request()
    whole = random_selection(request, 0)._replace(visible=np.ones((1, 192), bool))
    assert fusion_work(whole, request.context.segments) == Work(tuple(whole.recompute.sum(1).tolist()), False)


def test_gathering_compiles_once_per_bucket(compilations):
    """Pitfall 53: other visible sets of the same bucket compile nothing new."""
    request = tiny.build_request()
    first, second = (
        random_selection(request, seed)._replace(recompute=random_selection(request, 0).recompute) for seed in (0, 1)
    )
    fuse(request.model, request.context, first, row_block=16)
    jax.block_until_ready(fuse(request.model, request.context, first, row_block=16).kv)
    before = compilations.count
    jax.block_until_ready(fuse(request.model, request.context, second, row_block=16).kv)
    assert compilations.count == before


def test_unselected_entries_and_inputs_stay():
    """ID-7: gathering writes nothing; entries outside the targets keep their bits."""
    made = tiny.build_request()
    before = jax.tree.map(np.array, made.context.kv)
    selection = random_selection(made, 2, window=2)
    fused = fuse(made.model, made.context, selection, row_block=16)
    jax.tree.map(np.testing.assert_array_equal, before, made.context.kv)
    for l, layer in enumerate(fused.kv):
        np.testing.assert_array_equal(
            np.asarray(layer.k)[~selection.recompute[l]], before[l].k[~selection.recompute[l]]
        )
