"""The load test: time to first token against achieved requests per second (QCFuse section 4.5, Fig. 14)."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jfuse.engine import Engine, Job, QueueFull, Ticket
from jfuse.report import Compilations

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


def throughput(
    methods: Mapping[str, Callable[[int], Job]],
    *,
    rates: Sequence[float | int],
    count: int = 20,
    single: int = 3,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Every method alone, saturated, and at every rate; the same arrivals and requests for all of them.

    Saturation is the rate at which a full queue drains: all requests arrive at once.

    Args:
        methods: from a method's name to a function that makes its job for request i.
        rates: requests offered per second, Poisson.
        count: requests per point.
        single: requests that are timed alone, one after another.
        tick: called after every run, for a progress bar.

    Returns:
        One row per method and load: `method`, `load` ("single", "saturation" or the offered rate), and the fields of
        `load_point`.

    Raises:
        RuntimeError: something was compiled while requests were timed.
    """
    rows: list[dict[str, Any]] = []
    with Engine(capacity=max(count, single)) as engine:
        engine.warm_up(make(i) for make in methods.values() for i in range(count))
        with Compilations() as compiled:
            loads: list[tuple[Any, list[float]]] = [("saturation", [0.0] * count)]
            loads += [(rate, poisson(rate, count, seed=seed)) for rate in rates]
            for name, make in methods.items():
                alone = [replay(engine, [make(i)], [0.0])[0] for i in range(single)]
                point = load_point(alone)
                rows.append({"method": name, "load": "single", **point, "achieved": 1 / point["p50"]})
                tick()
            for load, arrivals in loads:
                for name, make in methods.items():
                    outcomes = replay(engine, [make(i) for i in range(count)], arrivals)
                    rows.append({"method": name, "load": load, **load_point(outcomes)})
                    tick()
    if compiled.count:
        raise RuntimeError(f"{compiled.count} functions were compiled while requests were timed; raise count.")
    return rows
