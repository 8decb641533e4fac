"""Ratios, budgets, layer lists and buckets: exact numbers, and refusals that name value, range and remedy."""

import inspect
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from jfuse.config import (
    FusionConfig,
    View,
    anchor_bucket,
    budget,
    checked_ratio,
    chunk_bucket,
    context_bucket,
    query_bucket,
    round_up,
)

# ratio, n, then floor with at least one, floor, half-even with at least one, half-even, ceil
BUDGETS = [
    (0.0, 10, 0, 0, 0, 0, 0),
    (0.0, 1, 0, 0, 0, 0, 0),
    (1 / 3, 1, 1, 0, 1, 0, 1),
    (1 / 3, 2, 1, 0, 1, 1, 1),
    (1 / 3, 3, 1, 1, 1, 1, 1),
    (1 / 3, 10, 3, 3, 3, 3, 4),
    (1 / 3, 100, 33, 33, 33, 33, 34),
    (0.1, 1, 1, 0, 1, 0, 1),
    (0.1, 10, 1, 1, 1, 1, 1),
    (0.1, 100, 10, 10, 10, 10, 10),
    (0.29, 100, 29, 29, 29, 29, 29),  # int(0.29 * 100) is 28
    (0.57, 100, 57, 57, 57, 57, 57),
    (0.5, 1, 1, 0, 1, 0, 1),  # half to even
    (0.5, 3, 1, 1, 2, 2, 2),
    (0.5, 5, 2, 2, 2, 2, 3),
    (0.15, 10, 1, 1, 2, 2, 2),
    (0.25, 10, 2, 2, 2, 2, 3),
    (1.0, 1, 1, 1, 1, 1, 1),
    (1.0, 100, 100, 100, 100, 100, 100),
    (1, 100, 100, 100, 100, 100, 100),  # S-06: the integer 1
    (1e-9, 10, 0, 0, 0, 0, 0),  # below the resolution of a millionth
    (0.999999, 10, 9, 9, 10, 10, 10),
    (0.5, 0, 0, 0, 0, 0, 0),
    (1.0, 0, 0, 0, 0, 0, 0),
]
RULES = ("floor_min1", "floor", "round_half_even_min1", "round_half_even", "ceil")


@pytest.mark.parametrize(("ratio", "n", "floor_min1", "floor", "half_min1", "half", "ceil"), BUDGETS)
def test_budgets_are_exact(ratio, n, floor_min1, floor, half_min1, half, ceil):
    """Pitfall 29: every rule over ratios that floats cannot hold."""
    actual = tuple(budget(rule, ratio, n) for rule in RULES)
    assert actual == (floor_min1, floor, half_min1, half, ceil)
    assert all(type(count) is int for count in actual)


def test_no_budget_leaves_its_range():
    for rule in RULES:
        for n in range(30):
            counts = [budget(rule, float(Fraction(i, 40)), n) for i in range(41)]
            assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == n


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), float("inf"), np.float32(1.01)])
def test_ratios_outside_the_range_are_refused(ratio):
    """S-06: the message names argument, value and range."""
    with pytest.raises(ValueError, match=r"FusionConfig\.ratio.*0 .*1"):
        FusionConfig(ratio=float(ratio))
    with pytest.raises(ValueError, match="ratio.*0 .*1"):
        budget("floor", float(ratio), 10)
    with pytest.raises(ValueError, match=r"View\.anchor_ratio"):
        View(anchor_ratio=float(ratio))


def test_ratios_that_are_no_numbers_are_refused():
    """S-06: the string "0.3" is not converted; the integer 1 is 1.0; True is not a ratio."""
    for wrong in ("0.3", None, True, [0.3]):
        with pytest.raises(TypeError, match=rf"ratio is {re.escape(repr(wrong))} of type .*; use a number from 0 to 1"):
            inspect.unwrap(checked_ratio)(wrong)  # without the tests' type hook, which would refuse first
    assert FusionConfig(ratio=1).ratio == 1.0 and isinstance(FusionConfig(ratio=1).ratio, float)
    assert FusionConfig(ratio=np.float64(0.5)).ratio == 0.5
    assert FusionConfig().ratio is None


# What the annotations refuse in the tests, where they are checked, and the library itself in a user's process.
MISTAKES = {
    'FusionConfig(ratio="0.3")': "FusionConfig.ratio is '0.3' of type str; use a number from 0 to 1",
    "FusionConfig(ratio=True)": "FusionConfig.ratio is True of type bool",
    'FusionConfig(implementation="cuda")': "FusionConfig.implementation is 'cuda'; use None",
    'View("context", None, anchor_ratio="0.3")': "View.anchor_ratio is '0.3' of type str",
    'View("everything")': "View.tokens is 'everything'; use one of 'none', 'query'",
    'View(layers="23")': "View.layers is '23'; use a sequence of integers",
    "View(layers=[1.5])": "View.layers is [1.5]; use a sequence of integers",
    'budget("flor", 0.5, 10)': "rule is 'flor'; use one of 'floor_min1', 'floor'",
    'budget("floor", "0.3", 10)': "ratio is '0.3' of type str",
    'budget_for(selectors.prophetkv(), "0.3", Sizes(0, (9,)))': "ratio is '0.3' of type str",
    'query_attention(denominator="ctx")': "denominator is 'ctx'; use one of ",
    'query_attention(heads="sum")': "heads is 'sum'; use one of ",
    'query_attention(rows="min")': "rows is 'min'; use one of ",
    'query_attention(scoring="tail")': "scoring is 'tail'; use one of ",
    'selectors.prophetkv("ibm")': "preset is 'ibm'; use one of ",
    'selectors.fusionrag("code")': "preset is 'code'; use one of ",
    'selectors.cacheblend("v2")': "preset is 'v2'; use one of ",
}
PROGRAM = """
import sys
from jfuse import selectors
from jfuse.config import FusionConfig, View, budget
from jfuse.selectors.base import budget_for
from jfuse.selectors.score import query_attention
from jfuse.types import Sizes
for mistake in sys.argv[1:]:
    try:
        print(eval(mistake))
    except (TypeError, ValueError) as error:
        print(error)
"""


def test_mistakes_are_refused_without_a_type_checker():
    """S-06: one line each, which names the argument and the value."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, *MISTAKES], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == len(MISTAKES)
    for (mistake, message), line in zip(MISTAKES.items(), lines, strict=True):
        assert line.startswith(message), mistake


@pytest.mark.parametrize(("field", "value"), [("pad_to", 0), ("row_block", 0), ("ahead", -1)])
def test_sizes_below_the_least_are_refused(field, value):
    with pytest.raises(ValueError, match=f"FusionConfig.{field} is {value}"):
        FusionConfig(**{field: value})
    assert FusionConfig(ahead=0).ahead == 0  # synchronous


def test_a_view_that_scores_nothing_is_refused():
    for tokens in ("query", "prefix", "anchors", "context"):
        with pytest.raises(ValueError, match=f"View.tokens is '{tokens}', but View.layers is empty"):
            View(tokens)
        assert View(tokens, None).layers is None
    assert View("none").layers == ()


def test_a_view_takes_lists_and_stays_a_static_argument():
    assert View("anchors", [2, 1]) == View("anchors", (2, 1)) and hash(View("anchors", [2, 1]))
    assert View(layers=[1], fresh=3, kept=[0.5]) == View(layers=(1,), fresh=3, kept=(0.5,))


def test_layers_count_from_zero():
    """S-07, pitfall 34: negative layers count from the end; the error lists the valid range; no layer twice."""
    assert View(layers=(2, -1, 0)).layer_indices(4) == (2, 3, 0)
    assert View(layers=None).layer_indices(3) == (0, 1, 2)
    assert View(layers=()).layer_indices(3) == ()
    for layers in ((4,), (1, -5)):
        with pytest.raises(ValueError, match=r"0\.\.3.*-4"):
            View(layers=layers).layer_indices(4)
    for layers in ((1, 1), (3, -1)):
        with pytest.raises(ValueError, match="twice"):
            View(layers=layers).layer_indices(4)
    with pytest.raises(ValueError, match="fresh"):
        View(fresh=-1)


def test_settings_are_hashable():
    """They are static arguments of jit."""
    assert hash(FusionConfig(ratio=0.3)) == hash(FusionConfig(ratio=0.3))
    assert hash(View("anchors", (1, 2))) == hash(View("anchors", (1, 2)))


def test_buckets_hold_what_is_put_in():
    """Pitfall 53: buckets are multiples, never smaller than their content, and few."""
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [chunk_bucket(n) for n in (1, 128, 129, 512, 513)] == [128, 128, 256, 512, 1024]
    assert [query_bucket(n) for n in (1, 64, 65)] == [64, 64, 128]
    assert context_bucket(0, 700) == 1024 and context_bucket(9, 700) == 64 + 1024
    for context in (1, 5, 511, 512, 513):
        sizes = {anchor_bucket(0, context, 0.1, count) for count in range(int(0.1 * context) + 60)}
        assert min(sizes) >= 0.1 * context + 59 and len(sizes) == 1
    assert anchor_bucket(0, 20, 0.1, 700) >= 700  # many tiny chunks
