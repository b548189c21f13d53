"""The charts of estimates: values with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.pictures.parts import legend, look, per_row
from coterie.pictures.style import INK, MUTED, Drawing, Layout


@dataclass(frozen=True)
class Range:
    """A labelled value with an interval; ``whole`` if it is of several others together.

    ``partly`` is the same value partly pooled, and the ends of its interval.
    """

    label: str
    value: float
    low: float
    high: float
    colour: str
    whole: bool = False
    partly: tuple[float, float, float] | None = None


MARKS = (("alone", "s", MUTED), ("partly pooled", "o", INK), ("of all together", "D", MUTED))
"""Marks of ``ranges``: label, marker, colour."""


def ranges(rows: Sequence[Range], layout: Layout, *, title: str, unit: str) -> Drawing:
    """Draw a forest plot: a row for each value with its interval, and a line at zero."""
    names = [row.label for row in rows]
    several = any(row.partly for row in rows)
    drawing, axes, _ = per_row(
        names, layout, title, unit=unit, more=92, beside=18, right=20, top=40
    )
    axes.axvline(0, color=MUTED, lw=1, zorder=0)
    for y, row in enumerate(rows):
        at = y - 0.2 if row.partly else y
        axes.plot((row.low, row.high), (at, at), color=row.colour, lw=1.5, solid_capstyle="butt")
        marker = "D" if row.whole else "s"
        axes.scatter([row.value], [at], s=52 if row.whole else 28, marker=marker, color=row.colour)
        if row.partly:
            value, *ends = row.partly
            axes.plot(ends, (y + 0.2, y + 0.2), color=INK, lw=1.2, solid_capstyle="butt")
            axes.scatter([value], [y + 0.2], s=22, marker="o", color=INK)
    if several:
        handles = [
            axes.scatter([], [], s=30, label=label, **look(marker, colour, None))
            for label, marker, colour in MARKS
        ]
        legend(drawing, layout, handles)
    return drawing
