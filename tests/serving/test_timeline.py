"""Events, what is reckoned from them, and their picture."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfuse.plot import figure_of, timeline
from jfuse.report import Report
from jfuse.throttle import Throttle
from jfuse.timeline import Event, Timeline, busy, transfers
from jfuse.types import ChunkAnchors, LayerKV

EVENTS = (
    Event("read", None, 0.0, 0.2, "select", "disk", 100),
    Event("read", 1, 0.1, 0.4, "select", "disk", 300),
    Event("select", None, 0.0, 0.5),
    Event("read", 0, 0.5, 1.5, "fuse", "disk", 2_000_000_000),
    Event("read", 0, 0.7, 0.8, "fuse", "memory", 7),
    Event("fuse", 0, 1.5, 2.5),
    Event("query", None, 2.5, 3.0),
)


def test_bytes_and_seconds_per_stage_and_tier():
    """Seconds in which two reads were under way count once."""
    parts = {(part.stage, part.tier): part for part in transfers(EVENTS)}
    assert parts["select", "disk"].num_bytes == 400 and parts["select", "disk"].seconds == pytest.approx(0.4)
    assert parts["fuse", "disk"].gb_per_s == pytest.approx(2.0)
    assert parts["fuse", "memory"].num_bytes == 7 and set(parts) == {
        ("select", "disk"),
        ("fuse", "disk"),
        ("fuse", "memory"),
    }


def test_overlapping_spans_are_counted_once():
    assert busy([]) == 0.0
    spans = [Event("fuse", 0, 0, 4), Event("fuse", 1, 1, 2), Event("fuse", 2, 3, 5), Event("fuse", 3, 7, 8)]
    assert busy(reversed(spans)) == 6.0


@pytest.mark.parametrize("threads", [True, False])
def test_the_end_of_asynchronous_work_is_when_its_arrays_are_ready(threads):
    square = jax.jit(lambda a: a @ a)
    a = square(jnp.ones((400, 400))).block_until_ready()
    with Timeline(threads=threads) as line:
        for l in range(3):
            a = square(a / 400)
            line.follow(Event("fuse", l, line.now, 0.0), a)
    events = line.events()
    assert [event.layer for event in events] == [0, 1, 2]
    for before, after in zip(events, events[1:], strict=False):
        assert before.end <= after.start <= after.end, "two computations of one device overlap"


def test_work_that_fails_leaves_no_event_and_no_thread():
    with Timeline() as line:
        gone = jnp.ones(3)
        gone.delete()
        line.follow(Event("fuse", 0, 0.0, 0.0), gone)
        line.follow(Event("fuse", 1, 0.0, 0.0), jnp.ones(3))
    assert [event.layer for event in line.events()] == [1]


def report(**fields):
    counts = {"num_prefix": 1, "num_context": 10, "num_query": 2, "edges": 1, "flops": 5, "full_flops": 10, "hits": 2}
    return Report(selector="qcfuse", ratio=0.5, realised_ratio=0.5, budget=5, rows=(5,), **counts, **fields)


def test_the_report_says_when_full_prefill_would_be_faster():
    """B-05, need 9."""
    slow = report(ttft=3.0, full_prefill_estimate=2.0, events=EVENTS)
    assert slow.full_prefill_faster and "about 2.00 s" in slow.advice and "3.00 s" in slow.advice
    assert "use a faster tier" in slow.advice
    once = {"compilations": 4, "missed": {1: "absent"}}
    first = report(ttft=3.0, full_prefill_estimate=2.0, events=EVENTS, **once)
    assert "faster tier" not in first.advice and "compiled programs and encoded chunks" in first.advice
    quick = report(ttft=3.0, full_prefill_estimate=3.5, events=EVENTS)
    assert not quick.full_prefill_faster and quick.advice == ""
    plain = slow.as_dict()
    assert plain["full_prefill_faster"] and plain["transfers"][0]["num_bytes"] == 2_000_000_000
    assert plain["events"][0] == EVENTS[0]._asdict()


def test_a_printed_report_is_a_short_table():
    """What a notebook shows: stages, first token, limit; not one line per event."""
    given = report(ttft=3.0, stages={"select": 0.5, "fuse": 2.5, "decode": 1.0}, events=EVENTS * 50, skipped=(3,))
    lines = dict(line.split("  ", 1) for line in str(given).splitlines() if not line.startswith(" "))
    shown = {name: value.strip() for name, value in lines.items()}
    assert shown["selector"] == "qcfuse, ratio 0.5, budget 5" and shown["time to first token"].startswith("3,000 ms")
    assert shown["speed-up that FLOPs allow"].startswith("2.00x")
    assert shown["chunks"] == "2 from the store, 0 encoded now, 1 empty"
    assert "  fuse" in str(given) and "advice" not in shown and len(str(given).splitlines()) < 20
    assert "Event" not in repr(given)


@pytest.mark.parametrize("events", [EVENTS, [event._asdict() for event in EVENTS], ()])
def test_the_picture_of_a_request(events, tmp_path):
    """From a report's events, or from its JSON."""
    axes = timeline(events)
    figure_of(axes).savefig(tmp_path / "timeline.png")
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == (["compute", "memory", "disk"] if events else [])
    assert len(axes.patches) == len(events)


class OneChunk:
    """A source of one chunk of 1,000 bytes a layer."""

    tokens, waits, anchor_rule = [np.arange(5)], False, None

    def tier(self, i):
        return "disk"

    def anchors(self, i, ratio, until):
        return ChunkAnchors(
            np.zeros((4, 0), np.int32), (LayerKV(np.zeros(500, np.uint8), np.zeros(500, np.uint8)),) * 4
        )

    def layer(self, i, l, *, keys=True, values=True):
        return LayerKV(np.zeros(500 * keys, np.uint8), np.zeros(500 * values, np.uint8))

    def mend(self, i, chunk):
        pass


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def test_a_throttle_slows_reads_to_its_bandwidth_and_latency():
    slow = Throttle(100_000, latency=0.005)(OneChunk())
    assert slow.waits and slow.tier(0) == "disk"
    assert seconds(lambda: slow.layer(0, 0)) >= 0.015
    assert seconds(lambda: slow.layer(0, 0, values=False)) >= 0.010
    assert seconds(lambda: slow.anchors(0, 0.1, 2)) >= 0.025  # two layers of it, whatever the source holds
    assert seconds(lambda: [slow.layer(0, l) for l in range(10)]) >= 0.15
    free = Throttle(1)(OneChunk(), tiers=("host",))
    assert seconds(lambda: free.layer(0, 0)) < 100  # through the link it would take 1,000 s


def test_sources_that_share_a_throttle_queue_for_it():
    link = Throttle(100_000)
    started = time.perf_counter()
    link.wait(2_000, started)
    link.wait(2_000, started)  # read at the same time, through the same link
    assert time.perf_counter() - started >= 0.04


def test_a_bandwidth_given_as_load_time_over_full_prefill_time():
    """QCFuse's 10 and 3 GB/s are 0.09 and 0.29 of a full prefill, on any machine."""
    link = Throttle.by_load_time(0.29, full_prefill=2.0, num_bytes=580_000_000)
    assert link.bytes_per_second == pytest.approx(1e9) and link.latency == 0.0


@pytest.mark.parametrize("bad", [{"bytes_per_second": 0}, {"bytes_per_second": float("nan")}, {"latency": -1.0}])
def test_links_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Throttle(**bad)
    with pytest.raises(ValueError, match="share"):
        Throttle.by_load_time(0.0, full_prefill=1.0, num_bytes=1)
