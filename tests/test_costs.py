"""Every FLOP formula against a count by hand: loops over layers, rows and keys, weights from a real parameter tree."""

import math

import numpy as np
import pytest

from jfuse import costs
from jfuse.config import View
from jfuse.models.params import shape_params
from jfuse.models.tiny import tiny_config
from jfuse.stitch import make_layout
from jfuse.types import ContextCache, Selection, Sizes

CONFIG = tiny_config(num_layers=3, num_heads=6, num_kv_heads=2, head_size=8, width=40, mlp_width=56)
SIZES = Sizes(5, (21, 1, 13), 7)
LAYOUT = make_layout([np.zeros(n, np.int32) for n in SIZES.chunks], np.zeros(5, np.int32), pad_to=64)
CONTEXT = ContextCache(LAYOUT.tokens, LAYOUT.positions, LAYOUT.segments, ())
PARAMS = shape_params(CONFIG)
EDGE = 2 * 2 * 6 * 8  # a product with the key and one with the value, for six heads of eight numbers


def kernel(name):
    """Rows and columns of one layer's matrix."""
    return PARAMS["blocks"][name]["kernel"].shape[1:]


WIDTH, BOTH = kernel("qkv")
QUERIES = 2 * WIDTH * 6 * 8
KEYS_VALUES = 2 * WIDTH * BOTH - QUERIES
AFTER = 2 * sum(math.prod(kernel(name)) for name in ("o", "gate_up", "down"))
HEAD = 2 * math.prod(PARAMS["head"]["kernel"].shape)


@pytest.mark.parametrize("past", [0, 6])
def test_prefill(past):
    """Each row reads what came before it and itself; in the last layer only the last row goes past keys and values."""
    tokens, edges, flops = 9, 0, HEAD
    for layer in range(3):
        for row in range(tokens):
            flops += KEYS_VALUES
            if layer < 2 or row == tokens - 1:
                flops += QUERIES + AFTER
                edges += past + row + 1
    assert costs.prefill_cost(CONFIG, tokens, past=past) == ((tokens,) * 3, edges, flops + EDGE * edges)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("window", [0, 4])
def test_fusion(per_layer, window):
    """A staircase under a restricted context: a row attends only where it goes on to the next layer, and reads itself,
    the prefix, the visible set and the window before it."""
    rng = np.random.default_rng(0)
    depth = np.where(LAYOUT.segments >= 0, rng.integers(-2, 3, len(LAYOUT.segments)), -1)  # deepest layer of each
    recompute = depth[None] >= np.arange(3)[:, None]
    visible = rng.random((3 if per_layer else 1, len(depth))) < 0.3
    edges = flops = 0
    for layer in range(3):
        for row in np.flatnonzero(recompute[layer]):
            flops += KEYS_VALUES
            if layer < 2 and recompute[layer + 1, row]:
                flops += QUERIES + AFTER
                seen = visible[layer if per_layer else 0]
                edges += sum(key < 5 or seen[key] or row - key <= window for key in range(row + 1))
    rows = tuple(int(own.sum()) for own in recompute)
    assert rows[0] > rows[1] > rows[2] > 0
    found = costs.fusion_cost(CONFIG, CONTEXT, Selection(recompute, visible, np.int32(window)))
    assert found == (rows, edges, flops + EDGE * edges)


@pytest.mark.parametrize(
    ("view", "visible"),
    [
        (View("anchors", (1,), 0.1), 5 + 3 + 1 + 2),
        (View("anchors", (2, 0), 0.3), 5 + 7 + 1 + 4),
        (View("context", None), 5 + 35),
        (View("prefix", (-1,)), 5),
        (View("query", (0, 1)), 0),
        (View("none", (1,), fresh=2), 0),
        (View("context", (2,), fresh=1), 5 + 35),
    ],
)
def test_probe(view, visible):
    """The query runs to the deepest scored layer, whose own attention and MLP nobody needs; then the layers that are
    wanted fresh run for prefix and context, the last of them up to its keys and values."""
    layers = [l % 3 for l in (range(3) if view.layers is None else view.layers)]
    rows, edges, flops = [], 0, 0
    if view.tokens != "none":
        for layer in range(max(layers) + 1):
            rows.append(7)
            for row in range(7):
                flops += KEYS_VALUES + QUERIES
                if layer < max(layers):
                    flops += AFTER
                    edges += visible + row + 1
        flops += len(layers) * 7 * 35 * EDGE // 2  # scores, but no values
    for layer in range(view.fresh):
        rows.append(40)
        for row in range(40):
            flops += KEYS_VALUES
            if layer < view.fresh - 1:
                flops += QUERIES + AFTER
                edges += row + 1
    assert costs.probe_cost(CONFIG, view, SIZES) == (tuple(rows), edges, flops + EDGE * edges)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_what_the_probe_has_begun(layers):
    """Of its layers the probe has run the rows of all but the last in full, and of that one the keys and values."""
    everyone = np.broadcast_to(LAYOUT.segments >= 0, (3, len(LAYOUT.segments)))
    edges = flops = 0
    for layer in range(layers):
        for row in range(5, 40):
            flops += KEYS_VALUES
            if layer < layers - 1:
                flops += QUERIES + AFTER
                edges += row + 1
    selection = Selection(everyone, np.ones((1, everyone.shape[1]), bool), np.int32(0))
    found = costs.begun_cost(CONFIG, CONTEXT, selection, layers)
    assert (found.edges, found.flops) == (edges, flops + EDGE * edges)
