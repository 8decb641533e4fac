"""`jfuse plan`: which way of serving a request is fastest, before anything runs."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from jfuse.cli.command import ModelCommand, make_table, working
from jfuse.cli.selector import SelectorCommand
from jfuse.report import as_megabytes, as_milliseconds

if TYPE_CHECKING:
    from jfuse.hardware import Hardware
    from jfuse.models.config import ModelConfig
    from jfuse.models.decoder import Model
    from jfuse.plan import Row
    from jfuse.types import Sizes

Rate = Annotated[float | None, tyro.conf.arg(metavar="RATE", help_behavior_hint="(default: measured)")]
GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class Plan(SelectorCommand, ModelCommand):
    """Says which way to serve a request is fastest, and from how many context tokens each beats full prefill.

    Without --tflops this machine is measured with the model. With it no model is loaded that jfuse knows by its
    configuration (jfuse models lists them), and links that are not given are taken as unlimited.
    """

    example: ClassVar[str] = "jfuse plan --model Qwen3-8B --tflops 100 --memory 3200 --link 50 --disk 7 --chunks 20"

    chunks: int = 8
    """Retrieved chunks of the request."""
    chunk_tokens: int = 512
    """Tokens of each chunk."""
    prefix_tokens: int = 32
    """Tokens of the system prefix."""
    query_tokens: int = 64
    """Tokens of the query."""
    ratio: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="(default: the selector's)")] = (
        None
    )
    """Share of the context that is recomputed."""
    selectors: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: all)")] = ()
    """Which selectors to reckon; jfuse selectors lists the names."""
    layers: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: of the profile, or mid-depth)")] = ()
    """Critical layers, counted from 0. Only their number and the deepest enter the cost."""
    tflops: Rate = None
    """What a prefill achieves, in 10^12 floating-point operations per second."""
    memory: Rate = None
    """Device memory bandwidth achieved, in GB/s."""
    link: Rate = None
    """From host to device, in GB/s."""
    disk: Rate = None
    """From where the chunks lie to the host, in GB/s."""
    store: Annotated[Path, tyro.conf.arg(metavar="PATH")] = Path(".")
    """Folder whose disk is measured."""

    def run(self) -> int:
        """Prints every way, fastest first."""
        from jfuse.plan import break_even, plan
        from jfuse.selectors.listing import NAMED
        from jfuse.selectors.parse import parse_selector
        from jfuse.types import Sizes

        self.check()
        config, machine, itemsize, layers = self.read()
        sizes = Sizes(self.prefix_tokens, (self.chunk_tokens,) * self.chunks, self.query_tokens)
        config.check_length(sizes.prefix + sizes.context + sizes.query)
        chosen = [parse_selector(name, layers=layers) for name in self.selectors or NAMED if name != "recompute_all"]
        for selector in chosen:
            selector.view.layer_indices(config.num_layers)
        options: dict[str, Any] = {"ratio": self.ratio, "itemsize": itemsize}
        with working("Reckoning ..."):
            rows = plan(config, machine, sizes, chosen, **options)
            parts = {"num_prefix": sizes.prefix, "num_query": sizes.query, "chunk_tokens": self.chunk_tokens}
            pays = {s.name: break_even(config, machine, s, **options, **parts) for s in chosen}
        self.show(report(rows, pays, machine, sizes, layers), *tables(rows, pays, machine, sizes, layers))
        return 0

    def check(self) -> None:
        """Refuses what cannot be reckoned, before a model is loaded.

        Raises:
            ValueError: names the option and its range.
        """
        from jfuse.config import checked_ratio

        self.require(1, "chunks", "chunk_tokens", "query_tokens")
        self.require(0, "prefix_tokens")
        for name in ("tflops", "memory", "link", "disk"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"--{name} is {rate}; use a rate above 0, or leave it out.")
        if self.ratio is not None:
            checked_ratio(self.ratio)
        self.check_selectors(self.selectors)

    def read(self) -> "tuple[ModelConfig, Hardware, int, tuple[int, ...]]":
        """The model's configuration, the machine, bytes per number, and critical layers."""
        import numpy as np

        from jfuse.hardware import Hardware, measure
        from jfuse.models.public import PUBLIC_CONFIGS, public_config

        given = {"memory": self.memory, "link": self.link, "disk": self.disk}
        rates = {name: rate * GIGA for name, rate in given.items() if rate is not None}
        public = next((name for name in PUBLIC_CONFIGS if name.lower() == self.model.lower()), None)
        if public is None or Path(self.model).exists():
            model = self.load()
            config, itemsize = model.config, np.dtype(model.dtype).itemsize
            layers = self.layers or profiled(model, self.profile)
            if self.tflops is None:
                with working("Measuring this machine ..."):
                    return config, dataclasses.replace(measure(model, folder=self.store), **rates), itemsize, layers
        elif self.tflops is None:
            raise ValueError(
                f"{public} is known here by its configuration alone; describe a machine with --tflops, or give "
                "--model a model that can be loaded and measured."
            )
        elif self.profile is not None:
            raise ValueError(
                f"--profile belongs to a model that is loaded, and {public} is known here by its configuration alone; "
                "name --layers, counted from 0."
            )
        else:
            config, itemsize = public_config(public), 4 if self.dtype == "float32" else 2
            layers = self.layers or middle(config.num_layers)
        machine = Hardware("given", self.tflops * TERA, **{"memory": math.inf, **rates})
        return config, machine, itemsize, layers


def profiled(model: "Model", profile: Path | None) -> tuple[int, ...]:
    """The critical layers of the profile given, or of the shipped one, or the middle ones of a model that has none."""
    from jfuse.profile import load_profile

    if profile is not None:
        return load_profile(model, profile).critical_layers()
    try:
        return load_profile(model).critical_layers()
    except (LookupError, ValueError):  # no profile, or fewer layers than are asked of it
        return middle(model.config.num_layers)


def middle(num_layers: int) -> tuple[int, ...]:
    """Three layers just beyond the middle, where QCFuse's models have theirs (2606.05875, Fig. 7).

    >>> middle(36), middle(2)
    ((19, 20, 21), (0, 1))
    """
    last = min(-(-num_layers * 21 // 36), num_layers - 1)
    return tuple(range(max(last - 2, 0), last + 1))


def report(
    rows: "list[Row]", pays: dict[str, int | None], machine: "Hardware", sizes: "Sizes", layers: tuple[int, ...]
) -> dict[str, Any]:
    """Everything as plain values; an unlimited rate is null."""
    rates = {name: None if value == math.inf else value for name, value in dataclasses.asdict(machine).items()}
    plain = [row._asdict() | {"pays_from": pays.get(row.method)} for row in rows]
    return {"hardware": rates, "request": sizes._asdict(), "critical_layers": list(layers), "rows": plain}


def tables(
    rows: "list[Row]", pays: dict[str, int | None], machine: "Hardware", sizes: "Sizes", layers: tuple[int, ...]
) -> list[Any]:
    """The same for people."""
    figures = (f"{machine.flops / TERA:,.4g} TFLOP/s", f"memory {rate(machine.memory)}")
    figures += (f"link {rate(machine.link)}", f"disk {rate(machine.disk)}")
    title = (
        f"{sizes.prefix} prefix, {len(sizes.chunks)} x {sizes.chunks[0]} context, {sizes.query} query tokens; "
        f"{machine.name}: {', '.join(figures)}"
    )
    columns = ("method", "ratio", "realised", "TTFT", "speed-up", "select", "fuse", "query", "read first", "GFLOP")
    cells = [
        (row.method, f"{row.ratio:g}", f"{row.realised_ratio:.2f}", as_milliseconds(row.ttft), f"{row.speed_up:.2f}x")
        + tuple(as_milliseconds(part) for part in (row.selection, row.fusion, row.query))
        + (as_megabytes(row.selection_bytes), f"{row.flops / GIGA:,.0f}", from_when(row.method, pays))
        for row in rows
    ]
    caption = (
        "realised: share of the layer states that are recomputed. read first: bytes before a selector can choose. pays "
        f"from: context tokens from which it beats full prefill. Critical layers: {', '.join(map(str, layers))}."
    )
    best = f"Fastest: {rows[0].method}, {as_milliseconds(rows[0].ttft)}, {rows[0].speed_up:.2f}x over full prefill."
    return [make_table((*columns, "pays from"), cells, title, caption), best]


def from_when(method: str, pays: dict[str, int | None]) -> str:
    """A method's break-even for people."""
    if method not in pays:
        return ""
    tokens = pays[method]
    return "never" if tokens is None else f"{tokens:,}"


def rate(bytes_per_second: float) -> str:
    """A bandwidth for people."""
    return "unlimited" if bytes_per_second == math.inf else f"{bytes_per_second / GIGA:,.4g} GB/s"
