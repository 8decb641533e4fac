"""The load test: time to first token against achieved requests per second (QCFuse section 4.5, Fig. 14)."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jfuse.chunks import encode_chunk
from jfuse.config import FusionConfig
from jfuse.engine import Engine, Job, QueueFull, Ticket
from jfuse.evals.requests import TextRequest
from jfuse.host_tier import HostTier
from jfuse.jobs import FusionJob, PrefillJob
from jfuse.models.decoder import Model
from jfuse.plan import FULL
from jfuse.report import Compilations
from jfuse.selectors.base import Selector
from jfuse.sources import StoredChunks
from jfuse.stitch import make_layout
from jfuse.store import ChunkStore

Percentiles = (50, 90, 95)


class Outcome(NamedTuple):
    """What became of one request of a load test, in seconds from the test's start."""

    arrived: float
    started: float | None  # None: it never ran
    ended: float | None
    error: str = ""

    @property
    def ttft(self) -> float:
        """From arrival to the first token, waiting included; NaN for a request that failed."""
        return float("nan") if self.error or self.ended is None else self.ended - self.arrived

    def later(self, seconds: float) -> "Outcome":
        """The same in a test that started so much earlier."""
        started, ended = (None if at is None else at + seconds for at in (self.started, self.ended))
        return Outcome(self.arrived + seconds, started, ended, self.error)


def poisson(rate: float | int, count: int, *, seed: int = 0) -> list[float]:
    """Arrival times of `count` requests at `rate` a second on average.

    Raises:
        ValueError: a rate that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"rate is {rate}; use requests per second above 0.")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()


def replay(
    engine: Engine, jobs: Sequence[Job], arrivals: Sequence[float | int], *, timeout: float | int | None = None
) -> list[Outcome]:
    """Submits each job at its arrival time, a trace's or `poisson`'s, and waits for all of them.

    Raises:
        ValueError: not one arrival for each job, or arrivals that are not sorted.
    """
    if len(jobs) != len(arrivals) or list(arrivals) != sorted(arrivals):
        raise ValueError(f"There are {len(jobs)} jobs and {len(arrivals)} arrivals; give sorted arrivals, one a job.")
    start = time.perf_counter()
    tickets: list[Ticket | Outcome] = []
    for job, at in zip(jobs, arrivals, strict=True):
        time.sleep(max(0.0, start + at - time.perf_counter()))
        try:
            tickets.append(engine.submit(job, timeout=timeout))
        except QueueFull as full:
            tickets.append(Outcome(time.perf_counter() - start, None, None, str(full)))
    return [ticket if isinstance(ticket, Outcome) else _outcome(ticket, start) for ticket in tickets]


def _outcome(ticket: Ticket, start: float) -> Outcome:
    error = ticket.error()
    started = None if ticket.started is None else ticket.started - start
    ended = None if ticket.ended is None else ticket.ended - start
    return Outcome(ticket.arrived - start, started, ended, "" if error is None else f"{type(error).__name__}: {error}")


def load_point(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Achieved rate and percentiles of time to first token, in seconds, of one run; p99 from 100 requests on."""
    served = [outcome for outcome in outcomes if not outcome.error and outcome.ended is not None]
    ttft = [outcome.ttft for outcome in served]
    ends = [outcome.ended for outcome in served if outcome.ended is not None]
    span = max(ends) - min(outcome.arrived for outcome in outcomes) if ends else 0.0
    levels = (*Percentiles, *((99,) if len(ttft) >= 100 else ()))
    return {
        "requests": len(outcomes),
        "served": len(served),
        "failed": len(outcomes) - len(served),
        "achieved": len(served) / span if span > 0 else 0.0,
        "mean": float(np.mean(ttft)) if ttft else float("nan"),
        **{f"p{level}": float(np.percentile(ttft, level)) if ttft else float("nan") for level in levels},
    }


def end_to_end(runs: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Several runs as one, in which each begins when the one before has ended. Times to first token do not change."""
    joined: list[Outcome] = []
    start = 0.0
    for run in runs:
        joined += [outcome.later(start) for outcome in run]
        start = max([start, *(outcome.ended for outcome in joined if outcome.ended is not None)])
    return joined


def throughput(
    methods: Mapping[str, Callable[[int], Job]],
    *,
    loads: Sequence[float | int],
    count: int = 20,
    single: int = 5,
    burst: int = 5,
    warm_up: int = 2,
    baseline: str = FULL,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Every method alone, saturated, and at every offered rate; the same arrivals and requests for all of them.

    Saturation is the rate at which a full queue drains. It gets `burst` requests at a time, and methods take turns,
    so that a machine whose speed moves treats all of them alike. Offered rates are shares of what the baseline serves
    alone, so that they mean the same on any machine.

    Args:
        methods: from a method's name to a function that makes its job for request i.
        loads: offered rates, as shares of one request per `baseline` request's time alone; arrivals are Poisson.
        count: requests per point.
        single: requests of each method that are timed alone.
        burst: requests that arrive at once where the queue is to be full.
        warm_up: requests of each method that are run first and discarded; they compile.
        tick: called after every run, for a progress bar.

    Returns:
        One row per method and load: `load` ("single", "saturation" or the share), `method`, `offered` requests per
        second (None where there is no rate), and the fields of `load_point`.

    Raises:
        ValueError: a load that is not positive, a burst below 1, or a baseline that is not among the methods.
        RuntimeError: something was compiled while requests were timed, or no request of a run was served.
    """
    for load in loads:
        if not load > 0:
            raise ValueError(f"loads holds {load}; use shares of the sustained rate above 0.")
    if burst < 1:
        raise ValueError(f"burst is {burst}; use a number of requests >= 1.")
    if baseline not in methods:
        raise ValueError(f"The baseline {baseline!r} is none of the methods {', '.join(methods)}.")
    rows: list[dict[str, Any]] = []

    def record(
        load: str | float | int, name: str, rate: float | None, outcomes: Sequence[Outcome], **more: Any
    ) -> None:
        if all(outcome.error for outcome in outcomes):
            raise RuntimeError(f"No request by {name} was served; the first ended with {outcomes[0].error}")
        rows.append({"load": load, "method": name, "offered": rate, **load_point(outcomes), **more})
        tick()

    with Engine(capacity=max(count, single)) as engine:
        engine.warm_up(make(i) for make in methods.values() for i in range(warm_up))
        with Compilations() as compiled:
            turns = [
                {name: replay(engine, [make(i)], [0.0])[0] for name, make in methods.items()} for i in range(single)
            ]
            for name in methods:
                alone = [turn[name] for turn in turns]
                record("single", name, None, alone, achieved=1 / float(np.median([one.ttft for one in alone])))
            sustained = next(row["achieved"] for row in rows if row["method"] == baseline)
            bursts = [range(count)[at : at + burst] for at in range(0, count, burst)]
            drained = [
                {name: replay(engine, [make(i) for i in part], [0.0] * len(part)) for name, make in methods.items()}
                for part in bursts
            ]
            for name in methods:
                record("saturation", name, None, end_to_end([turn[name] for turn in drained]))
            for load in loads:
                rate = load * sustained
                arrivals = poisson(rate, count, seed=seed)
                for name, make in methods.items():
                    record(load, name, rate, replay(engine, [make(i) for i in range(count)], arrivals))
    if compiled.count:
        raise RuntimeError(f"{compiled.count} functions were compiled while requests were timed; raise warm_up.")
    return rows


def hosted_methods(
    model: Model,
    request: TextRequest,
    selectors: Mapping[str, Selector],
    *,
    ratio: float | int | None = None,
    config: FusionConfig = FusionConfig(),
) -> dict[str, Callable[[int], Job]]:
    """Full prefill and fusion by each selector over chunks that lie in host memory, as `throughput` wants them."""
    config = dataclasses.replace(config, ratio=ratio)
    store = ChunkStore.open("memory://", model)
    ids = [store.put(encode_chunk(model, piece)) for piece in request.pieces]
    host = HostTier(store)
    host.load(ids)

    def turned(items: list[Any], i: int) -> list[Any]:
        at = i % len(items)
        return items[at:] + items[:at]

    def prefilled(i: int) -> Job:
        layout = make_layout(turned(request.pieces, i), pad_to=config.pad_to)
        return PrefillJob(model, layout, request.question, implementation=config.implementation)

    def fused(selector: Selector, i: int) -> Job:
        return FusionJob(
            model, lambda: StoredChunks(store, turned(ids, i), host=host), request.question, selector, config
        )

    return {FULL: prefilled} | {name: partial(fused, selector) for name, selector in selectors.items()}
