"""The scoring switches against plain loops: query states, softmax set, scoring rows, heads and rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse import selectors
from jfuse.config import View
from jfuse.selectors.base import Selector, select
from jfuse.selectors.score import min_max, query_attention
from tests import tiny
from tests.selectors import plain

SCORE = {"rtol": 2e-4, "atol": 2e-6}
VIEWS = {"context": plain.everything_before, "prefix": plain.prefix_only, "query": lambda r: [set()] * 4}


@pytest.mark.parametrize("tokens", VIEWS)
@pytest.mark.parametrize("denominator", ["all", "prefix+context", "context"])
def test_query_states_and_softmax_set(request_, evidence, score, tokens, denominator):
    """Pitfalls 23, 24: three query states, three softmax sets, against loops over rows and heads."""
    view = View(tokens, (1, 3))
    seen = evidence(request_, Selector(view, query_attention()), scoring=slice(2, 8))
    actual = plain.on_context(request_, score(query_attention(denominator=denominator), seen))
    q, own = plain.query_states(request_, VIEWS[tokens](request_))
    keys, _ = plain.cached(request_)
    for row, l in enumerate(view.layers):
        mass = plain.head_mass(request_, q[l], own[l], keys[l], denominator=denominator, rows=range(2, 8))
        np.testing.assert_allclose(actual[row], mass.mean((0, 1))[request_.num_prefix :], **SCORE)
    if denominator == "context":  # each head and row has the same weight, so that the mean sums to 1
        np.testing.assert_allclose(actual.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("heads", "rows"), [("max", "max"), ("mean", "max"), ("max", "mean")])
def test_maximum_is_another_score(request_, evidence, score, heads, rows):
    """Pitfall 25: maxima of heads (first) and rows (then) against loops."""
    seen = evidence(request_, Selector(View("context", (2,)), query_attention()))
    actual = plain.on_context(request_, score(query_attention(heads=heads, rows=rows), seen))[0]
    q, own = plain.query_states(request_, plain.everything_before(request_))
    mass = plain.head_mass(request_, q[2], own[2], plain.cached(request_)[0][2])
    reduce = {"max": np.max, "mean": np.mean}
    expected = reduce[rows](reduce[heads](mass, axis=1), axis=0)[request_.num_prefix :]
    np.testing.assert_allclose(actual, expected, **SCORE)
    assert not np.allclose(actual, mass.mean((0, 1))[request_.num_prefix :], rtol=1e-2)


def test_only_the_question_scores(request_, evidence, score):
    """Pitfall 26: rows outside the span change nothing after it, and the whole query is another switch."""
    selector = Selector(View("context", None), query_attention())
    span = slice(3, 7)
    first = score(selector, evidence(request_, selector, scoring=span))
    other_tail = request_._replace(query=np.r_[request_.query[:7], (request_.query[7:] + 1) % 128].astype(np.int32))
    np.testing.assert_array_equal(first, score(selector, evidence(other_tail, selector, scoring=span)))
    everything = score(query_attention(scoring="query"), evidence(request_, selector, scoring=span))
    np.testing.assert_allclose(everything, score(selector, evidence(request_, selector)), rtol=1e-6)
    assert not np.allclose(first, everything, rtol=1e-2)
    for empty in (slice(5, 5), slice(20, 30)):
        with pytest.raises(ValueError, match="scoring span"):
            evidence(request_, selector, scoring=empty)


def test_grouped_heads_read_their_own_keys(evidence, score):
    """Pitfall 23: query head h reads KV head h // g, with KV heads that differ by a factor of a hundred."""
    request = tiny.build_request("llama")
    blocks = dict(request.model.params["blocks"])
    c, kernel = request.model.config, np.array(blocks["qkv"]["kernel"])
    second = slice((c.num_heads + 1) * c.head_size, (c.num_heads + 2) * c.head_size)
    kernel[..., second] *= 100
    blocks["qkv"] = {"kernel": jnp.asarray(kernel)}
    model = request.model.replace(params={**request.model.params, "blocks": blocks})
    request = request._replace(model=model, reference=tiny.Reference(c, model.params))
    seen = evidence(request, Selector(View("query", (0,)), query_attention()))
    q, own = plain.query_states(request, [set()] * c.num_layers)
    # The cache of the request is that of the old weights: both sides score the same keys.
    keys = np.asarray(request.context.kv[0].k, np.float64)[: request.end]
    mass = plain.head_mass(request, q[0], own[0], keys)
    actual = plain.on_context(request, score(query_attention(), seen))[0]
    np.testing.assert_allclose(actual, mass.mean((0, 1))[request.num_prefix :], **SCORE)


def test_min_max_keeps_the_order_and_a_constant_layer_is_zero(request_, evidence, score):
    """Pitfall 41: same picks per layer, other means over layers, zeros rather than NaN."""
    selector = Selector(View("context", None), query_attention())
    seen = evidence(request_, selector)
    raw = plain.on_context(request_, score(query_attention(), seen))
    scaled = plain.on_context(request_, score(min_max(query_attention()), seen))
    for a, b in zip(raw, scaled, strict=True):
        np.testing.assert_allclose(b, plain.min_max(a), atol=1e-6)
        assert plain.best(a, 20) == plain.best(b, 20)
    assert plain.best(raw.mean(0), 20) != plain.best(scaled.mean(0), 20)
    constant = min_max(lambda evidence, params=None: jnp.full((2, len(evidence.segments)), 0.3))(seen)
    assert not np.asarray(constant).any()
    broken = min_max(lambda evidence, params=None: jnp.full((1, len(evidence.segments)), jnp.nan))(seen)
    assert np.isnan(plain.on_context(request_, broken)).all()


def test_a_score_that_is_not_finite_is_refused(request_, evidence):
    """Pitfall 33: NaN and infinity are errors by name, and only on context positions."""
    selector = selectors.prophetkv()
    seen = evidence(request_, selector)
    at = request_.num_prefix + 5
    for bad in (np.nan, np.inf):
        score = lambda evidence, params=None, bad=bad: query_attention()(evidence).at[1, at].set(bad)  # noqa: E731
        with pytest.raises(FloatingPointError, match="1 scores of selector 'prophetkv'"):
            select(selector._replace(score=score), seen, 7, num_layers=4)
    harmless = lambda evidence, params=None: query_attention()(evidence).at[:, 0].set(jnp.nan)  # noqa: E731
    select(selector._replace(score=harmless), seen, 7, num_layers=4)


def test_probing_leaves_the_caches_alone(request_, evidence):
    """Pitfalls 13, 28: keys, values and anchors are read, never written."""
    anchors = request_.anchors(0.1)
    before = jax.tree.map(np.array, (request_.context.kv, anchors.kv))
    evidence(request_, selectors.qcfuse((1, 3)))
    evidence(request_, selectors.cacheblend())
    jax.tree.map(np.testing.assert_array_equal, before, (request_.context.kv, anchors.kv))
