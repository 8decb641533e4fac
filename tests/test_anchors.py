"""Anchor rules: how many tokens of a chunk are kept, which, and what is stored of them."""

import numpy as np
import pytest

from jfuse import anchors
from jfuse.anchors import NUM_SINKS, anchor_offsets, chunk_anchors, kvzip
from jfuse.types import Chunk, LayerKV
from tests import tiny


@pytest.mark.parametrize(
    ("length", "ratio", "count"),
    [(1, 0.1, 1), (10, 0.1, 1), (11, 0.1, 2), (21, 0.1, 3), (512, 0.1, 52), (20, 0.0, 0), (20, 1.0, 20), (30, 0.07, 3)],
)
def test_the_count_is_the_ceiling(length, ratio, count):
    """T-06, pitfall 29: ceil(ratio * C), exactly; one token keeps one anchor."""
    assert anchor_offsets(np.random.default_rng(0).random((3, length)), ratio).shape == (3, count)


def test_ties_go_to_the_lower_position():
    """Pitfall 31."""
    np.testing.assert_array_equal(anchor_offsets(np.array([[0, 1, 1, 1, 0], [2, 2, 2, 2, 2.0]]), 0.4), [[1, 2], [0, 1]])


def test_sinks_count_inside_the_budget():
    """Pitfall 35: the forced first tokens spend the budget first; a budget below them keeps the first ones."""
    chunk = tiny.build_chunk("llama", 21, 0)
    np.testing.assert_array_equal(anchor_offsets(chunk.anchor_score, 0.1), np.tile(np.arange(3), (4, 1)))
    offsets = anchor_offsets(chunk.anchor_score, 0.3)
    assert offsets.shape == (4, 7)
    np.testing.assert_array_equal(offsets[:, :NUM_SINKS], np.tile(np.arange(NUM_SINKS), (4, 1)))
    best = np.argsort(-chunk.anchor_score[:, NUM_SINKS:], axis=1, kind="stable")[:, : 7 - NUM_SINKS] + NUM_SINKS
    np.testing.assert_array_equal(offsets[:, NUM_SINKS:], np.sort(best, axis=1))
    assert len({tuple(row) for row in offsets.tolist()}) > 1  # layers keep different tokens


def test_the_block_holds_the_kept_entries():
    chunk = tiny.build_chunk("llama", 34, 2)
    block = chunk_anchors(chunk, 0.3)
    for l, layer in enumerate(block.kv):
        np.testing.assert_array_equal(layer.k, chunk.kv[l].k[block.offsets[l]])
        np.testing.assert_array_equal(layer.v, chunk.kv[l].v[block.offsets[l]])
    assert (np.diff(block.offsets, axis=1) > 0).all()


def test_ratios_outside_the_range_are_refused():
    chunk = Chunk(
        np.zeros(4, np.int32),
        (LayerKV(np.zeros((4, 1, 2), np.float32), np.zeros((4, 1, 2), np.float32)),),
        np.zeros((1, 4), np.float32),
    )
    with pytest.raises(ValueError, match="1.5"):
        chunk_anchors(chunk, 1.5)


def test_rules_are_made_once():
    """A rule is a static argument: equal instructions give one object."""
    assert kvzip((1, 2)) is kvzip((1, 2)) and hash(kvzip((1, 2))) is not None
    with pytest.raises(ValueError, match="instruction"):
        kvzip(())
    assert anchors.default_rule(tiny.build_model()) is kvzip((1, 2))
