"""The demo's own piece of logic: passages that a store cannot keep are served all the same."""

import jax
import numpy as np
import pytest

import jfuse as jf
from jfuse.demo import prepare
from jfuse.evals.prompts import Prompt
from jfuse.models.tiny import tiny_model
from jfuse.pipeline import Question, serve


@pytest.mark.filterwarnings("ignore:memory.*did not take a chunk:RuntimeWarning")
def test_a_store_that_keeps_nothing_serves_from_memory():
    model = tiny_model(jax.random.key(3), num_layers=2)
    chunks = tuple(np.arange(10, dtype=np.int32) + i for i in range(3))
    none = np.zeros(0, np.int32)
    prompt = Prompt(none, chunks, Question(np.arange(5, dtype=np.int32)), np.arange(2, dtype=np.int32), none)
    ticks = []
    sources = [
        prepare(model, jf.ChunkStore.open("memory://", model, max_bytes=cap), prompt, lambda: ticks.append(1))
        for cap in (None, 1)
    ]
    assert [len(source.computed) for source in sources] == [0, 3]
    assert len(ticks) == 6
    kept, lost = (serve(model, source, prompt.question, jf.selectors.reuse()).first for source in sources)
    np.testing.assert_array_equal(kept, lost)
