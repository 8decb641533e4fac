"""What a request tells about itself: hits and misses, rows, ratios, bytes, times, compilations."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax

from jfuse.timeline import Event, Transfer, transfers


@dataclass(frozen=True)
class Report:
    """The account of one request; printed, it is a short table. Times are seconds on the host, bytes as read.

    Attributes:
        ratio: the nominal ratio; `realised_ratio` is the share of layer-token states that were recomputed.
        rows: recomputed positions per layer.
        hits, missed, skipped: chunks served from the store, computed now (with the reason), and empty ones left out.
        stages: seconds per stage; `ttft` is their sum up to the first token's id on the host.
        compilations: XLA compilations during the request; a warm request has none.
        fallbacks: what ran otherwise than asked, with the reason.
        events: reads, transfers and compute with their times; `plot.timeline` draws them.
        full_prefill_estimate: seconds that a full prefill would take at the speed of this request's own recomputation.
    """

    selector: str
    ratio: float
    realised_ratio: float
    budget: int
    num_prefix: int
    num_context: int
    num_query: int
    rows: tuple[int, ...]
    edges: int
    flops: int
    full_flops: int
    hits: int
    missed: dict[int, str] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()
    selection_bytes: int = 0
    total_bytes: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    ttft: float = 0.0
    compilations: int = 0
    fallbacks: tuple[str, ...] = ()
    events: tuple[Event, ...] = field(default=(), repr=False)
    full_prefill_estimate: float = 0.0

    @property
    def flop_limit(self) -> float:
        """The speed-up over full prefill that counting FLOPs allows."""
        return self.full_flops / self.flops

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Bytes and seconds per stage and tier."""
        return transfers(self.events)

    @property
    def full_prefill_faster(self) -> bool:
        """Whether this request would have been served sooner without any cache."""
        return 0.0 < self.full_prefill_estimate < self.ttft

    @property
    def advice(self) -> str:
        """What to do instead, or nothing."""
        if not self.full_prefill_faster:
            return ""
        slower = (
            f"full prefill would take about {self.full_prefill_estimate:.2f} s, less than this request's "
            f"{self.ttft:.2f} s"
        )
        once = ["compiled programs"] if self.compilations else []
        once += ["encoded chunks"] if self.missed else []
        if once:
            return f"{slower}; but it {' and '.join(once)}, which the next one need not: judge by that one."
        loading = sum(part.seconds for part in self.transfers)
        return f"{slower} (of which loading took {loading:.2f} s); use a faster tier, or do not fuse."

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The account for people: names and values, in the order of a request."""
        most, states = max(self.rows, default=0), f"{self.realised_ratio:.1%} of the layer states"
        return [
            ("selector", f"{self.selector}, ratio {self.ratio:g}, budget {self.budget}"),
            ("recomputed", f"{most} of {self.num_context} positions, {states}"),
            ("tokens", f"{self.num_prefix} prefix, {self.num_context} context, {self.num_query} query"),
            ("chunks", f"{self.hits} from the store, {len(self.missed)} encoded now, {len(self.skipped)} empty"),
            ("read before selecting", as_megabytes(self.selection_bytes)),
            ("read in all", as_megabytes(self.total_bytes)),
            ("speed-up that FLOPs allow", f"{self.flop_limit:.2f}x over full prefill"),
            ("time to first token", f"{as_milliseconds(self.ttft)}, with {self.compilations} compilations"),
            *((f"  {stage}", as_milliseconds(spent)) for stage, spent in self.stages.items() if stage != "decode"),
            ("decoding", as_milliseconds(self.stages.get("decode", 0.0))),
            *(
                (f"{part.tier} for {part.stage}", f"{as_megabytes(part.num_bytes)} in {as_milliseconds(part.seconds)}")
                for part in self.transfers
            ),
            *(("missed", f"chunk {index}: {reason}") for index, reason in self.missed.items()),
            *(("fallback", reason) for reason in self.fallbacks),
            *((("advice", self.advice),) if self.advice else ()),
        ]

    def __str__(self) -> str:
        lines = self.lines
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with what follows from them."""
        return {name: getattr(self, name) for name in (f.name for f in dataclasses.fields(self))} | {
            "rows": list(self.rows),
            "skipped": list(self.skipped),
            "fallbacks": list(self.fallbacks),
            "events": [event._asdict() for event in self.events],
            "transfers": [part._asdict() | {"gb_per_s": part.gb_per_s} for part in self.transfers],
            "flop_limit": self.flop_limit,
            "full_prefill_faster": self.full_prefill_faster,
            "advice": self.advice,
        }


def as_megabytes(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 1e6:,.1f} MB"


def as_milliseconds(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1e3:,.0f} ms"


class Compilations:
    """Counts and times XLA compilations inside a `with` block, of this process and all its threads.

    >>> with Compilations() as compiled:
    ...     _ = jax.jit(lambda x: x + 1)(1.0)
    >>> compiled.count >= 1, compiled.seconds > 0
    (True, True)
    """

    _total: tuple[int, float] = (0, 0.0)  # compilations and their seconds, of the whole process
    _listening = False

    def __enter__(self) -> "Compilations":
        if not Compilations._listening:
            jax.monitoring.register_event_duration_secs_listener(_count)
            Compilations._listening = True
        self._start = Compilations._total
        self._end: tuple[int, float] | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._end = Compilations._total

    @property
    def count(self) -> int:
        """Compilations so far, or in the whole block once it is left."""
        return (self._end or Compilations._total)[0] - self._start[0]

    @property
    def seconds(self) -> float:
        """What they took, one after another: more than the block itself where threads compile at once."""
        return (self._end or Compilations._total)[1] - self._start[1]


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        count, seconds = Compilations._total
        Compilations._total = (count + 1, seconds + duration_secs)
