"""The engine: queue, time-outs, cancellation, failures, ends; no model is needed for most of it."""

import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from jfuse.engine import Engine, QueueFull
from jfuse.evals.load_test import Outcome, end_to_end, load_point, poisson, replay, throughput
from jfuse.jobs import FusionJob, PrefillJob
from jfuse.pipeline import serve
from jfuse.selectors import learned
from jfuse.selectors.learned import ScoreWeights
from jfuse.stitch import make_layout, prefix_tokens
from tests.serving.conftest import SELECTORS, Wrapped

PATIENCE = 60.0  # seconds; a hang fails instead of blocking


class Step:
    """A job that logs what happens to it, and runs until it is let go or stopped."""

    def __init__(self, log, name, *, fails=None, waits=False):
        self.log, self.name, self.fails = log, name, fails  # where it raises
        self.go, self.stopped = threading.Event(), False
        if not waits:
            self.go.set()

    def begin(self):
        self.log.append(f"begin {self.name}")
        if self.fails == "begin":
            raise KeyError(self.name)

    def run(self):
        self.log.append(f"run {self.name}")
        assert self.go.wait(PATIENCE)
        if self.stopped:
            raise RuntimeError("stopped")
        if self.fails == "run":
            raise ZeroDivisionError(self.name)
        return self.name

    def stop(self):
        self.stopped = True
        self.go.set()
        if self.fails == "stop":
            raise KeyError(self.name)

    def close(self):
        self.log.append(f"close {self.name}")
        if self.fails == "close":
            raise KeyError(self.name)


def wait_for(condition):
    until = time.perf_counter() + PATIENCE
    while not condition():
        assert time.perf_counter() < until, "it never happened"
        time.sleep(1e-3)


def test_the_next_request_loads_while_one_runs_and_order_is_kept():
    log = []
    jobs = [Step(log, name, waits=True) for name in "abc"]
    with Engine() as engine:
        tickets = [engine.submit(job) for job in jobs]
        wait_for(lambda: "run a" in log and "begin b" in log)
        assert "run b" not in log and "begin c" not in log, "one runs, one loads, the others wait"
        for job in jobs:
            job.go.set()
        assert [ticket.result(PATIENCE) for ticket in tickets] == ["a", "b", "c"]
    assert [line for line in log if line.startswith("run")] == ["run a", "run b", "run c"]
    assert log.index("begin c") < log.index("run c") and all(log.count(f"close {name}") == 1 for name in "abc")
    assert all(ticket.arrived <= ticket.started <= ticket.ended for ticket in tickets)


@pytest.mark.parametrize("where", ["begin", "run"])
def test_one_failure_harms_no_other(where):
    log = []
    with Engine() as engine:
        tickets = [engine.submit(Step(log, n, fails=where if n == "b" else None)) for n in "abc"]
        assert tickets[0].result(PATIENCE) == "a" and tickets[2].result(PATIENCE) == "c"
        with pytest.raises(KeyError if where == "begin" else ZeroDivisionError):
            tickets[1].result(PATIENCE)
    assert log.count("close b") == 1


@pytest.mark.filterwarnings("ignore:A request's job could not be closed:RuntimeWarning")
def test_a_job_that_cannot_be_closed_or_stopped_harms_no_other():
    """Results are known by then; what waits is served, and what is given up has ended."""
    log, first = [], Step([], "a", waits=True)
    with Engine() as engine:
        tickets = [engine.submit(first)]
        wait_for(lambda: "run a" in first.log)
        tickets += [
            engine.submit(Step(log, n, fails=where)) for n, where in (("b", "stop"), ("c", "close"), ("d", None))
        ]
        with pytest.raises(KeyError):
            tickets[1].cancel()
        with pytest.raises(CancelledError):
            tickets[1].result(PATIENCE)
        first.go.set()
        assert [tickets[i].result(PATIENCE) for i in (0, 2, 3)] == ["a", "c", "d"]


def test_whoever_moves_up_in_the_queue_starts_loading():
    """The request that was loading next is given up; the one behind it loads while the first still runs."""
    log, first = [], Step([], "a", waits=True)
    with Engine() as engine:
        engine.submit(first)
        wait_for(lambda: "run a" in first.log)
        second, third = (engine.submit(Step(log, n)) for n in "bc")
        wait_for(lambda: "begin b" in log)
        assert "begin c" not in log
        second.cancel()
        wait_for(lambda: "begin c" in log)
        assert not third.done
        first.go.set()
        assert third.result(PATIENCE) == "c"


def test_the_queue_is_bounded():
    log, first = [], Step([], "a", waits=True)
    with Engine(capacity=2) as engine:
        engine.submit(first)
        wait_for(lambda: "run a" in first.log)
        waiting = [engine.submit(Step(log, n)) for n in "bc"]
        with pytest.raises(QueueFull, match="2 requests"):
            engine.submit(Step(log, "d"))
        first.go.set()
        assert [ticket.result(PATIENCE) for ticket in waiting] == ["b", "c"]
        assert engine.submit(Step(log, "e")).result(PATIENCE) == "e"
    with pytest.raises(ValueError, match="capacity is 0"):
        Engine(capacity=0)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_request_is_given_up_while_it_waits_loads_or_runs(how, victim):
    """The others are served as if nothing had happened."""
    log = []
    jobs = [Step(log, name, waits=True) for name in "abc"]
    with Engine() as engine:
        limits = [0.05 if how == "timeout" and i == victim else None for i in range(3)]
        tickets = [engine.submit(job, timeout=limit) for job, limit in zip(jobs, limits, strict=True)]
        wait_for(lambda: "run a" in log)
        if how == "cancel":
            tickets[victim].cancel()
        with pytest.raises(CancelledError if how == "cancel" else TimeoutError):
            tickets[victim].result(PATIENCE)
        for job in jobs:
            job.go.set()
        others = [ticket.result(PATIENCE) for i, ticket in enumerate(tickets) if i != victim]
        assert others == [name for i, name in enumerate("abc") if i != victim]
    name = "abc"[victim]
    assert (f"run {name}" in log) == (victim == 0) and log.count(f"close {name}") == 1


def test_a_time_out_counts_waiting_and_a_request_in_time_keeps_its_result():
    with Engine() as engine:
        assert engine.submit(Step([], "a"), timeout=PATIENCE).result() == "a"
        with pytest.raises(ValueError, match="timeout is 0"):
            engine.submit(Step([], "a"), timeout=0)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_finishes_what_waits_or_gives_it_up(drain):
    log = []
    jobs = [Step(log, name, waits=True) for name in "abc"]
    engine = Engine()
    tickets = [engine.submit(job) for job in jobs]
    wait_for(lambda: "run a" in log)
    if drain:
        threading.Timer(0.05, lambda: [job.go.set() for job in jobs]).start()
    engine.close(drain=drain)
    assert all(ticket.done for ticket in tickets)
    errors = [ticket.error() for ticket in tickets]
    assert errors == [None] * 3 if drain else all(isinstance(error, CancelledError) for error in errors)
    assert all(log.count(f"close {name}") == 1 for name in "abc")
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(Step(log, "d"))
    engine.close()


def test_an_error_of_the_caller_ends_the_engine():
    job = Step([], "a", waits=True)
    with pytest.raises(ZeroDivisionError), Engine() as engine:
        ticket = engine.submit(job)
        raise ZeroDivisionError
    assert isinstance(ticket.error(), CancelledError)


def test_a_load_test_counts_waiting_and_refusals():
    """Six arrive at once where two may wait; nothing is served before the last was refused."""
    jobs = [Step([], "s", waits=True) for _ in range(6)]

    class Holding(Engine):
        offered = 0

        def submit(self, job, **options):
            try:
                return super().submit(job, **options)
            finally:
                self.offered += 1
                if self.offered == 6:
                    threading.Timer(0.02, lambda: [job.go.set() for job in jobs]).start()

    with Holding(capacity=2) as engine:
        outcomes = replay(engine, jobs, [0.0] * 6)
    point = load_point(outcomes)
    assert point["requests"] == 6 and point["served"] + point["failed"] == 6 and point["failed"] in (3, 4)
    assert all("waiting already" in outcome.error for outcome in outcomes if outcome.error)
    assert point["p95"] >= point["p50"] >= 0.02 and "p99" not in point
    with pytest.raises(ValueError, match="sorted"):
        replay(engine, jobs[:2], [1.0, 0.5])


def test_percentiles_and_rates_of_a_run():
    outcomes = [Outcome(float(i), i + 0.5, i + 1.0) for i in range(10)] + [Outcome(10.0, None, 10.5, "late")]
    point = load_point(outcomes)
    assert point["served"] == 10 and point["failed"] == 1 and point["achieved"] == pytest.approx(1.0)
    assert point["p50"] == point["p95"] == point["mean"] == 1.0
    assert np.isnan(outcomes[-1].ttft) and np.isnan(load_point(outcomes[-1:])["p50"])
    assert "p99" in load_point([Outcome(0.0, 0.0, 1.0)] * 100)


def test_poisson_arrivals_are_seeded_and_have_their_rate():
    times = poisson(5, 4000, seed=1)
    assert times == poisson(5, 4000, seed=1) != poisson(5, 4000, seed=2)
    assert times == sorted(times) and times[-1] / 4000 == pytest.approx(1 / 5, rel=0.05)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    with pytest.raises(ValueError, match="rate is 0"):
        poisson(0, 3)


def fused(kit, name, source=None, **options):
    make = source or (lambda: kit.stored())
    return FusionJob(kit.model, make, kit.question, SELECTORS[name], kit.config(), prefix=kit.prefix, **options)


def test_a_learned_selector_brings_its_weights_into_the_engine(kit):
    selector = learned((1, 3))
    weights = ScoreWeights(np.ones(2, np.float32), np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4)))

    def chosen(params):
        finish = lambda served: np.asarray(served.selection.recompute)  # noqa: E731
        options = {"prefix": kit.prefix, "params": params, "finish": finish}
        with Engine() as engine:
            job = FusionJob(kit.model, kit.stored, kit.question, selector, kit.config(), **options)
            return engine.submit(job).result()

    direct = serve(
        kit.model, kit.stored(), kit.question, selector, kit.config(), prefix=kit.prefix, params=weights
    ).selection.recompute
    np.testing.assert_array_equal(chosen(weights), direct)
    assert not np.array_equal(chosen(None), direct)


def prefilled(kit):
    pieces = [chunk.tokens for chunk in kit.chunks]
    return PrefillJob(kit.model, make_layout(pieces, prefix_tokens(kit.prefix), pad_to=128), kit.question)


def test_requests_through_the_engine_equal_direct_ones(kit):
    """Several methods in turn, loading overlapped: the tokens and logits of serving each alone."""
    alone = {name: np.asarray(kit.serve(kit.stored(), name).first) for name in ("qcfuse", "prophetkv")}
    with Engine() as engine:
        names = ["qcfuse", "prophetkv"] * 4
        tickets = [engine.submit(fused(kit, n, finish=lambda served: np.asarray(served.first))) for n in names]
        for name, ticket in zip(names, tickets, strict=True):
            assert ticket.result().tobytes() == alone[name].tobytes()


def test_a_fused_request_is_stopped_between_layers_and_the_next_is_served(kit):
    kit.serve(kit.stored())
    reached = threading.Event()

    def before(i, l):
        if l == 2:
            reached.set()
            time.sleep(0.05)

    with Engine() as engine:
        slow = engine.submit(fused(kit, "qcfuse", lambda: Wrapped(kit.stored(), before)))
        good = engine.submit(fused(kit, "qcfuse"))
        assert reached.wait(PATIENCE)
        slow.cancel()
        assert isinstance(slow.error(), CancelledError) and isinstance(good.result(), int)


def test_bursts_laid_end_to_end_keep_their_waiting_times():
    """Two queues of two, drained in 3 and 2 seconds: 4 requests in 5 seconds; a refused request moves no clock."""
    runs = [
        [Outcome(0.0, 0.0, 1.0), Outcome(0.0, 1.0, 3.0), Outcome(0.0, None, None, "QueueFull")],
        [Outcome(0.0, 0.0, 1.0), Outcome(0.0, 1.0, 2.0)],
    ]
    joined = end_to_end(runs)
    assert [outcome.ended for outcome in joined] == [1.0, 3.0, None, 4.0, 5.0]
    assert [outcome.ttft for outcome in joined if not outcome.error] == [1.0, 3.0, 1.0, 2.0]
    point = load_point(joined)
    assert (point["served"], point["failed"], point["achieved"]) == (4, 1, 0.8)


def test_a_load_test_on_a_tiny_model(kit):
    """One row per method and load, in the order they ran; nothing compiles while it is timed."""
    methods = {"full prefill": lambda i: prefilled(kit), "qcfuse": lambda i: fused(kit, "qcfuse")}
    rows = throughput(methods, loads=(0.5,), count=3, single=2, burst=2)
    assert [(row["load"], row["method"]) for row in rows] == [
        (load, name) for load in ("single", "saturation", 0.5) for name in methods
    ]
    assert all(row["failed"] == 0 and row["p50"] > 0 and row["achieved"] > 0 for row in rows)
    assert [row["offered"] for row in rows] == [None] * 4 + [rows[0]["achieved"] / 2] * 2


def test_load_tests_that_cannot_be_are_refused():
    methods = {"full prefill": lambda i: Step([], "a"), "qcfuse": lambda i: Step([], "b", fails="run")}
    with pytest.raises(ValueError, match="loads holds 0"):
        throughput(methods, loads=(0,))
    with pytest.raises(ValueError, match="burst is 0"):
        throughput(methods, loads=(1,), burst=0)
    with pytest.raises(ValueError, match="'reuse' is none of the methods full prefill, qcfuse"):
        throughput(methods, loads=(1,), baseline="reuse")
    with pytest.raises(RuntimeError, match="qcfuse was served; the first ended with ZeroDivisionError: b"):
        methods["qcfuse"] = FailsLater()
        throughput(methods, loads=(1,), count=1, single=1, warm_up=1)


class FailsLater:
    """Jobs of which only the first, which warms up, is served."""

    def __init__(self):
        self.made = 0

    def __call__(self, i):
        self.made += 1
        return Step([], "b", fails="run" if self.made > 1 else None)
