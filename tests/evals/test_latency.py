"""What is timed: finished work, nothing compiled, warm-up discarded and counted (B-01 to B-04, pitfall 52)."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jfuse.evals import latency, measure
from jfuse.evals.latency import interleave, summary
from jfuse.evals.manifest import about
from jfuse.evals.measure import MOST_WARM_UPS, Case
from jfuse.evals.methods import make_methods
from jfuse.evals.settings import Settings


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the timed work advances."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock.now)
    return clock


def test_times_are_those_of_the_finished_work(clock):
    """B-01: a variant's own wait is inside its time. B-02: warm-up rounds are run and left out. Orders rotate."""
    order = []

    def variant(name, first, later):
        def run():
            clock.now += first if order.count(name) == 0 else later  # the first call is slow, as after compilation
            order.append(name)

        return run

    seconds = interleave({"a": variant("a", 9.0, 1.0), "b": variant("b", 9.0, 2.0)}, repeats=3, warm_up=1)
    assert seconds == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert summary(seconds["b"])["median"] == 2.0 and summary(seconds["b"])["n"] == 3


def test_time_with_compilation_is_refused():
    """B-02: it is no latency."""
    lengths = iter(range(2, 9))
    compiles = jax.jit(lambda x: x + 1)
    with pytest.raises(RuntimeError, match="'new' compiled . functions? while it was timed; raise warm_up"):
        interleave({"new": lambda: compiles(jnp.zeros(next(lengths))).block_until_ready()}, repeats=2, warm_up=1)


@pytest.mark.parametrize("compiling", [0, 2, MOST_WARM_UPS + 1])
def test_request_is_timed_once_nothing_compiles(monkeypatch, compiling):
    """B-02, B-03: the same request goes first untimed, and the count is kept. B-04: it ends with the first token's
    logits, so that a token without text ends it too."""
    calls, asked = [], []
    compiles = jax.jit(lambda x: x * 2)

    def serve(_, source, question, *__, **options):
        calls.append(len(calls))
        asked.append((source, question, options["prefix"]))
        if len(calls) <= compiling:
            compiles(jnp.zeros((len(calls) + compiling * 7, 3)))
        return SimpleNamespace(stages={"select": 0.25, "fuse": float(len(calls)), "query": 0.5})

    monkeypatch.setattr(measure, "serve", serve)
    monkeypatch.setattr(measure, "ResidentChunks", tuple)
    monkeypatch.setattr(measure, "generate", pytest.fail)
    case = Case.__new__(Case)
    case.model, case._chunks, case._prefix = None, ["chunk"], "prefix"
    case.prompt, case.setting = SimpleNamespace(question="question"), measure.DEFAULT
    method = make_methods(["epic"], [0.3])[-1]
    if compiling > MOST_WARM_UPS:
        with pytest.raises(RuntimeError, match=r"epic@0.3 still compiles after 3 runs"):
            case._time(method)
        return
    timed = case._time(method)
    last = max(2, compiling + 1)
    assert calls == list(range(last)) and timed["discarded"] == last - 1
    assert set(asked) == {(("chunk",), "question", "prefix")}, "warm: every run is the one that is timed"
    assert timed["ttft"] == 0.75 + last and timed["fuse_s"] == last


def test_manifest_names_the_state_of_the_cache_where_there_are_times():
    """B-03."""
    assert about(Settings(ttft=True)).keys() - about(Settings()).keys() == {"ttft"}
