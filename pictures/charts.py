"""The charts: plain data in, a drawing out, independent of runs and silo folders.

Everything that is compared has a label in addition to its colour; the caller shortens long lists,
and mentions it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from coterie.pictures.parts import (
    ROUND,
    bare,
    legend,
    look,
    over_time,
    per_row,
    plain,
    write,
    write_beside,
)
from coterie.pictures.style import (
    INK,
    LIGHT,
    LINE,
    LOSS,
    MUTED,
    Drawing,
    Layout,
    canvas,
    shorten,
    text_width,
)

# ---------------------------------------------------------------- matrix


@dataclass(frozen=True)
class Band:
    """A group's rows in an ordered matrix: half-open."""

    label: str
    colour: str
    start: int
    stop: int


def matrix(
    values: NDArray[np.float64],
    names: Sequence[str],
    bands: Sequence[Band],
    layout: Layout,
    *,
    title: str,
    measure: str,
    limits: tuple[float, float],
) -> Drawing:
    """Draw a symmetric matrix, its rows ordered by group, each group framed.

    Args:
        values: (N, N); NaN if unknown.
        bands: the groups, in the order of the rows.
        measure: name of the numbers.
        limits: values at the ends of the colour scale; a negative first one is for cosines, which
            are most alike at 1, otherwise 0 is most alike.
    """
    count = len(names)
    named = count <= (14 if layout.narrow else 40)
    longest = 10 if layout.narrow else 24
    left = (
        max((text_width(shorten(n, longest), 11) for n in names), default=0) + 26 if named else 40
    )
    side = min(layout.width - left - (20 if layout.narrow else 120), max(count * 34, 220), 560)
    right = layout.width - left - side
    drawing, axes = canvas(layout, title, side + 78, left=left, right=right, top=16, bottom=62)
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=_alike(limits),
        norm=Normalize(*limits),
        interpolation="none",
        aspect="auto",
    )
    bare(axes)
    axes.set_xticks([])
    if named:
        axes.set_yticks(range(count), [shorten(name, longest) for name in names], color=INK)
        axes.tick_params(axis="y", pad=16)
    else:
        axes.set_yticks([])
    thickness = 6 * count / side
    for band in bands:
        long = band.stop - band.start
        first, middle = band.start - 0.5, band.start + long / 2 - 0.5
        side_bar = (-0.5 - 2 * thickness, first)
        axes.add_patch(Rectangle(side_bar, thickness, long, fc=band.colour, clip_on=False))
        axes.add_patch(Rectangle((first, first), long, long, fill=False, ec=band.colour, lw=2))
        if band.label and (named or long * side / count >= 14):
            bold = {"color": band.colour, "weight": "bold", "size": 13}
            below = count - 0.5 + 4 * count / side
            write(axes, middle, below, band.label, ha="center", va="top", **bold)
            if not named:
                write(axes, -0.5 - 3 * thickness, middle, band.label, ha="right", **bold)
    if named and side / count >= 30:
        for (row, column), value in np.ndenumerate(values):
            if row != column and math.isfinite(value):
                write(axes, column, row, f"{value:.2f}", ha="center", size=10.5)
    figure, width = drawing.figure, layout.width
    total = figure.get_figheight() * 72
    scale_width = min(140 if layout.narrow else 220, side)
    scale_axes = figure.add_axes((left / width, 26 / total, scale_width / width, 9 / total))
    bar = figure.colorbar(image, cax=scale_axes, orientation="horizontal")
    bar.outline.set_visible(False)
    bar.set_ticks([limits[0], 0, limits[1]] if limits[0] < 0 else [limits[0], limits[1]])
    scale_axes.tick_params(length=0, labelsize=11)
    beside = 1 + 12 / scale_width
    write(scale_axes, beside, 0.5, measure, transform=scale_axes.transAxes, color=MUTED)
    return drawing


def _alike(limits: tuple[float, float]) -> LinearSegmentedColormap:
    """Return colours by strength over the page's background: blue if alike, orange if opposed."""
    blue, orange = to_rgb(LIGHT["g0"]), to_rgb(LIGHT["g1"])
    if limits[0] < 0:
        colours = [(*orange, 0.85), (*orange, 0.0), (*blue, 0.0), (*blue, 0.72)]
        return LinearSegmentedColormap.from_list(
            "alike", list(zip((0, 0.5, 0.5, 1), colours, strict=True))
        )
    return LinearSegmentedColormap.from_list("alike", [(*blue, 0.72), (*blue, 0.0)])


# ---------------------------------------------------------------- per silo


@dataclass(frozen=True)
class Outcome:
    """A silo's errors, shares in [0, 1], or NaN if unknown."""

    silo: str
    group: str
    colour: str
    alone: float
    together: float
    common: float

    @property
    def gain(self) -> float:
        """The improvement of the group over local training; positive is better."""
        return self.alone - self.together


MARKS = (
    ("common", "global", "D", 30, MUTED),
    ("together", "group", "o", 50, None),
    ("alone", "local", "o", 95, INK),
)
"""Marks of an outcome's errors: field, name, marker, size, line colour; None: filled."""


def on_own_data(label: str) -> str:
    """Return ``error on the site's own test data, %`` for ``error, %``."""
    what, comma, unit = label.partition(", ")
    return f"{what} on the site's own test data{comma}{unit}"


def outcomes(
    rows: Sequence[Outcome],
    layout: Layout,
    *,
    title: str,
    label: str = "error, %",
    scale: float = 100.0,
) -> Drawing:
    """Draw every silo's error alone, in its group and in the global model, with its gain."""
    gained = any(math.isfinite(row.gain) for row in rows)
    drawing, axes, pixel = per_row(
        [row.silo for row in rows],
        layout,
        title,
        unit=on_own_data(label),
        more=108,
        beside=34,
        right=62 if gained else 16,
        top=58,
    )
    shown = [value for row in rows for value in (row.alone, row.together, row.common)]
    top = max([scale * v for v in shown if math.isfinite(v)], default=1.0)
    axes.set_xlim(-0.02 * top, 1.04 * top or 1.0)
    axes.tick_params(axis="y", pad=18)
    at_edge: dict[str, Any] = {"transform": axes.get_yaxis_transform()}
    for y, row in enumerate(rows):
        loses = row.gain < 0
        if math.isfinite(row.gain):
            axes.plot(
                [scale * row.alone, scale * row.together],
                [y, y],
                color=LOSS if loses else row.colour,
                lw=2.5,
                ls=(0, (2, 1.2)) if loses else "-",
                zorder=2,
                solid_capstyle="butt",
            )
            style = {"color": LOSS, "weight": "bold"} if loses else {}
            text = gain_text(row.gain, scale)
            write(axes, 1 + 56 * pixel, y, text, ha="right", size=12, **style, **at_edge)
        corner = (-14 * pixel, y - 0.5)
        axes.add_patch(Rectangle(corner, 6 * pixel, 1.0, fc=row.colour, clip_on=False, **at_edge))
        for error, _, marker, size, line in MARKS:
            if math.isfinite(value := getattr(row, error)):
                mark = look(marker, row.colour, line)
                axes.scatter([scale * value], [y], s=size, zorder=3, clip_on=False, **mark)
    if gained:
        under = {"ha": "right", "va": "bottom", "color": MUTED}
        write(axes, 1 + 56 * pixel, -0.75, "gain", **under, **at_edge)
    handles = [
        axes.scatter([], [], s=46, label=label, **look(marker, INK, line))
        for error, label, marker, _, line in reversed(MARKS)
        if any(math.isfinite(getattr(row, error)) for row in rows)
    ]
    legend(drawing, layout, handles)
    return drawing


# ---------------------------------------------------------------- over rounds


@dataclass(frozen=True)
class Curve:
    """Values over rounds. ``label`` is written at the end; without one the line is thin.

    ``thin`` makes the line thin even with a label. ``dots`` marks each value. ``stops`` draws a
    cross: the curve ends on purpose.
    """

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    label: str = ""
    tip: str = ""
    dashed: bool = False
    band: tuple[Sequence[float], Sequence[float]] | None = None
    stops: bool = False
    thin: bool = False
    dots: bool = False


def curves(
    lines: Sequence[Curve],
    layout: Layout,
    *,
    title: str,
    unit: str,
    x: str = ROUND,
    whole: bool = False,
) -> Drawing:
    """Draw lines with labels at their ends, and bands; ``whole`` shows whole numbers only."""
    longest = 14 if layout.narrow else 30
    room = max((text_width(shorten(c.label, longest), 12) for c in lines if c.label), default=0.0)
    height = 280 if layout.narrow else 400
    drawing, axes = over_time(layout, title, height, unit, x=x, right=room + 20, top=14)
    for line in lines:
        if line.band is not None:
            axes.fill_between(line.x, *line.band, color=line.colour, alpha=0.16, lw=0)
        (drawn,) = axes.plot(
            line.x,
            line.y,
            color=line.colour,
            lw=2.6 if line.label and not line.thin else 1.1,
            alpha=1.0 if line.label and not line.thin else 0.5,
            ls=(0, (5, 2)) if line.dashed else "-",
            zorder=3 if line.label else 2,
            marker="o" if line.dots or (len(line.x) == 1 and not line.stops) else None,
            ms=4,
        )
        if line.stops and len(line.x):
            end = (line.x[-1:], line.y[-1:])
            axes.scatter(*end, marker="X", s=64, fc=line.colour, ec="none", zorder=4)
        if line.tip:
            drawing.tip(drawn, line.tip)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.margins(x=0.01)
    if whole:
        axes.locator_params(axis="y", integer=True)
    _label_ends(axes, [line for line in lines if line.label and len(line.x)], height - 62, longest)
    return drawing


def _label_ends(axes: Axes, lines: Sequence[Curve], height: float, longest: int) -> None:
    low, high = axes.get_ylim()
    right = axes.get_xlim()[1]
    pixel = (high - low) / height
    ends = [(_last(line), line) for line in lines]
    wanted = sorted([(y, i) for i, (y, _) in enumerate(ends) if math.isfinite(y)])
    places = spread([y for y, _ in wanted], 15 * pixel, low + 6 * pixel, high - 6 * pixel)
    for (_, i), place in zip(wanted, places, strict=True):
        line = ends[i][1]
        weight = "normal" if line.thin else "bold"
        style = {"color": line.colour, "weight": weight, "annotation_clip": False}
        write_beside(axes, (right, place), 6, shorten(line.label, longest), **style)


def _last(line: Curve) -> float:
    known = [y for y in line.y if math.isfinite(y)]
    return known[-1] if known else math.nan


def spread(values: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Return ascending places at least ``distance`` apart, near ascending values, within bounds."""
    places: list[float] = []
    for value in values:
        places.append(max(value, places[-1] + distance) if places else max(value, low))
    over = places[-1] - high if places else 0.0
    if over > 0:
        ceiling = high
        for i in reversed(range(len(places))):
            places[i] = min(places[i], ceiling)
            ceiling = places[i] - distance
    return places


@dataclass(frozen=True)
class Bar:
    """A labelled row of parts that add up."""

    label: str
    colour: str
    parts: Mapping[str, float]


def bars(rows: Sequence[Bar], layout: Layout, *, title: str, unit: str) -> Drawing:
    """Draw horizontal bars with their total; later parts are lighter."""
    names = [row.label for row in rows]
    drawing, axes, _ = per_row(
        names, layout, title, unit=unit, more=92, beside=18, right=64, top=40
    )
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.parts))
    strength = dict(zip(kinds, np.linspace(0.9, 0.35, max(len(kinds), 2)), strict=False))
    widest = max((sum(row.parts.values()) for row in rows), default=0.0) or 1.0
    axes.set_xlim(0, widest * 1.02)
    for y, row in enumerate(rows):
        start = 0.0
        for kind, value in row.parts.items():
            axes.barh(
                y, value, left=start, height=0.62, color=row.colour, alpha=strength[kind], lw=0
            )
            start += value
        style = {"size": 11, "color": INK, "annotation_clip": False}
        write_beside(axes, (start, y), 6, _short_number(start), **style)
    if len(kinds) > 1:
        handles = [
            Rectangle((0, 0), 1, 1, fc=INK, alpha=strength[kind], label=kind) for kind in kinds
        ]
        legend(drawing, layout, handles)
    return drawing


@dataclass(frozen=True)
class Strip:
    """The distribution of one silo's samples over an axis, with a note next to its row.

    A bar is (from, to, share of its samples in [0, 1]); a share of None is hidden.
    """

    silo: str
    colour: str
    bars: Sequence[tuple[float, float, float | None]]
    note: str = ""


STRIP = 46
"""Height of a row of bars."""
MOST_SHARES = 8
"""The most categories whose shares are written as numbers."""


def strips(
    rows: Sequence[Strip],
    layout: Layout,
    *,
    title: str,
    unit: str,
    categories: Sequence[str] = (),
    spread_out: bool = False,
) -> Drawing:
    """Draw a row of bars for every silo over one axis: densities of intervals or category shares.

    Hidden values are a hatched band. ``unit`` names the axis, which is numeric without
    ``categories``; the bar of category i is from i to i + 1. ``spread_out`` makes the axis
    logarithmic; all bars then begin above 0.
    """
    shown = [shorten(row.silo, 12 if layout.narrow else 28) for row in rows]
    left = max(text_width(name, 12) for name in shown) + 18
    right = max(text_width(row.note, 11) for row in rows) + 14
    height = len(rows) * STRIP + 64
    drawing, axes = canvas(layout, title, height, left=left, right=right, top=14, bottom=50)
    axes.set_ylim(len(rows) - 0.9, -1)
    plain(axes, "x", x=unit)
    axes.set_yticks([y - 0.35 for y in range(len(rows))], shown, color=INK, size=12)
    if spread_out:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    ends = [end for row in rows for low, high, _ in row.bars for end in (low, high)]
    axes.set_xlim(min(ends, default=0.0), max(ends, default=1.0))
    for y, row in enumerate(rows):
        axes.axhline(y, color=LINE, lw=1)
        _draw_strip(drawing, axes, y, row, categories)
        if row.note:
            at = (1, y - 0.35)
            axes.annotate(row.note, at, xytext=(8, 0), textcoords="offset points", va="center",
                          xycoords=("axes fraction", "data"), size=11, color=MUTED,
                          annotation_clip=False)  # fmt: skip
    if categories:
        most = max(3, int((layout.width - left - right) / len(categories) / 7))
        names = [shorten(name, most) for name in categories]
        axes.set_xticks([i + 0.5 for i in range(len(names))], names)
        axes.grid(visible=False)
    return drawing


def _draw_strip(
    drawing: Drawing, axes: Axes, y: int, row: Strip, categories: Sequence[str]
) -> None:
    heights = [
        share / (1 if categories else high - low) if share is not None else 0.0
        for low, high, share in row.bars
    ]
    most = max(heights, default=0.0) or 1.0
    for (low, high, share), own in zip(row.bars, heights, strict=True):
        gap = 0.12 * (high - low) if categories else 0.0
        height = own if categories else own / most
        look: dict[str, Any] = {"color": row.colour, "alpha": 0.8, "lw": 0}
        text = "hidden, because few are in it" if share is None else f"{100 * share:.0f}%"
        if share is None:
            height, look = 0.12, {"fc": "none", "ec": MUTED, "hatch": "////", "lw": 0}
        (bar,) = axes.bar(
            low + gap, -0.85 * height, high - low - 2 * gap, bottom=y, align="edge", **look
        )
        if categories and share is not None and len(categories) <= MOST_SHARES:
            inside = height > 0.6  # above it, it would be in the row above
            style = {"ha": "center", "size": 10, "color": "white" if inside else MUTED}
            place = y - 0.85 * height + (0.03 if inside else -0.03)
            write(axes, (low + high) / 2, place, text, va="top" if inside else "bottom", **style)
        where = categories[int(low)] if categories else f"{low:.10g} to {high:.10g}"
        drawing.tip(bar, f"{row.silo}, {where}: {text}")


def gain_text(gain: float, scale: float) -> str:
    """Return a gain in percentage points, or with two figures in its unit; large ones whole."""
    if scale == 100:
        return signed(100 * gain)
    value = scale * gain
    text = (f"{value:+.2g}" if abs(value) < 99.5 else f"{value:+,.0f}").replace("-", "−")
    return "0" if text[1:] == "0" else text


def signed(value: float) -> str:
    """Return one decimal with its sign; zero has none."""
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def _short_number(value: float) -> str:
    """Return about three digits, never an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"
