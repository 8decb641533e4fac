"""Recall of labelled answers, by layer (the profile) and by method, against plain loops over whole requests."""

import numpy as np
import pytest

from jfuse.evals.measure import Case, Setting
from jfuse.evals.methods import Method, ends
from jfuse.evals.profiling import profile_layers
from jfuse.evals.prompts import Prompt
from jfuse.fingerprint import Fingerprint
from jfuse.pipeline import Question
from jfuse.profile import LayerProfile, load_profile, save_profile
from jfuse.selectors import by_name
from tests import tiny
from tests.selectors import plain

SCORING = slice(2, 8)
LONG = (61, 1, 34, 13)  # the first chunk keeps more anchors than its four sinks


def prompt_of(request, evidence=()):
    """A request as a sample in tokens, labelled at these context positions."""
    prefix = np.zeros(0, np.int32) if request.prefix is None else request.prefix.tokens[: request.num_prefix]
    return Prompt(
        np.asarray(prefix),
        tuple(np.asarray(chunk.tokens) for chunk in request.chunks),
        Question(request.query, SCORING),
        np.array([3, 5], np.int32),
        np.asarray(evidence, np.int32),
    )


def third(request, seed):
    """A third of the context positions, ascending."""
    n = request.num_context
    return np.sort(np.random.default_rng(seed).choice(n, n // 3, replace=False))


def prefix_and_anchors(request):
    """Per layer the prefix and of each chunk ceil(C / 10) tokens: its first four, then the best by KVzip's score."""
    seen = [set(range(request.num_prefix)) for _ in range(request.model.config.num_layers)]
    start = request.num_prefix
    for chunk in request.chunks:
        tokens = np.asarray(chunk.tokens)
        for own, scores in zip(seen, request.reference.anchor_scores(tokens, [1, 2]), strict=True):
            first = [np.inf if i < 4 else score for i, score in enumerate(scores)]
            own |= {start + i for i in plain.best(first, -(-len(tokens) // 10))}
        start += len(tokens)
    return seen


def test_profile_is_the_recall_of_each_layers_question_attention():
    """Pitfall 47: floor(0.1 N) positions, N of the context alone; no labels and N < 10 are dropped and counted."""
    requests = [
        tiny.build_request(lengths=LONG),
        tiny.build_request(prefix=0, seed=3),  # a prompt need not have a prefix
        tiny.build_request(lengths=(4, 6)),  # ten tokens are just enough
    ]
    labels = [third(request, seed) for seed, request in enumerate(requests)]
    kept = [prompt_of(*both) for both in zip(requests, labels, strict=True)]
    dropped = [prompt_of(requests[0]), prompt_of(tiny.build_request(lengths=(4, 5)), [0])]
    model = requests[0].model
    found = profile_layers(model, [dropped[0], *kept, dropped[1]], num_top=3, data="three prompts")

    scores = [plain.question_attention(r, prefix_and_anchors(r), rows=range(2, 8)) for r in requests]

    def mean_recall(layers):
        return np.mean([plain.recall(s[layers].sum(0), e) for s, e in zip(scores, labels, strict=True)])

    recall = [mean_recall([l]) for l in range(4)]
    best = sorted(range(4), key=lambda l: -recall[l])
    assert len({round(share, 9) for share in recall}) == 4, "the order of layers is clear"
    assert found.recall == pytest.approx(recall)
    assert found.recall_of_top == pytest.approx([mean_recall(best[:k]) for k in (1, 2, 3)])
    assert found.recall_of_top[2] != pytest.approx(np.mean([recall[l] for l in best[:3]])), "a sum is not a mean"
    assert found.critical_layers(2) == tuple(best[:2])
    assert (found.num_samples, found.num_dropped, found.data) == (3, 2, "three prompts")
    assert found.model == Fingerprint.of(model).model_digest
    with pytest.raises(ValueError, match="No sample has a labelled answer token and 10 context tokens"):
        profile_layers(model, dropped)


def test_a_profile_of_another_model_is_refused(tmp_path):
    """S-10: the same family and sizes, other weights; both models are named."""
    model = tiny.build_model()
    own, other = (Fingerprint.of(m).model_digest for m in (model, model.replace(weights_id="other weights")))
    profile = LayerProfile(own, (0.1, 0.4, 0.2, 0.3), (0.4, 0.5), 7, 1, "made up")
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(model, tmp_path / "profile.json") == profile
    with pytest.raises(ValueError, match=f"{own}.*{other}"):
        load_profile(model.replace(weights_id="other weights"), tmp_path / "profile.json")


def test_recall_of_a_method_is_that_of_its_summed_scores():
    """Pitfall 47: of the context, without the prefix; none where a method does not rank or nothing is labelled."""
    request = tiny.build_request(lengths=LONG)
    evidence, selector = third(request, 5), by_name("prophetkv_qcfuse")
    case = Case(request.model, prompt_of(request, evidence), setting=Setting(128, 64, 64))
    scores = plain.question_attention(request, plain.everything_before(request), rows=range(2, 8)).sum(0)
    expected = plain.recall(scores, evidence)
    assert 0 < expected < 1
    assert case.measure(Method("prophetkv_qcfuse", 0.3, selector)).figures["recall"] == pytest.approx(expected)
    assert [case.measure(method).figures["recall"] for method in ends()] == [None, None]
    few = tiny.build_request(lengths=(4, 5))
    for prompt in (prompt_of(request), prompt_of(few, [0])):
        assert Case(request.model, prompt, setting=Setting(128, 64, 64)).recall(selector) is None
