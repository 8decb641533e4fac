"""What happened when during a request: reads, transfers and compute as timed events, recorded from several threads."""

import queue
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """One span of a request, in seconds from its start.

    `what` is "read" (a tier to host memory), "move" (host to device), "encode" (a chunk that had to be computed),
    "select", "fuse" (one layer's recomputation) or "query". `stage` is the stage that needed the bytes of a read or
    move: "select" or "fuse".
    """

    what: str
    layer: int | None
    start: float
    end: float
    stage: str = ""
    tier: str = ""
    num_bytes: int = 0


class Transfer(NamedTuple):
    """What one stage got from one tier."""

    stage: str
    tier: str
    num_bytes: int
    seconds: float  # during which something was on its way

    @property
    def gb_per_s(self) -> float | None:
        """Achieved bandwidth, if any time passed."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else None


class Timeline:
    """Records events; left as a context manager, it has seen every followed array arrive."""

    def __init__(self, *, threads: bool = True):
        """Starts the clock.

        Args:
            threads: whether ends of asynchronous work are awaited in threads. Without them `follow` itself waits, which
                makes a request synchronous.
        """
        self._start = time.perf_counter()
        self._events: list[Event] = []
        self._threads = threads
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    @property
    def now(self) -> float:
        """Seconds since the start of the request."""
        return time.perf_counter() - self._start

    def add(self, event: Event) -> None:
        """Records a span that is over."""
        self._events.append(event)

    def follow(self, event: Event, arrays: Any) -> None:
        """Records a span that ends when the arrays are ready. Spans of one kind run one after another.

        Args:
            event: its `end` is filled in; its start is not before the end of the span followed before it.
            arrays: of which none may be donated later.
        """
        if not self._threads:
            jax.block_until_ready(arrays)
            self.add(event._replace(end=self.now))
            return
        with self._lock:
            if event.what not in self._lanes:
                self._lanes[event.what] = _Lane(self)
        self._lanes[event.what].put(event, arrays)

    def events(self) -> tuple[Event, ...]:
        """Everything recorded so far, by start."""
        return tuple(sorted(self._events, key=lambda event: event.start))

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    """A thread that waits for arrays in the order in which they were dispatched."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._queue: queue.SimpleQueue[tuple[Event, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="jfuse-timeline", daemon=True)
        self._thread.start()

    def put(self, event: Event, arrays: Any) -> None:
        self._queue.put((event, arrays))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        free = 0.0  # when the span before ended
        while (item := self._queue.get()) is not None:
            event, arrays = item
            try:
                jax.block_until_ready(arrays)
            except Exception:  # whoever computes on them meets the same error
                continue
            end = self._timeline.now
            self._timeline.add(event._replace(start=max(event.start, free), end=end))
            free = end
            del arrays, item  # while waiting for the next, nothing is kept alive


def transfers(events: Iterable[Event]) -> tuple[Transfer, ...]:
    """Bytes and seconds per stage and tier; seconds in which several loads were under way count once."""
    groups: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.tier:
            groups.setdefault((event.stage, event.tier), []).append(event)
    return tuple(
        Transfer(*key, sum(event.num_bytes for event in own), busy(own)) for key, own in sorted(groups.items())
    )


def busy(events: Iterable[Event]) -> float:
    """Seconds covered by at least one of the events.

    >>> busy([Event("read", 0, 0.0, 2.0), Event("read", 1, 1.0, 3.0), Event("read", 2, 5.0, 6.0)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total
