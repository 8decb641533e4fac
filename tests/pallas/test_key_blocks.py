"""What a block of rows visits: every readable key, and where positions lie in order nothing but readable blocks."""

import jax
import numpy as np
import pytest

from jfuse.pallas.key_blocks import END, NEAR, NEAR_END, WHOLE, visit
from tests.pallas.attention_cases import Case, draw, mask

CASES = [
    Case(40, 200),
    Case(40, 200, padding=30),
    Case(40, 200, visible=0.3, window=9),
    Case(40, 200, visible=0.0, window=0, padding=7),
    Case(40, 200, visible=1.0, window=0),
    Case(40, 200, visible=0.2, window=30, order="gaps"),
    Case(40, 200, visible=0.5, window=9, order="shuffled"),
    Case(40, 200, order="shuffled", padding=5),
    Case(3, 5, visible=0.4, window=1),
]
plan = jax.jit(visit, static_argnames=("row_block", "key_block"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_hold_every_readable_key(case):
    """Pitfalls 10, 56: no readable key is skipped, no masked one is in a whole block, skipped blocks are skipped."""
    drawn = draw(case)
    keep, row_block, key_block = mask(drawn), 8, 16
    k = np.arange(case.keys, dtype=np.float32)[:, None, None]
    found = plan(k, k, *drawn[3:], row_block=row_block, key_block=key_block)
    order = np.asarray(found.k)[:, 0, 0].astype(int)
    np.testing.assert_array_equal(np.sort(order), np.arange(case.keys))
    (first, last), at = np.asarray(found.bounds), np.asarray(found.row_positions)[: case.rows, None]
    np.testing.assert_array_equal(((first <= at) & (at <= last))[:, : case.keys], keep[:, order])
    assert not ((first <= at) & (at <= last))[:, case.keys :].any()
    keep = keep[:, order]
    real = np.asarray(drawn.row_positions) < 2**30
    for block, ends in enumerate(np.asarray(found.ranges)):
        rows = slice(block * row_block, (block + 1) * row_block)
        mine = keep[rows][real[rows] & (np.asarray(drawn.row_positions)[rows] >= 0)]
        visited = [*range(ends[END]), *range(ends[NEAR], ends[NEAR_END])]
        assert ends[WHOLE] <= ends[END] and len(set(visited)) == len(visited)
        for j in range(-(-case.keys // key_block)):
            keys = mine[:, j * key_block : (j + 1) * key_block]
            assert not keys.any() or j in visited
            assert j >= ends[WHOLE] or (keys.all() and keys.shape[1] == key_block and len(keys))
            if case.order == "sorted" and case.visible in (None, 0.0, 1.0):
                assert keys.any() or j not in visited
