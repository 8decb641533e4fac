"""ProphetKV and FusionRAG in all presets, and A^3, against plain loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.selectors.a3 import smooth
from jfuse.selectors.base import budget_for
from tests.selectors import plain

SCORE = {"rtol": 2e-4, "atol": 2e-6}
PRESETS = {  # selector, what the query sees, layers, softmax set, whether all rows score
    "paper": (selectors.prophetkv("paper"), "everything", range(4), "context", True),
    "qcfuse": (selectors.prophetkv("qcfuse"), "everything", range(4), "all", False),
    "ucm": (selectors.prophetkv("ucm"), "everything", range(4), "prefix+context", False),
    "kvbench": (selectors.prophetkv("kvbench"), "nothing", range(4), "context", True),
    "fusionrag": (selectors.fusionrag(), "nothing", (3,), "context", False),
    "fusionrag as run by QCFuse": (selectors.fusionrag("qcfuse"), "prefix", (3,), "all", False),
}
SEEN = {"everything": plain.everything_before, "prefix": plain.prefix_only, "nothing": lambda r: [set()] * 4}


@pytest.mark.parametrize("preset", PRESETS)
def test_score_and_selection(request_, evidence, choose, score, preset):
    """Every preset's switches; the sum over its layers decides, one set for all layers."""
    selector, seen, layers, denominator, all_rows = PRESETS[preset]
    actual = plain.on_context(request_, score(selector, evidence(request_, selector, scoring=slice(2, 9))))
    q, own = plain.query_states(request_, SEEN[seen](request_))
    keys, _ = plain.cached(request_)
    rows = range(len(request_.query)) if all_rows else range(2, 9)
    mass = [plain.head_mass(request_, q[l], own[l], keys[l], denominator=denominator, rows=rows) for l in layers]
    expected = np.stack([m.mean((0, 1)) for m in mass])[:, request_.num_prefix :]
    np.testing.assert_allclose(actual, expected, **SCORE)
    selection = choose(request_, selector, 0.25, scoring=slice(2, 9))
    assert [plain.picked(request_, row) for row in selection.recompute] == [plain.best(expected.mean(0), 17)] * 4
    assert np.asarray(selection.visible).all()


def a3_scores(request, rows):
    """Attention of the query's rows at layer 1 of a full pass, averaged over five neighbours, prefix included."""
    full = request.reference.run(request.ids)
    q, keys = full.q[1][request.end :], full.k[1][: request.end]
    mass = plain.head_mass(request, q, full.k[1][request.end :], keys, rows=rows).mean((0, 1))
    padded = np.r_[0, 0, mass, 0, 0]
    return np.array([padded[i : i + 5].mean() for i in range(len(mass))])[request.num_prefix :]


def test_a3_score_and_selection(request_, evidence, choose, score):
    """A^3: layers 0 and 1 are exact for every token, so that its scores are those of a full pass; then CacheBlend."""
    selector = selectors.a3()
    expected = a3_scores(request_, range(11))
    actual = plain.on_context(request_, score(selector, evidence(request_, selector, scoring=slice(2, 9))))[0]
    np.testing.assert_allclose(actual, expected, **SCORE)
    k = budget_for(selector, 0.25, request_.context.sizes(11))
    assert k == int(0.25 * (9 + 69))
    rows = [plain.picked(request_, row) for row in choose(request_, selector, 0.25, scoring=slice(2, 9)).recompute]
    everyone, chosen = set(range(69)), plain.best(expected, k)
    assert rows == [everyone, everyone, chosen, chosen]


def test_a3_raw_products(request_, evidence, score):
    """The other reading: scaled products without a softmax."""
    full = request_.reference.run(request_.ids)
    q, keys = full.q[1][request_.end :], full.k[1][: request_.end]
    products = np.array([[[row[h] @ key[h // 2] for key in keys] for h in range(4)] for row in q]).mean((0, 1)) / 4
    actual = score(selectors.a3(products="raw", pool=1), evidence(request_, selectors.a3()))
    np.testing.assert_allclose(plain.on_context(request_, actual)[0], products[9:], rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="pool is 4"):
        selectors.a3(pool=4)


def test_pooling_keeps_positions():
    """Pitfall 43: "same" padding; an impulse spreads over its two neighbours on either side, also at the ends."""
    for at, expected in ((5, {3, 4, 5, 6, 7}), (0, {0, 1, 2}), (11, {9, 10, 11})):
        pooled = np.asarray(smooth(jnp.eye(12)[at][None], 5))[0]
        assert set(np.flatnonzero(pooled)) == expected
        np.testing.assert_allclose(pooled[pooled > 0], 0.2)
