"""A small engine for load tests: jobs arrive, wait in a bounded queue, and run one at a time on the device.

While one computes, the next one loads. It serves no network and batches nothing; it measures what a method does to time
to first token under load. Shapes are the pipeline's buckets, so that after `warm_up` no request compiles.
"""

import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, runtime_checkable


class QueueFull(RuntimeError):
    """The engine has as many waiting requests as it may; try again later."""


@runtime_checkable
class Job(Protocol):
    """What the engine runs: `begin`, `run` and `close`, once each and in this order; `stop` at any time."""

    def begin(self) -> None:
        """Starts loading, and returns at once. Called while another job runs."""
        ...

    def run(self) -> Any:
        """Computes, and returns when the first token is on the host."""
        ...

    def stop(self) -> None:
        """Makes `run` give up soon, from another thread. A job that cannot goes on to its end."""
        ...

    def close(self) -> None:
        """Lets go of everything. Called whatever happened."""
        ...


class Ticket:
    """A submitted job. Times are `time.perf_counter` seconds."""

    def __init__(self, job: Job, engine: "Engine", timeout: float | int | None):
        self.job = job
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.ended: float | None = None
        self._engine = engine
        self._future: Future[Any] = Future()
        self._reason: BaseException | None = None  # why it was given up
        self._lock = threading.Lock()  # of the job's beginning and end
        self._begun = False
        self._failed: BaseException | None = None
        self._timer = threading.Timer(timeout, self._give_up, [_late(timeout)]) if timeout is not None else None
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.name = "jfuse-timeout"
            self._timer.start()

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | int | None = None) -> Any:
        """What the job returned, waiting for it.

        Raises:
            TimeoutError: its own time-out, or the one given here, is over.
            CancelledError: it was cancelled.
            BaseException: what the job raised.
        """
        return self._future.result(timeout)

    def error(self) -> BaseException | None:
        """What went wrong, waiting for the end."""
        return self._future.exception()

    def cancel(self) -> None:
        """Gives the request up: at once if it waits, at its next layer if it runs."""
        self._give_up(CancelledError("The request was cancelled."))

    def _give_up(self, reason: BaseException) -> None:
        with self._engine._changed:
            if self.done:
                return
            self._reason = self._reason or reason
            waiting = self._engine._leave_queue(self)
        try:
            self.job.stop()
        finally:
            if waiting:
                self._end(error=self._reason)
                self._close()
                self._engine._begin_next()

    def _begin(self) -> None:
        """Begins the job, unless that was done: by whoever finds it first in the queue, at the latest to run it."""
        with self._lock:
            if not self._begun:
                self._begun = True
                try:
                    self.job.begin()
                except BaseException as error:  # the requester's; raised when its turn comes
                    self._failed = error

    def _run(self) -> Any:
        if self._failed is not None:
            raise self._failed
        return self.job.run()

    def _close(self) -> None:
        """Lets the job go. What fails here concerns nobody: the result is known already."""
        with self._lock:
            self._begun = True
            try:
                self.job.close()
            except Exception as error:
                warnings.warn(f"A request's job could not be closed: {error!r}", RuntimeWarning, stacklevel=2)

    def _end(self, result: Any = None, error: BaseException | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.ended = time.perf_counter()
        error = self._reason or error
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)


def _late(timeout: float | int | None) -> TimeoutError:
    return TimeoutError(f"The request was not served within {timeout} s.")


class Engine:
    """Runs submitted jobs in order of arrival, one at a time, in its own thread.

    One job's failure, time-out or cancellation touches no other. As a context manager it finishes what is queued.
    """

    def __init__(self, *, capacity: int = 64):
        """Starts an engine that lets at most `capacity` requests wait.

        Raises:
            ValueError: a capacity below 1.
        """
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; use a number of requests >= 1.")
        self.capacity = capacity
        self._changed = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jfuse-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job, *, timeout: float | int | None = None) -> Ticket:
        """Queues a job.

        Args:
            timeout: seconds from now within which it must be done, waiting included.

        Raises:
            QueueFull: too many are waiting.
            RuntimeError: the engine is closed.
            ValueError: a time-out that is not positive.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout}; use seconds above 0, or None.")
        with self._changed:
            if self._closed:
                raise RuntimeError("The engine is closed and takes no more requests.")
            if len(self._queue) >= self.capacity:
                raise QueueFull(f"{self.capacity} requests are waiting already; submit later, or raise capacity.")
            ticket = Ticket(job, self, timeout)
            self._queue.append(ticket)
            self._changed.notify_all()
        self._begin_next()
        return ticket

    def warm_up(self, jobs: Iterable[Job]) -> None:
        """Runs jobs of the expected shapes, one after the other, so that everything is compiled."""
        for job in jobs:
            self.submit(job).result()

    def close(self, *, drain: bool = True) -> None:
        """Takes no more requests and ends: after those that wait, or, without `drain`, giving all of them up."""
        with self._changed:
            self._closed = True
            left = [] if drain else [ticket for ticket in (*self._queue, self._running) if ticket is not None]
            self._changed.notify_all()
        for ticket in left:
            ticket._give_up(CancelledError("The engine was closed."))
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                ticket = self._running = self._queue.popleft()
            self._run(ticket)
            with self._changed:
                self._running = None

    def _run(self, ticket: Ticket) -> None:
        result, error = None, None
        try:
            ticket._begin()
            self._begin_next()  # loads while this one computes
            ticket.started = time.perf_counter()
            result = ticket._run()
        except BaseException as raised:  # the requester's, not the engine's
            error = raised
        with self._changed:
            ticket._end(result, error)
        ticket._close()

    def _begin_next(self) -> None:
        """Starts loading for whoever is first in the queue."""
        with self._changed:
            ticket = self._queue[0] if self._queue else None
            if ticket is None or ticket._begun:
                return
        ticket._begin()

    def _leave_queue(self, ticket: Ticket) -> bool:
        if ticket not in self._queue:
            return False
        self._queue.remove(ticket)
        return True
