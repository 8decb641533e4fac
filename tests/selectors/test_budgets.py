"""Budgets: what every named selector buys for a ratio, by rationals; batches with a budget for each request."""

from fractions import Fraction
from math import floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.probe import chunk_offsets
from jfuse.selectors import budgets
from jfuse.selectors.base import budget_for, select
from jfuse.selectors.listing import NAMED
from jfuse.types import Evidence, Sizes
from tests import tiny
from tests.selectors import plain

RATIOS = {0: Fraction(0), 0.05: Fraction(1, 20), 0.1: Fraction(1, 10), 0.29: Fraction(29, 100), 1 / 3: Fraction(1, 3),
          0.5: Fraction(1, 2), 1: Fraction(1)}  # fmt: skip
LENGTHS = ((1,), (2,), (1, 2), (4, 5), (10,), (50, 49, 1), (100, 100))
PREFIX, QUERY = 7, 11


def by_hand(name, share, lengths, query=QUERY):
    """The count of each method's own rule (methods differ), from an exact ratio."""
    n, positive = sum(lengths), share > 0
    if name in ("epic", "epic_16"):  # there is a prefix, so that no chunk is exempt
        return sum(floor(share * c) if name == "epic" else min(16, c) for c in lengths)
    if name in ("cacheblend", "cacheblend_paper", "a3"):
        return min(n, floor(share * (PREFIX + n)))
    if name == "cacheblend_lmcache":
        return min(n, floor(share * (PREFIX + n + query)))
    rounded = min(n, max(round(share * n), int(positive)))
    least_one = min(n, max(floor(share * n), int(positive)))
    if name == "relaxkv_g":
        return least_one, rounded
    if name == "target_capacity":
        return floor(share * n), max(1, round(n / Fraction(5)))
    if "relaxkv" in name or name in ("global_sparse", "layerwise_sparse", "target_union", "qcfuse_layerwise"):
        return rounded
    if name in ("prophetkv_ucm", "prophetkv_kvbench"):
        return floor(share * n)
    return least_one


@pytest.mark.parametrize("name", NAMED)
def test_every_rule_is_exact(name):
    """Pitfalls 29, 30: floor, round half to even, minimum of one, populations; ratios as rationals, not floats."""
    selector = selectors.by_name(name, layers=(1,))
    for ratio, share in RATIOS.items():
        for lengths in LENGTHS:
            expected = by_hand(name, share, lengths)
            assert budget_for(selector, ratio, Sizes(PREFIX, lengths, QUERY)) == expected, (ratio, lengths)


def test_default_ratio_and_bad_ratios():
    """None takes the method's own ratio; anything but a number from 0 to 1 is refused (S-06)."""
    sizes = Sizes(0, (100, 100))
    assert budget_for(selectors.qcfuse((1,)), None, sizes) == 100
    assert budget_for(selectors.prophetkv(), None, sizes) == 40
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"ratio is {wrong}; use a number from 0 \(reuse\) to 1"):
            budget_for(selectors.prophetkv(), wrong, sizes)


def test_sizes_come_from_segments():
    """Prefix, chunks of any length and padding, from the host metadata of a request."""
    request = tiny.build_request()
    assert request.context.sizes(11) == Sizes(9, (21, 1, 34, 13), 11) and request.context.sizes().context == 69


def test_the_filter_lets_at_least_the_ratio_through():
    """CacheBlend's schedule: floor(share * N) after the earlier checks, never less than what goes on after the last."""
    rule = budgets.filter_shares((0.5, 0.3))
    assert rule(0.2, Sizes(0, (10, 10))) == (4, 10, 6)
    assert rule(0.4, Sizes(0, (10, 10))) == (8, 10, 8)
    assert rule(0.0, Sizes(0, (10, 10))) == (0, 0, 0)


def test_a_batch_with_a_budget_for_each_request(evidence, choose):
    """S-08, ID-8: four requests of one bucket and different N, mapped over; each row as if alone."""
    selector = selectors.relaxkv()
    requests = [tiny.build_request(lengths=lengths) for lengths in ((21, 1, 34, 13), (40,), (9, 15), (50, 30))]
    k = [budget_for(selector, 0.2, request.context.sizes(11)) for request in requests]
    assert len(set(k)) > 2
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(evidence(request, selector) for request in requests))
    rows = jax.vmap(lambda e, k: select(selector, e, k, num_layers=4))(batch, jnp.asarray(k))
    for i, request in enumerate(requests):
        alone = choose(request, selector, 0.2)
        np.testing.assert_array_equal(rows.recompute[i], alone.recompute)
        np.testing.assert_array_equal(rows.visible[i], alone.visible)


@pytest.mark.parametrize("name", NAMED)
def test_a_query_far_longer_than_the_context(evidence, name):
    """T-08: 600 query tokens over 20 of context; the selection stays inside, and only LMCache's budget grows."""
    request = tiny.build_request(lengths=(13, 7), prefix=PREFIX, query=600)
    selector = selectors.by_name(name, layers=(1,))
    seen, sizes = evidence(request, selector), request.context.sizes(600)
    for ratio, share in ((0.03, Fraction(3, 100)), (0.3, Fraction(3, 10))):
        k = budget_for(selector, ratio, sizes)
        assert k == by_hand(name, share, (13, 7), query=600)
        rows = np.asarray(select(selector, seen, k, num_layers=4).recompute)
        context = np.arange(PREFIX, PREFIX + 20)
        assert not np.delete(rows, context, axis=1).any()
        targets = {"reuse": 0, "recompute_all": 20}.get(name, k[0] if isinstance(k, tuple) else k)
        count = rows[-1].sum()
        assert targets <= count <= 20 if name == "target_union" else count == targets


@pytest.mark.parametrize("prefix", [0, 9])
@pytest.mark.parametrize("name", ["epic", "epic_16", "cacheblend", "qcfuse", "relaxkv"])
def test_only_the_order_of_chunks_matters(evidence, score, name, prefix):
    """Pitfall 60: relabelled segments (another numbering in the store) change no score on the context."""
    request = tiny.build_request(prefix=prefix)
    selector = selectors.by_name(name, layers=(1, 2))
    seen = evidence(request, selector)
    segments = np.asarray(seen.segments)
    relabelled = seen._replace(segments=np.where(segments >= 0, np.array([3, 0, 2, 1, 0, 0])[segments], segments))
    first, second = (plain.on_context(request, score(selector, e)) for e in (seen, relabelled))
    np.testing.assert_array_equal(first, second)


def test_chunks_that_are_equal_are_told_apart():
    """Pitfall 59: one stored chunk placed twice is two chunks of the request, each with its own first tokens."""
    segments = np.repeat([0, 1], 5).astype(np.int32)
    zeros = np.zeros(10, np.int32)
    seen = Evidence((), (), (), None, np.ones(1, bool), zeros[:1], zeros, segments, chunk_offsets(segments))
    selector = selectors.epic(2, exempt_first=False)
    chosen = select(selector, seen, budget_for(selector, None, Sizes(0, (5, 5))), num_layers=1)
    assert np.flatnonzero(chosen.recompute[0]).tolist() == [0, 1, 5, 6]
