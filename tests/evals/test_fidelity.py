"""Label-free measures against their definitions, written plainly."""

import numpy as np
import pytest

from jfuse.evals.attention import attention_recovery, layer_overlap, mass_curve, question_mass
from jfuse.evals.fidelity import answer_logits, answer_nll, kl_divergence
from jfuse.evals.recall import recall_at
from jfuse.fuse import cache_error
from jfuse.pipeline import Question


def plain_softmax(row):
    wide = np.exp(np.asarray(row, np.float64) - np.max(row))
    return wide / wide.sum()


def test_kl_and_nll_are_the_definitions():
    rng = np.random.default_rng(0)
    full, other, reference = rng.normal(size=(5, 7)), rng.normal(size=(5, 7)), np.array([1, 0, 6, 3, 3])
    p, q = np.stack([plain_softmax(r) for r in full]), np.stack([plain_softmax(r) for r in other])
    np.testing.assert_allclose(kl_divergence(full, other), (p * np.log(p / q)).sum(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(answer_nll(other, reference), -np.log(q[np.arange(5), reference]).mean(), rtol=1e-5)
    np.testing.assert_allclose(kl_divergence(full, full), 0, atol=1e-6)


def test_teacher_forced_logits_are_those_of_one_pass(make_request):
    """The answer's tokens after the query, over the full cache: the reference's own dense pass."""
    request, answer = make_request(), np.array([5, 99, 3], np.int32)
    ids = np.concatenate([request.ids, answer[:-1]])
    expected = request.reference.run(ids).logits[len(request.ids) - 1 :]
    found = answer_logits(request.model, request.full(), request.query, answer)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_cache_error_is_relative_per_layer_and_counts_context_only(make_request):
    request = make_request()
    full, real = request.full(), np.asarray(request.context.segments) >= 0
    found = np.asarray(cache_error(request.context, full))
    for l, (ours, theirs) in enumerate(zip(request.context.kv, full.kv, strict=True)):
        pairs = [(np.asarray(a)[real], np.asarray(b)[real]) for a, b in zip(ours, theirs, strict=True)]
        difference = sum(((a - b) ** 2).sum() for a, b in pairs)
        np.testing.assert_allclose(found[l], np.sqrt(difference / sum((b**2).sum() for _, b in pairs)), rtol=1e-4)
    assert found[0] < 1e-5 < 1e-3 < found[1]


# Question attention.


def test_question_mass_is_the_attention_of_a_dense_pass(make_request):
    """Mean over heads and question rows of the softmax over prefix, context and query."""
    request, scoring = make_request(), slice(2, 9)
    found = question_mass(request.model, request.full(), Question(request.query, scoring))
    run = request.reference.run(request.ids)
    c, last = request.model.config, request.end
    group = c.num_heads // c.num_kv_heads
    expected = np.zeros_like(found, np.float64)
    for l in range(c.num_layers):
        for row in range(last + scoring.start, last + scoring.stop):
            for head in range(c.num_heads):
                scores = run.k[l, : row + 1, head // group] @ run.q[l, row, head] / np.sqrt(c.head_size)
                expected[l] += plain_softmax(scores)[request.num_prefix : last]
    expected /= (scoring.stop - scoring.start) * c.num_heads
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_attention_recovery_is_one_less_total_variation(make_request):
    request = make_request()
    question = Question(request.query)
    full, stale = (question_mass(request.model, cache, question) for cache in (request.full(), request.context))
    np.testing.assert_allclose(attention_recovery(full, full), 1)
    found = attention_recovery(full, stale)
    p, q = full / full.sum(1, keepdims=True), stale / stale.sum(1, keepdims=True)
    np.testing.assert_allclose(found, 1 - np.abs(p - q).sum(1) / 2, rtol=1e-6)
    assert found[0] == pytest.approx(1, abs=1e-5) and (found[1:] < 0.9999).all()  # layer 0 is exact anyway


def test_attention_recovery_refuses_two_requests_and_empty_layers():
    with pytest.raises(ValueError, match=r"shapes \(1, 2\) and \(1, 3\)"):
        attention_recovery(np.ones((1, 2)), np.ones((1, 3)))
    with pytest.raises(ValueError, match="pays no attention"):
        attention_recovery(np.ones((1, 2)), np.zeros((1, 2)))


def test_mass_curve_is_concave_and_ends_at_one():
    """Pitfall 48."""
    mass = np.random.default_rng(1).exponential(size=137)
    shares = np.linspace(0, 1, 55)
    curve = mass_curve(mass, shares)
    assert curve[0] == 0 and curve[-1] == pytest.approx(1)
    assert (np.diff(curve) > 0).all() and (np.diff(curve, 2) < 1e-12).all()
    ranked = sorted(mass, reverse=True)
    for count in (1, 10, 137):
        assert mass_curve(mass, np.array([count / 137]))[0] == pytest.approx(sum(ranked[:count]) / sum(ranked))


def test_overlap_of_a_layer_with_itself_is_one():
    """Pitfall 48."""
    layer = np.random.default_rng(2).exponential(size=50)
    np.testing.assert_array_equal(layer_overlap(np.stack([layer, layer, layer])), 1)


def test_layer_overlap_counts_common_positions():
    mass = np.zeros((2, 20))
    mass[0, [3, 7]], mass[1, [7, 9]] = (5, 4), (6, 1)  # sums: 7 has 10, 3 has 5, 9 has 1
    np.testing.assert_array_equal(layer_overlap(mass), [1, 0.5])
    with pytest.raises(ValueError, match="use a longer context"):
        layer_overlap(np.ones((2, 9)))


def test_ties_go_to_the_lower_position():
    np.testing.assert_array_equal(layer_overlap(np.stack([np.ones(20), np.arange(20.0)])), [0, 1])


# Recall (pitfall 47).


def test_recall_takes_a_tenth_rounded_down_and_everything_finds_everything():
    scores = np.arange(29.0)
    assert recall_at(scores, np.array([28, 27, 26])) == pytest.approx(2 / 3)  # floor(2.9) = 2 positions
    assert recall_at(scores, np.array([0, 28]), share=1.0) == 1
    assert recall_at(np.zeros(20), np.array([0, 1, 2])) == pytest.approx(2 / 3)  # ties: the first two
