"""Loads in a fixed order, a few ahead of their use: in a background thread, or right where they are asked for.

A file read and a checksum release the interpreter, so that a thread overlaps them with dispatching compute. What was
loaded is handed over once; nothing here ever writes into it.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

Load = tuple[Hashable, Callable[[], Any]]


class Stopped(RuntimeError):
    """Loading was stopped, by an error elsewhere or a cancelled request."""


class Loader:
    """Runs loads one after another, at most `ahead` of them beyond those that were taken.

    An exception of a load is raised where that load is taken; the ones after it run all the same. Use it as a context
    manager: on leaving, the thread has ended.

    Example:
        >>> with Loader([(l, lambda l=l: l * l) for l in range(4)], ahead=1) as loader:
        ...     [loader.take(l) for l in range(4)]
        [0, 1, 4, 9]
    """

    def __init__(self, loads: Sequence[Load], *, ahead: int, free: int = 0, background: bool = True):
        """Plans the loads.

        Args:
            ahead: loads that may wait to be taken; 0 runs each when it is taken.
            free: the first so many loads do not count: they are wanted together.
            background: run them in a thread; without, `take` runs the loads ahead itself before it returns, which suits
                loads that only start a transfer.
        """
        self._loads = list(loads)
        self._index = {key: i for i, (key, _) in enumerate(self._loads)}
        self._ahead, self._free = ahead, free if ahead else 0
        self._changed = threading.Condition()
        self._done: dict[Hashable, tuple[Any, BaseException | None]] = {}
        self._next = self._taken = 0  # the next load to run; counted loads that were taken
        self._wanted = -1
        self._stopped = False
        run_thread = background and ahead > 0
        self._thread = threading.Thread(target=self._work, name="jfuse-load", daemon=True) if run_thread else None

    def start(self) -> "Loader":
        """Begins: the thread, or the first loads themselves. Done by `with`, or earlier for a request that waits."""
        if self._thread is None and self._ahead and not self._stopped:
            self._run_ahead()
        elif self._thread is not None and not self._thread.ident and not self._stopped:
            self._thread.start()
        return self

    def take(self, key: Hashable) -> Any:
        """The result of a load, waiting for it if need be. Each is handed over once.

        Raises:
            KeyError: not planned, or taken before.
            Stopped: loading was stopped.
            BaseException: whatever the load raised.
        """
        index = self._index.pop(key)
        with self._changed:
            self._wanted = max(self._wanted, index)
            self._changed.notify_all()
            while self._thread is not None and key not in self._done and not self._stopped:
                self._changed.wait()
            if self._stopped:
                raise Stopped("The request was stopped while its caches were being loaded.")
            self._taken += index >= self._free
        if self._thread is None:
            self._run_inline(index)
        result, error = self._done.pop(key)
        with self._changed:
            self._changed.notify_all()
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """Lets nothing more begin, and wakes whoever waits. Callable from any thread, any number of times."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def __enter__(self) -> "Loader":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread is not None and self._thread.ident:
            self._thread.join()
        self._done.clear()

    def _limit(self) -> int:
        return max(self._free + self._ahead + self._taken, self._wanted + 1)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._stopped and len(self._loads) > self._next >= self._limit():
                    self._changed.wait()
                if self._stopped or self._next >= len(self._loads):
                    return
                key, load = self._loads[self._next]
                self._next += 1
            outcome = _outcome(load)
            with self._changed:
                self._done[key] = outcome
                self._changed.notify_all()

    def _run_inline(self, index: int) -> None:
        """Runs the load at `index` and, unless nothing is to be ahead, what stands before and just behind it."""
        if not self._ahead:
            key, load = self._loads[index]
            self._done[key] = _outcome(load)
        else:
            self._run_ahead()

    def _run_ahead(self) -> None:
        while self._next < min(self._limit(), len(self._loads)):
            key, load = self._loads[self._next]
            self._next += 1
            self._done[key] = _outcome(load)


def _outcome(load: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return load(), None
    except BaseException as error:  # raised again in the thread that takes it
        return None, error
