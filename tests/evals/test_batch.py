"""A batch gives what its samples give one by one (ID-8), for any shape of selection."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.evals.batch import bucket, common_work, measure_batch
from jfuse.evals.measure import Case, Setting
from jfuse.evals.methods import ends, make_methods
from jfuse.evals.prompts import Prompt
from jfuse.fuse import fuse, fusion_work
from jfuse.pipeline import Question
from jfuse.types import Selection
from tests.evals.small import text_model

MODEL = text_model(2)

SETTING = Setting(pad_to=64, row_block=64, staircase_block=64)


def prompt(seed: int, lengths=(25, 20)) -> Prompt:
    rng = np.random.default_rng(seed)

    def ids(n):
        return rng.integers(0, 256, n).astype(np.int32)

    chunks = tuple(ids(length + seed) for length in lengths)
    return Prompt(ids(7), chunks, Question(ids(9 + seed), slice(1, 6)), ids(2 + seed), np.zeros(0, np.int32))


@pytest.fixture(scope="module")
def cases():
    return [Case(MODEL, prompt(seed), setting=SETTING) for seed in range(2)]


@pytest.mark.parametrize(
    "name", ["relaxkv:window=4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("prophetkv", "cacheblend"))]
)
def test_batch_equals_single_runs(cases, name):
    """ID-8, with sets for all layers at once, sets that shrink with depth and a restricted context."""
    method = make_methods([name], [0.3])[-1]
    together = measure_batch(cases, method)
    for case, batched in zip(cases, together, strict=True):
        alone = case.measure(method).figures
        assert {key: batched[key] for key in ("rows", "realised", "visible", "sinks")} == {
            key: alone[key] for key in ("rows", "realised", "visible", "sinks")
        }
        assert batched.keys() == alone.keys()
        for key in ("kl", "first_kl", "nll", "top1"):
            np.testing.assert_allclose(batched[key], alone[key], rtol=1e-4, atol=1e-6)


def test_one_shape_serves_sets_that_shrink_at_other_layers(cases):
    """The largest counts of two layers are equal, but each sample's set shrinks between them."""
    case = cases[0]
    recompute = np.zeros((2, 2, len(case.stale.segments)), bool)
    recompute[0, 0, 10:14], recompute[0, 1, 10:12] = True, True
    recompute[1, 0, 10:14], recompute[1, 1, 10:14] = True, True
    visible = np.ones((2, 1, recompute.shape[2]), bool)
    both = Selection(jnp.asarray(recompute), jnp.asarray(visible), jnp.zeros(2, jnp.int32))
    work = common_work(both)
    assert work.rows == (5, 4)
    for row in range(2):
        one = jax.tree.map(lambda leaf, row=row: leaf[row], both)
        ours = fuse(case.model, case.stale, one, work=work)
        for mine, other in zip(ours.kv, fuse(case.model, case.stale, one, work=fusion_work(one)).kv, strict=True):
            np.testing.assert_allclose(mine.k, other.k, atol=1e-5)
            np.testing.assert_allclose(mine.v, other.v, atol=1e-5)


def test_what_is_no_batch_is_refused(cases):
    method = make_methods(["epic"], [0.3])[-1]
    longer = copy.copy(cases[0])
    longer.prompt = longer.prompt._replace(question=Question(np.zeros(65, np.int32)))
    assert bucket(longer.prompt, SETTING) != bucket(cases[0].prompt, SETTING) == bucket(cases[1].prompt, SETTING)
    for given in ([], [cases[0], longer]):
        with pytest.raises(ValueError, match="are no batch"):
            measure_batch(given, method)
    with pytest.raises(ValueError, match="full prefill"):
        measure_batch(cases, ends()[0])
