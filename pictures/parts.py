"""Parts shared by several charts: axes, legends and positioned text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from coterie.pictures.style import INK, Drawing, Layout, canvas, shorten, text_width

ROW = 22
ROUND = "round"


def legend(drawing: Drawing, layout: Layout, handles: Sequence[Any]) -> None:
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


def bare(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


def plain(axes: Axes, grid: Literal["x", "y", "both"], *, x: str, y: str = "") -> None:
    """Label the axes, and replace unneeded lines by a grid below the marks."""
    axes.grid(axis=grid)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(grid == "y")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def per_row(
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
    """Return axes with one row per name, and the share of their width that a pixel takes.

    ``more`` is the height added to the rows, ``beside`` the gap between a name and its row.
    """
    shown = [shorten(name, 12 if layout.narrow else 28) for name in names]
    left = max(text_width(name, 12) for name in shown) + beside
    height = len(names) * ROW + more
    drawing, axes = canvas(layout, title, height, left=left, right=right, top=top, bottom=50)
    axes.set_ylim(len(names) - 0.4, -0.6)
    plain(axes, "x", x=unit)
    axes.set_yticks(range(len(names)), shown, color=INK, size=12)
    return drawing, axes, 1 / (layout.width - left - right)


def over_time(
    layout: Layout, title: str, height: float, unit: str, *, x: str, right: float, top: float
) -> tuple[Drawing, Axes]:
    """Return axes over rounds, or over the time ``x``."""
    drawing, axes = canvas(layout, title, height, left=52, right=right, top=top, bottom=48)
    plain(axes, "y", x=x, y=unit)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=x == ROUND, min_n_ticks=1))
    return drawing, axes


def look(marker: str, colour: str, line: str | None) -> dict[str, Any]:
    return {"marker": marker, "fc": "none" if line else colour, "ec": line or colour, "lw": 1.5}


def write(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write text at a point, by default vertically centred, small and dark."""
    usual: dict[str, Any] = {"va": "center", "size": 11, "color": INK}
    axes.text(x, y, text, **(usual | style))


def write_beside(
    axes: Axes, point: tuple[float, float], pixels: float, text: str, **style: Any
) -> None:
    """Write text ``pixels`` to the right of a point, or to its left if negative."""
    axes.annotate(text, point, xytext=(pixels, 0), textcoords="offset points", va="center", **style)
