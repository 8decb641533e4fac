"""The loader on its own: order, window, errors, ends."""

import threading
import time

import pytest

from jfuse.loading import Loader, Stopped


class Slow:
    """Loads that log their start and how many were taken by then."""

    def __init__(self, count, *, delay=0.0, fails=()):
        self.started, self.taken = [], 0
        self.loads = [(l, lambda l=l: self.load(l)) for l in range(count)]
        self.delay, self.fails = delay, fails

    def load(self, l):
        self.started.append((l, self.taken))
        time.sleep(self.delay)
        if l in self.fails:
            raise OSError(f"layer {l}")
        return l * 10


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("ahead", "free"), [(1, 0), (2, 0), (3, 2)])
def test_loads_run_in_order_and_never_further_ahead_than_asked(background, ahead, free):
    slow = Slow(9, delay=1e-3)
    with Loader(slow.loads, ahead=ahead, free=free, background=background) as loader:
        for l in range(9):
            slow.taken = l + 1  # from the moment it is asked for
            assert loader.take(l) == l * 10
            time.sleep(2e-3)
    assert [l for l, _ in slow.started] == list(range(9))
    assert all(l < max(free, 0) + ahead + taken for l, taken in slow.started)
    if background:
        assert any(taken <= l - ahead + 1 for l, taken in slow.started[ahead:]), "nothing was loaded ahead"


@pytest.mark.parametrize("background", [True, False])
def test_a_request_that_waits_loads_what_it_may(background):
    """What is wanted first, and as much again as may be ahead, before anything is asked for."""
    slow = Slow(6)
    loader = Loader(slow.loads, ahead=2, free=1, background=background).start()
    until = time.perf_counter() + 60
    while len(slow.started) < 3 and time.perf_counter() < until:
        time.sleep(1e-3)
    assert [l for l, _ in slow.started] == [0, 1, 2]
    with loader:
        assert [loader.take(l) for l in range(6)] == [0, 10, 20, 30, 40, 50]


def test_without_layers_ahead_each_load_runs_when_it_is_asked_for():
    """Synchronous: no thread, and out of order is fine."""
    slow = Slow(4)
    with Loader(slow.loads, ahead=0, free=3) as loader:
        assert not [t for t in threading.enumerate() if t.name == "jfuse-load"]
        assert [loader.take(l) for l in (2, 0)] == [20, 0]
    assert [l for l, _ in slow.started] == [2, 0]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_an_error_is_raised_where_its_load_is_taken_and_later_loads_go_on(ahead):
    slow = Slow(4, fails=(1,))
    with Loader(slow.loads, ahead=ahead) as loader:
        assert loader.take(0) == 0
        with pytest.raises(OSError, match="layer 1"):
            loader.take(1)
        assert loader.take(2) == 20


def test_taking_out_of_order_does_not_block():
    with Loader(Slow(6).loads, ahead=1) as loader:
        assert [loader.take(l) for l in (4, 0, 5, 1)] == [40, 0, 50, 10]


def test_nothing_is_handed_over_twice_or_without_a_plan():
    with Loader(Slow(2).loads, ahead=1) as loader:
        loader.take(0)
        for key in (0, "else"):
            with pytest.raises(KeyError):
                loader.take(key)


def test_stopping_wakes_whoever_waits_and_ends_the_thread():
    slow = Slow(3, delay=0.05)
    with Loader(slow.loads, ahead=1) as loader:
        threading.Timer(0.01, loader.stop).start()
        with pytest.raises(Stopped):
            for l in range(3):
                loader.take(l)
    assert len(slow.started) < 3
    with pytest.raises(Stopped):
        loader.take(2)


def test_an_error_inside_the_block_ends_the_thread():
    slow = Slow(50, delay=1e-3)
    with pytest.raises(ZeroDivisionError):
        with Loader(slow.loads, ahead=1) as loader:
            loader.take(0)
            raise ZeroDivisionError
    assert len(slow.started) <= 3
