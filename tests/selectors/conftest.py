"""What the selector tests share: evidence and selections of one request, and everything under strict promotion."""

import jax
import pytest

from jfuse.probe import probe
from jfuse.selectors.base import budget_for, select
from jfuse.stitch import make_layout, prefix_tokens, stitch_anchors
from tests import tiny


def prefix_view(request):
    """The compact view that holds the system prefix and no anchor."""
    layout = make_layout([chunk.tokens for chunk in request.chunks], prefix_tokens(request.prefix))
    layers = range(request.model.config.num_layers)
    return stitch_anchors([], request.model.config.rope, layout, prefix=request.prefix, layers=layers)


@pytest.fixture(autouse=True)
def _strict(strict):
    """Every selector runs without silent dtype or rank promotion."""


@pytest.fixture
def request_():
    """Prefix of 9, chunks of 21, 1, 34 and 13, a query of 11 tokens."""
    return tiny.build_request()


@pytest.fixture
def evidence():
    def evidence(request, selector, **settings):
        anchors = prefix_view(request) if selector.view.tokens == "prefix" else request.view_cache(selector.view)
        return probe(request.model, request.query, anchors, request.context, selector.view, **settings)

    return evidence


_score = jax.jit(lambda score, seen, params: score(seen, params), static_argnums=0)


@pytest.fixture
def score():
    """`score(selector or score function, evidence)`, compiled."""

    def score(thing, seen, params=None):
        return _score(getattr(thing, "score", thing), seen, params)

    return score


@pytest.fixture
def choose(evidence):
    def choose(request, selector, ratio, *, scoring=slice(None), **settings):
        k = budget_for(selector, ratio, request.context.sizes(len(request.query)))
        seen = evidence(request, selector, scoring=scoring)
        return select(selector, seen, k, num_layers=request.model.config.num_layers, **settings)

    return choose
