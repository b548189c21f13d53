"""The charts: plain data in, a drawing out, independent of runs and silo folders.

Everything that is compared has a label in addition to its colour; the caller shortens long lists,
and mentions it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from coterie.pictures.style import LIGHT, Drawing, Layout, canvas, shorten, text_width

INK, MUTED, LINE, ALONE, LOSS = (LIGHT[n] for n in ("ink", "muted", "line", "alone", "loss"))
ROW = 22


def _legend(drawing: Drawing, layout: Layout, handles: Sequence[Any]) -> None:
    height = drawing.figure.get_figheight() * 72
    drawing.figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(4 / layout.width, 1 - layout.title_room / height),
        ncols=len(handles),
        handletextpad=0.3,
        handlelength=1.0,
        handleheight=0.9,
        columnspacing=1.0 if layout.narrow else 1.8,
        borderaxespad=0.0,
    )


def _bare(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


def _plain(axes: Axes, grid: Literal["x", "y", "both"], *, x: str, y: str = "") -> None:
    """Set the axes' names, and replace superfluous lines by a grid below the marks."""
    axes.grid(axis=grid)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(grid == "y")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _per_row(
    names: Sequence[str],
    layout: Layout,
    title: str,
    *,
    unit: str,
    more: float,
    beside: float,
    right: float,
    top: float,
) -> tuple[Drawing, Axes, float]:
    """Return axes with a row for every name, and the share of their width that a pixel takes.

    ``more`` is the height in addition to the rows, ``beside`` the room between a name and its row.
    """
    shown = [shorten(name, 12 if layout.narrow else 28) for name in names]
    left = max(text_width(name, 12) for name in shown) + beside
    height = len(names) * ROW + more
    drawing, axes = canvas(layout, title, height, left=left, right=right, top=top, bottom=50)
    axes.set_ylim(len(names) - 0.4, -0.6)
    _plain(axes, "x", x=unit)
    axes.set_yticks(range(len(names)), shown, color=INK, size=12)
    return drawing, axes, 1 / (layout.width - left - right)


def _over_rounds(
    layout: Layout, title: str, height: float, unit: str, *, right: float, top: float
) -> tuple[Drawing, Axes]:
    drawing, axes = canvas(layout, title, height, left=52, right=right, top=top, bottom=48)
    _plain(axes, "y", x="round", y=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins="auto"))
    return drawing, axes


def _look(marker: str, colour: str, line: str | None) -> dict[str, Any]:
    return {"marker": marker, "fc": "none" if line else colour, "ec": line or colour, "lw": 1.5}


def _write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write text, by default vertically centred on its point, small and dark."""
    usual: dict[str, Any] = {"va": "center", "size": 11, "color": INK}
    axes.text(x, y, text, **(usual | style))


def _write_beside(
    axes: Axes, point: tuple[float, float], pixels: float, text: str, **style: Any
) -> None:
    """Write text a number of pixels to the right of a point, or to its left if negative."""
    axes.annotate(text, point, xytext=(pixels, 0), textcoords="offset points", va="center", **style)


# ---------------------------------------------------------------- groups over rounds


@dataclass(frozen=True)
class Block:
    """A group at one time. ``label`` is empty, and the colour grey, for a silo that is alone."""

    label: str
    colour: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A range of rounds with the same groups, its blocks from top to bottom."""

    label: str
    blocks: tuple[Block, ...]
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class _Place(NamedTuple):
    top: float
    block: int


def alluvial(columns: Sequence[Column], layout: Layout, *, title: str, threads: bool) -> Drawing:
    """Draw the groups over time, from left to right, in at least one column.

    With ``threads`` there is one named thread per silo, otherwise one stream per pair of groups.
    """
    longest = 12 if layout.narrow else 26
    counts = [sum(len(b.members) for b in column.blocks) for column in columns]
    gap = 0.55 if threads else 0.3 * max(counts) / max(max(len(c.blocks) for c in columns) - 1, 1)
    gap = min(gap, max(counts) / 12)
    extents = [n + gap * (len(c.blocks) - 1) for n, c in zip(counts, columns, strict=True)]
    extent = max(extents)
    height = max(extent * 17, 120) if threads else 460
    names = [name for block in columns[-1].blocks for name in block.members]
    ends = [_end_label(block, threads) for block in columns[-1].blocks]
    room = max(
        (text_width(shorten(n, longest), 11) for n in names) if threads else [0.0], default=0.0
    )
    side = max((text_width(text, 12) for text in ends), default=0.0)
    drawing, axes = canvas(
        layout, title, height + 58, left=14, right=room + side + 34, top=36, bottom=22
    )
    _bare(axes)
    axes.set_yticks([])
    axes.set_xticks([])
    last = max(len(columns) - 1, 1)
    unit = (layout.width - room - side - 48) / (last + 0.0)
    bar = min(0.22, 9 / unit) if len(columns) > 1 else 0.05
    axes.set_xlim(-bar, last + bar)
    axes.set_ylim(extent, 0)
    flow = _Flow(drawing, axes, bar, unit, extent, threads)
    layers = [
        _placed(column, gap, (extent - own) / 2)
        for column, own in zip(columns, extents, strict=True)
    ]
    for x, (before, after) in enumerate(pairwise(layers)):
        flow.draw_ribbons(x, before, after, columns[x + 1])
    fits = all(text_width(column.label, 11) < unit - 6 for column in columns)
    small: dict[str, Any] = {"va": "bottom", "color": MUTED}
    for x, (column, layer) in enumerate(zip(columns, layers, strict=True)):
        flow.draw_bars(x, column, layer)
        label = column.label if fits else column.label.partition("–")[0]
        _write(axes, x, -0.02 * extent, label, ha="center", **small)
        flow.write_comings(x, column, layer)
    first = "rounds" if fits else "from round"
    _write(axes, 0, 1 + 23 / height, first, transform=axes.transAxes, **small)
    flow.write_ends(len(columns) - 1, columns[-1], layers[-1], longest, room)
    return drawing


def _placed(column: Column, gap: float, top: float) -> dict[str, _Place]:
    places = {}
    for number, block in enumerate(column.blocks):
        for name in block.members:
            places[name] = _Place(top, number)
            top += 1.0
        top += gap
    return places


@dataclass(frozen=True)
class _Flow:
    """Axes with one unit from column to column, and one for every silo.

    Attributes:
        bar: width of a column's bars.
        unit: pixels from column to column.
        extent: height of the highest column.
    """

    drawing: Drawing
    axes: Axes
    bar: float
    unit: float
    extent: float
    threads: bool

    def draw_bars(self, x: float, column: Column, layer: Mapping[str, _Place]) -> None:
        for block in column.blocks:
            if not block.members:
                continue
            corner = x - self.bar / 2, layer[block.members[0]].top + 0.06
            patch = Rectangle(corner, self.bar, len(block.members) - 0.12, fc=block.colour)
            who = f"group {block.label}" if block.label else "alone"
            self.drawing.tip(
                self.axes.add_patch(patch),
                f"rounds {column.label}, {who}: {', '.join(block.members[:40])}",
            )

    def draw_ribbons(
        self, x: float, before: Mapping[str, _Place], after: Mapping[str, _Place], column: Column
    ) -> None:
        """Draw the streams to the next column: one per silo, or one per pair of blocks."""
        streams: dict[tuple[object, ...], list[str]] = {}
        for name in after:
            if name in before:
                key = (name,) if self.threads else (before[name].block, after[name].block)
                streams.setdefault(key, []).append(name)
        inset = 0.06 if self.threads else 0.0
        for names in streams.values():
            for part in _contiguous(names, before, after):
                start, stop = before[part[0]], after[part[0]]
                shape = _band(
                    x + self.bar / 2,
                    x + 1 - self.bar / 2,
                    start.top + inset,
                    stop.top + inset,
                    len(part) - 2 * inset,
                )
                colour = column.blocks[stop.block].colour
                patch = self.axes.add_patch(PathPatch(shape, fc=colour, alpha=0.42, lw=0))
                if self.threads:
                    self.drawing.tip(patch, part[0])

    def write_comings(self, x: float, column: Column, layer: Mapping[str, _Place]) -> None:
        """Write which silos join with this column and leave after it."""
        if not self.threads:
            counts = (("+", len(column.joined)), ("−", len(column.left)))
            text = " ".join(f"{sign}{count}" for sign, count in counts if count)
            _write(self.axes, x, 1.02 * self.extent, text, ha="center", va="top")
            return
        for name in column.joined:
            self._remark(x - self.bar * 0.8, layer.get(name), ("joins ", "+ "), "right")
        for name in column.left:
            texts = (f" {shorten(name, 20)} leaves", f" {shorten(name, 8)} ×", " ×")
            self._remark(x + self.bar * 0.8, layer.get(name), texts, "left")

    def _remark(self, x: float, place: _Place | None, texts: Sequence[str], side: str) -> None:
        """Write the longest text that fits before the next column; the last one always does."""
        if place is None:
            return
        fitting = [text for text in texts if text_width(text, 10.5) < self.unit - 16]
        text = (fitting or texts[-1:])[0]
        _write(self.axes, x, place.top + 0.5, text, ha=side, size=10.5, style="italic")

    def write_ends(
        self, x: float, column: Column, layer: Mapping[str, _Place], longest: int, room: float
    ) -> None:
        start = x + self.bar / 2 + 8 / self.unit
        beside = start + (room + 8) / self.unit if self.threads else start
        for block in column.blocks:
            for name in block.members if self.threads else ():
                _write(self.axes, start, layer[name].top + 0.5, shorten(name, longest))
            label = _end_label(block, self.threads)
            if label and block.members:
                middle = layer[block.members[0]].top + len(block.members) / 2
                bold = {"size": 13, "color": block.colour, "weight": "bold"}
                _write(self.axes, beside, middle, label, **bold)


def _contiguous(
    names: Sequence[str], before: Mapping[str, _Place], after: Mapping[str, _Place]
) -> list[list[str]]:
    """Return groups of silos that are adjacent on both sides."""
    runs: list[list[str]] = []
    for name in sorted(names, key=lambda n: before[n].top):
        joins = runs and all(
            abs(layer[name].top - layer[runs[-1][-1]].top - 1) < 1e-9 for layer in (before, after)
        )
        if joins:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _band(x0: float, x1: float, y0: float, y1: float, height: float) -> Outline:
    middle = (x0 + x1) / 2
    there = [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]
    back = [(x, y + height) for x, y in reversed(there)]
    curve = [Outline.MOVETO, *[Outline.CURVE4] * 3]
    closed = [*curve, Outline.LINETO, *curve[1:], Outline.CLOSEPOLY]
    return Outline([*there, *back, there[0]], closed)


def _end_label(block: Block, threads: bool) -> str:
    if block.label:
        return block.label if threads else f"{block.label} · {len(block.members)}"
    return ""


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
    _bare(axes)
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
            _write(axes, middle, below, band.label, ha="center", va="top", **bold)
            if not named:
                _write(axes, -0.5 - 3 * thickness, middle, band.label, ha="right", **bold)
    if named and side / count >= 30:
        for (row, column), value in np.ndenumerate(values):
            if row != column and math.isfinite(value):
                _write(axes, column, row, f"{value:.2f}", ha="center", size=10.5)
    figure, width = drawing.figure, layout.width
    total = figure.get_figheight() * 72
    scale_width = min(140 if layout.narrow else 220, side)
    scale_axes = figure.add_axes((left / width, 26 / total, scale_width / width, 9 / total))
    bar = figure.colorbar(image, cax=scale_axes, orientation="horizontal")
    bar.outline.set_visible(False)
    bar.set_ticks([limits[0], 0, limits[1]] if limits[0] < 0 else [limits[0], limits[1]])
    scale_axes.tick_params(length=0, labelsize=11)
    beside = 1 + 12 / scale_width
    _write(scale_axes, beside, 0.5, measure, transform=scale_axes.transAxes, color=MUTED)
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
    ("common", "one for all", "D", 30, MUTED),
    ("together", "in its group", "o", 50, None),
    ("alone", "alone", "o", 95, INK),
)
"""Marks of an outcome's errors: field, name, marker, size, line colour; None: filled."""


def on_own_data(label: str) -> str:
    """Return ``error on the silo's own test data, %`` for ``error, %``."""
    what, comma, unit = label.partition(", ")
    return f"{what} on the silo's own test data{comma}{unit}"


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
    drawing, axes, pixel = _per_row(
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
            _write(axes, 1 + 56 * pixel, y, text, ha="right", size=12, **style, **at_edge)
        corner = (-14 * pixel, y - 0.5)
        axes.add_patch(Rectangle(corner, 6 * pixel, 1.0, fc=row.colour, clip_on=False, **at_edge))
        for error, _, marker, size, line in MARKS:
            if math.isfinite(value := getattr(row, error)):
                look = _look(marker, row.colour, line)
                axes.scatter([scale * value], [y], s=size, zorder=3, clip_on=False, **look)
    if gained:
        under = {"ha": "right", "va": "bottom", "color": MUTED}
        _write(axes, 1 + 56 * pixel, -0.75, "gain", **under, **at_edge)
    handles = [
        axes.scatter([], [], s=46, label=label, **_look(marker, INK, line))
        for error, label, marker, _, line in reversed(MARKS)
        if any(math.isfinite(getattr(row, error)) for row in rows)
    ]
    _legend(drawing, layout, handles)
    return drawing


# ---------------------------------------------------------------- over rounds


@dataclass(frozen=True)
class Curve:
    """Values over rounds. ``label`` is written at the end; without one the line is thin.

    ``thin`` makes the line thin even with a label. ``stops`` draws a cross: the curve ends on
    purpose.
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


def curves(
    lines: Sequence[Curve], layout: Layout, *, title: str, unit: str, whole: bool = False
) -> Drawing:
    """Draw lines with labels at their ends, and bands; ``whole`` shows whole numbers only."""
    longest = 14 if layout.narrow else 30
    room = max((text_width(shorten(c.label, longest), 12) for c in lines if c.label), default=0.0)
    height = 280 if layout.narrow else 400
    drawing, axes = _over_rounds(layout, title, height, unit, right=room + 20, top=14)
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
            marker="o" if len(line.x) == 1 and not line.stops else None,
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
        _write_beside(axes, (right, place), 6, shorten(line.label, longest), **style)


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
    drawing, axes, _ = _per_row(
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
        _write_beside(axes, (start, y), 6, _short_number(start), **style)
    if len(kinds) > 1:
        handles = [
            Rectangle((0, 0), 1, 1, fc=INK, alpha=strength[kind], label=kind) for kind in kinds
        ]
        _legend(drawing, layout, handles)
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
MOST_SHARES = 8
"""The most categories whose shares are written as numbers."""
"""Height of a row of bars."""


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
    _plain(axes, "x", x=unit)
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
        if share is None:
            height, look = 0.12, {"fc": "none", "ec": MUTED, "hatch": "////", "lw": 0}
        (bar,) = axes.bar(
            low + gap, -0.85 * height, high - low - 2 * gap, bottom=y, align="edge", **look
        )
        if categories and share is not None and len(categories) <= MOST_SHARES:
            inside = height > 0.6  # above it, it would be in the row above
            style = {"ha": "center", "size": 10, "color": "white" if inside else MUTED}
            place = y - 0.85 * height + (0.03 if inside else -0.03)
            text = f"{100 * share:.0f} %"
            _write(axes, (low + high) / 2, place, text, va="top" if inside else "bottom", **style)
        where = categories[int(low)] if categories else f"{low:g} to {high:g}"
        drawing.tip(bar, f"{row.silo}, {where}: {_share(share)}")


def _share(share: float | None) -> str:
    return "hidden, because few are in it" if share is None else f"{100 * share:.0f} %"


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


# ---------------------------------------------------------------- in the plane
