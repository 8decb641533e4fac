"""Figures: axes in, axes out. One colour per method everywhere, distinguishable by colour-blind readers."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jfuse.timeline import Event

Row = dict[str, Any]

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
"""One colour per method in every figure (the order of Okabe and Ito's palette)."""

CONTROLS = ("global_sparse", "layerwise_sparse", "target_capacity", "target_union")  # of RelaxKV, in its colour
OTHER = "#5d3a9b"  # of the user's own; yellow, the palette's eighth, is too faint for lines
RULE_COLOURS = {"kvzip": "#d55e00", "sink": "#e69f00", "knorm": "#56b4e9", "h2o": "#0072b2"}
MARKERS = "osD^v<>P"


def colour(method: str) -> str:
    """The colour of a method, by the family that its name begins with: variants share it and differ by marker."""
    if method.startswith(CONTROLS):
        return COLOURS["relaxkv"]
    families = [name for name in COLOURS if method.startswith(name)]
    return COLOURS[max(families, key=len)] if families else RULE_COLOURS.get(method, OTHER)


def quality_against_ttft(
    rows: Sequence[Row],
    *,
    quality: str = "nll",
    label: str = "answer NLL (nats per token, lower is better)",
    ax: Axes | None = None,
) -> Axes:
    """One line per method over its ratios; full prefill and reuse are single marks (QCFuse Figs. 10, 11).

    Args:
        rows: dictionaries with `method`, `ratio`, `ttft` in seconds, and the quality field.
    """
    ax = quality_against(rows, "ttft", quality, "time to first token (s)", label, ax=ax)
    ax.set_xlim(left=0)
    return ax


def quality_against_work(rows: Sequence[Row], *, quality: str, label: str, ax: Axes | None = None) -> Axes:
    """One line per method over what its ratios realise, which for RelaxKV is far more than they say."""
    return quality_against(rows, "realised", quality, "share of layer-token states recomputed", label, ax=ax)


def quality_against(
    rows: Sequence[Row], x: str, quality: str, xlabel: str, label: str, *, ax: Axes | None = None
) -> Axes:
    """One line per method over its ratios, which stand beside the points."""
    drawn = [row for row in rows if row.get(x) is not None and row.get(quality) is not None]
    ax = lines(drawn, x=x, y=quality, by="method", order="ratio", xlabel=xlabel, ylabel=label, ax=ax)
    for method in dict.fromkeys(row["method"] for row in drawn):
        own = [row for row in drawn if row["method"] == method]
        style = {"fontsize": "x-small", "color": colour(method), "textcoords": "offset points", "xytext": (4, -9)}
        for row in own if len(own) > 1 else ():
            ax.annotate(f"{row['ratio']:g}", (row[x], row[quality]), **style)
    return ax


def lines(
    rows: Sequence[Row],
    *,
    x: str,
    y: str,
    by: str,
    xlabel: str,
    ylabel: str,
    order: str = "",
    ax: Axes | None = None,
) -> Axes:
    """One line per value of the field `by`, in its method's colour, with 95 % intervals or standard errors.

    Whiskers are drawn where rows have `y_low` and `y_high`, or `y_se`.

    Args:
        order: the field that points are joined by; `x` by default.
    """
    ax = Figure(figsize=(5, 3.6), layout="constrained").subplots() if ax is None else ax
    used: dict[str, int] = {}
    for name in dict.fromkeys(row[by] for row in rows):
        own = sorted((row for row in rows if row[by] == name and row[y] is not None), key=lambda row: row[order or x])
        shade = colour(str(name))
        marker = MARKERS[used.get(shade, 0) % len(MARKERS)]
        used[shade] = used.get(shade, 0) + 1
        style = {"color": shade, "marker": marker, "markersize": 5, "label": str(name)}
        at, values = [row[x] for row in own], [row[y] for row in own]
        whiskers = _whiskers(own, y)
        if whiskers is not None:
            ax.errorbar(at, values, yerr=whiskers, capsize=2, elinewidth=0.8, **style)
        else:
            ax.plot(at, values, **style)
    _finish(ax, xlabel, ylabel)
    return ax


def _whiskers(rows: Sequence[Row], y: str) -> list[list[float]] | None:
    """Lengths below and above each point, or None if a row lacks them."""
    lengths = []
    for row in rows:
        low, high, error = (row.get(f"{y}_{end}") for end in ("low", "high", "se"))
        if low is not None and high is not None:
            lengths.append((max(0.0, row[y] - low), max(0.0, high - row[y])))
        elif error is not None:
            lengths.append((error, error))
    return [list(side) for side in zip(*lengths, strict=True)] if len(lengths) == len(rows) and rows else None


def pair() -> tuple[Axes, Axes]:
    """Axes of two panels side by side in one figure."""
    left, right = Figure(figsize=(8.8, 3.4), layout="constrained").subplots(1, 2)
    return left, right


def panels(rows: Sequence[Row], by: str, draw: Callable[[Sequence[Row], Axes], object], *, columns: int = 3) -> Axes:
    """Small multiples: `draw` on one panel per value of the field `by`; the first panel's axes come back.

    One legend below names what any panel shows; a panel may lack a method, or have no clear gap and be empty.
    """
    values = list(dict.fromkeys(row[by] for row in rows))
    columns = max(1, min(columns, len(values)))
    height = -(-max(len(values), 1) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    shown: dict[str, Any] = {}
    for value, ax in zip(values, axes, strict=False):
        draw([row for row in rows if row[by] == value], ax)
        ax.set_title(str(value), fontsize="medium")
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
        if (legend := ax.get_legend()) is not None:
            legend.remove()
    if len(shown) > 1:
        place = {"loc": "outside lower center", "ncols": min(len(shown), 4)}
        figure.legend(shown.values(), shown.keys(), frameon=False, fontsize="small", **place)
    for ax in axes[len(values) :]:
        ax.set_visible(False)
    return axes[0]


def bars(rows: Sequence[Row], *, x: str, y: str, by: str, ylabel: str, ax: Axes | None = None) -> Axes:
    """Groups of bars, one group per value of `x` and one bar per value of `by`, in its method's colour.

    Whiskers are those of `lines`.
    """
    ax = Figure(figsize=(6, 3.6), layout="constrained").subplots() if ax is None else ax
    groups, names = (list(dict.fromkeys(row[field] for row in rows)) for field in (x, by))
    width = 0.8 / max(len(names), 1)
    shades = _shades(names)
    for index, name in enumerate(names):
        own = {row[x]: row for row in rows if row[by] == name and row[y] is not None}
        at = [place + (index - (len(names) - 1) / 2) * width for place, group in enumerate(groups) if group in own]
        drawn = [own[group] for group in groups if group in own]
        fill, hatch = shades[name]
        style = {"label": str(name), "color": fill, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
        whiskers = {"yerr": _whiskers(drawn, y), "capsize": 2, "error_kw": {"elinewidth": 0.8}}
        ax.bar(at, [row[y] for row in drawn], width, **style, **whiskers)
    ax.set_xticks(range(len(groups)), [str(group) for group in groups])
    _finish(ax, "", ylabel)
    _legend_above(ax, 3, ax.get_legend_handles_labels()[0])
    return ax


def time_breakdown(rows: Sequence[Row], *, ax: Axes | None = None) -> Axes:
    """One bar per row, its stages one after another (QCFuse Figs. 1 and 13).

    Args:
        rows: dictionaries with `method`, seconds by stage, and perhaps `load_share`.
    """
    ax = Figure(figsize=(6, 0.5 + 0.32 * len(rows)), layout="constrained").subplots() if ax is None else ax
    for place, row in enumerate(rows):
        left = 0.0
        for stage, shade in STAGE_COLOURS.items():
            if row.get(stage):
                ax.barh(place, row[stage], left=left, color=shade, edgecolor="white", linewidth=0.4)
                left += row[stage]
    ax.set_yticks(range(len(rows)), [_named(row) for row in rows])
    ax.invert_yaxis()
    ax.set_xlabel("seconds")
    stages = [stage for stage in STAGE_COLOURS if any(row.get(stage) for row in rows)]
    _legend_above(ax, 5, [Patch(color=STAGE_COLOURS[stage], label=stage) for stage in stages])
    return ax


def ttft_against_load(rows: Sequence[Row], *, ax: Axes | None = None) -> Axes:
    """Median and 95th percentile of the time to first token against achieved requests per second (QCFuse Fig. 14).

    Args:
        rows: those of `evals.load_test.throughput`; a dotted line stands where a method saturates.
    """
    ax = Figure(figsize=(5, 3.6), layout="constrained").subplots() if ax is None else ax
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        loaded = sorted((row for row in own if row.get("offered") is not None), key=lambda row: row["achieved"])
        at, shade = [row["achieved"] for row in loaded], colour(method)
        ax.plot(at, [row["p50"] for row in loaded], "o-", color=shade, label=method)
        ax.plot(at, [row["p95"] for row in loaded], "o--", color=shade, markerfacecolor="white", linewidth=1)
        for row in own:
            if row["load"] == "saturation":
                ax.axvline(row["achieved"], color=shade, linestyle=":", linewidth=1)
    ax.set_ylim(bottom=0)
    _finish(ax, "achieved requests per second", "time to first token (s): median, dashed 95 %")
    return ax


def mass_concentration(rows: Sequence[Row], *, ax: Axes | None = None) -> Axes:
    """Share of the question's attention that the best share of the context holds (QCFuse Fig. 5, left)."""
    named = [{**row, "of": "all layers"} for row in rows]
    ax = lines(named, x="share", y="mass", by="of", xlabel="share of context tokens", ylabel="share of mass", ax=ax)
    ax.set_xscale("log")
    ax.set_ylim(0, 1.02)
    return ax


def by_layer(rows: Sequence[Row], *, y: str, ylabel: str, marked: Sequence[int] = (), ax: Axes | None = None) -> Axes:
    """A figure per layer, one line per method if rows have one (QCFuse Figs. 5, right, and 7).

    Args:
        marked: layers with a line of their own, such as critical ones.
    """
    named = [{**row, "line": _named(row) if "method" in row else ylabel} for row in rows]
    ax = lines(named, x="layer", y=y, by="line", xlabel="layer", ylabel=ylabel, ax=ax)
    for layer in marked:
        ax.axvline(layer, color="#999999", linestyle=":", linewidth=1, zorder=0)
    return ax


def anchor_recall(rows: Sequence[Row], *, ax: Axes | None = None) -> Axes:
    """Recall of the answer by anchor rule and share of anchors (QCFuse Fig. 6)."""
    label = {"xlabel": "anchors, share of each chunk", "ylabel": "recall at 10%"}
    return lines(rows, x="anchor_ratio", y="recall", by="rule", ax=ax, **label)


def top_layer_recall(rows: Sequence[Row], *, ax: Axes | None = None) -> Axes:
    """Recall of the best k layers together (QCFuse Fig. 8)."""
    named = [{**row, "of": "qcfuse"} for row in rows]
    return lines(named, x="k", y="recall", by="of", xlabel="layers scored together", ylabel="recall at 10%", ax=ax)


def _named(row: Row) -> str:
    ratio = f" {row['ratio']:g}" if "ratio" in row and 0 < row["ratio"] < 1 else ""
    link = f", load {row['load_share']:g}" if row.get("load_share") else ""
    return f"{row['method']}{ratio}{link}"


def _shades(names: Sequence[Any]) -> dict[Any, tuple[str, str]]:
    """Fill and hatch of each name; names of one family share the colour."""
    used: dict[str, int] = {}
    shades = {}
    for name in names:
        fill = colour(str(name))
        shades[name] = fill, ("", "///", "...", "xxx")[used.get(fill, 0) % 4]
        used[fill] = used.get(fill, 0) + 1
    return shades


def _legend_above(ax: Axes, columns: int, handles: Sequence[Any]) -> None:
    """The legend above the axes, where it hides no bar."""
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "columnspacing": 1.0, "handlelength": 1.2}
    ax.legend(handles=list(handles), frameon=False, fontsize="small", ncols=columns, **place)


def _finish(ax: Axes, xlabel: str, ylabel: str) -> None:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.3)
    ax.set_axisbelow(True)
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        ax.legend(handles, labels, frameon=False, fontsize="small")


STAGE_COLOURS = {
    "prefill": "#000000",
    "select": "#e69f00",
    "fuse": "#0072b2",
    "query": "#009e73",
    "decode": "#999999",
    "encode": "#cc79a7",
}


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
