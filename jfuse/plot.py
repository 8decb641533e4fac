"""Figures: axes in, axes out. One colour per method everywhere, distinguishable by colour-blind readers."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jfuse.timeline import Event

COLOURS = {  # Okabe and Ito, 2008
    "full prefill": "#000000",
    "reuse": "#999999",
    "random": "#bbbbbb",
    "epic": "#e69f00",
    "cacheblend": "#56b4e9",
    "fusionrag": "#009e73",
    "prophetkv": "#0072b2",
    "qcfuse": "#d55e00",
    "relaxkv": "#cc79a7",
}


def quality_against_ttft(
    rows: Sequence[dict[str, Any]],
    *,
    quality: str = "nll",
    label: str = "answer NLL (nats per token, lower is better)",
    ax: Axes | None = None,
) -> Axes:
    """One line per method over its ratios; full prefill and reuse are single marks (QCFuse Fig. 10).

    Args:
        rows: dictionaries with `method`, `ratio`, `ttft` in seconds, and the quality field.
    """
    ax = Figure(figsize=(5, 3.6), layout="constrained").subplots() if ax is None else ax
    for method in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["ratio"])
        colour = COLOURS.get(method, "#f0e442")
        ax.plot([row["ttft"] for row in own], [row[quality] for row in own], "o-", color=colour, label=method)
        for row in own if len(own) > 1 else ():
            ax.annotate(f"{row['ratio']:g}", (row["ttft"], row[quality]), textcoords="offset points", xytext=(4, 4))
    ax.set_xlabel("time to first token (s)")
    ax.set_ylabel(label)
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax


STAGE_COLOURS = {"select": "#e69f00", "fuse": "#0072b2", "query": "#009e73", "encode": "#cc79a7"}


def timeline(events: Sequence[Event | dict[str, Any]], *, ax: Axes | None = None) -> Axes:
    """What was read, moved and computed when; one lane for compute and one per tier, coloured by stage.

    Args:
        events: `report.events`, or the same from a report's JSON.
    """
    ax = Figure(figsize=(7, 2.4), layout="constrained").subplots() if ax is None else ax
    spans = [event if isinstance(event, Event) else Event(**event) for event in events]
    lanes = list(dict.fromkeys(sorted(_lane(span) for span in spans)))
    lanes.sort(key=("compute", "link", "device", "host", "memory", "disk").index)
    for span in spans:
        colour = STAGE_COLOURS[span.stage or span.what]
        corner = (span.start, lanes.index(_lane(span)) - 0.35)
        bar = Rectangle(corner, span.end - span.start, 0.7, facecolor=colour, edgecolor="white", linewidth=0.4)
        ax.add_patch(bar)
    ax.autoscale_view()
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    ax.set_xlabel("time since the request began (s)")
    stages = dict.fromkeys(span.stage or span.what for span in spans)
    handles = [Patch(color=STAGE_COLOURS[stage], label=stage) for stage in STAGE_COLOURS if stage in stages]
    if handles:
        ax.legend(handles=handles, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def _lane(span: Event) -> str:
    return span.tier or "compute"


def figure_of(ax: Axes) -> Figure:
    """The figure that axes belong to, for saving."""
    figure = ax.get_figure(root=True)
    assert figure is not None  # axes made here or handed in always have one
    return figure
