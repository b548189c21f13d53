"""Alluvial chart of the groups over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

from coterie.pictures.parts import bare, write
from coterie.pictures.style import MUTED, Drawing, Layout, canvas, shorten, text_width


@dataclass(frozen=True)
class Block:
    """A group in one column; a silo that is alone has an empty ``label`` and a grey colour."""

    label: str
    colour: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A range of rounds with the same groups; ``blocks`` are ordered from top to bottom."""

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
    begun = threads and len(columns) > 1 and not layout.narrow
    first_names = [name for block in columns[0].blocks for name in block.members]
    left = max((text_width(shorten(n, longest), 11) for n in first_names if begun), default=0) + 14
    right = room + side + 34
    drawing, axes = canvas(layout, title, height + 58, left=left, right=right, top=36, bottom=22)
    bare(axes)
    axes.set_yticks([])
    axes.set_xticks([])
    last = max(len(columns) - 1, 1)
    unit = (layout.width - left - right) / last
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
        write(axes, x, -0.02 * extent, label, ha="center", **small)
        flow.write_comings(x, column, layer)
    first = "rounds" if fits else "from round"
    write(axes, 0, 1 + 23 / height, first, transform=axes.transAxes, **small)
    for name in first_names if begun else ():
        at = -bar / 2 - 8 / unit, layers[0][name].top + 0.5
        write(axes, *at, shorten(name, longest), ha="right")
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
    """Axes whose units are one column horizontally and one silo vertically.

    ``unit`` is in pixels from column to column; ``extent`` is the height of the highest column.
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
            write(self.axes, x, 1.02 * self.extent, text, ha="center", va="top")
            return
        for name in column.joined:
            texts = (f"{shorten(name, 20)} joins ", f"{shorten(name, 8)} + ", "+ ")
            self._remark(x - self.bar * 0.8, layer.get(name), texts, "right")
        for name in column.left:
            texts = (f" {shorten(name, 20)} leaves", f" {shorten(name, 8)} ×", " ×")
            self._remark(x + self.bar * 0.8, layer.get(name), texts, "left")

    def _remark(self, x: float, place: _Place | None, texts: Sequence[str], side: str) -> None:
        """Write the longest text that fits before the next column, or else the last one."""
        if place is None:
            return
        fitting = [text for text in texts if text_width(text, 10.5) < self.unit - 16]
        text = (fitting or texts[-1:])[0]
        write(self.axes, x, place.top + 0.5, text, ha=side, size=10.5, style="italic")

    def write_ends(
        self, x: float, column: Column, layer: Mapping[str, _Place], longest: int, room: float
    ) -> None:
        start = x + self.bar / 2 + 8 / self.unit
        beside = start + (room + 8) / self.unit if self.threads else start
        for block in column.blocks:
            for name in block.members if self.threads else ():
                write(self.axes, start, layer[name].top + 0.5, shorten(name, longest))
            label = _end_label(block, self.threads)
            if label and block.members:
                middle = layer[block.members[0]].top + len(block.members) / 2
                bold = {"size": 13, "color": block.colour, "weight": "bold"}
                write(self.axes, beside, middle, label, **bold)


def _contiguous(
    names: Sequence[str], before: Mapping[str, _Place], after: Mapping[str, _Place]
) -> list[list[str]]:
    """Return groups of silos that are adjacent in both columns."""
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
