"""The look of pictures, and the conversion of a drawing to SVG for a page, or to a file.

A drawing is made once in the light colours. Inside a page its colours become CSS variables, so that
the reader's light or dark setting decides; text keeps the page's font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from threading import Lock
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14171c"),
    "ink": ("#1b1f24", "#e9ebee"),
    "muted": ("#596170", "#a7afbb"),
    "line": ("#dde1e7", "#353c46"),
    "alone": ("#808691", "#858d99"),
    "loss": ("#b3261e", "#ff8a80"),
    "g0": ("#0b63a5", "#5caeee"),
    "g1": ("#bb5700", "#f3963f"),
    "g2": ("#00795b", "#3fc79d"),
    "g3": ("#a33b86", "#e48acb"),
    "g4": ("#826700", "#d6b83c"),
    "g5": ("#137f99", "#66d1e8"),
    "g6": ("#7a4a2b", "#cf9f80"),
    "g7": ("#5b4bb5", "#ab9eff"),
}
"""Role or group → its colour on a light and on a dark page."""
LIGHT, DARK = ({name: pair[i] for name, pair in COLOURS.items()} for i in (0, 1))
INK, MUTED, LINE, ALONE, LOSS = (LIGHT[n] for n in ("ink", "muted", "line", "alone", "loss"))
GROUPS = tuple(name for name in LIGHT if re.fullmatch(r"g\d", name))
"""Colours of groups; readers with colour blindness can use lightness and labels."""

FONT_SIZE = 12
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "coterie",
    "text.parse_math": False,  # a silo may be called $x$
    "font.family": "DejaVu Sans",
    "font.size": FONT_SIZE,
    "axes.edgecolor": LIGHT["line"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.labelsize": 11,
    "axes.titlecolor": LIGHT["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 1.0,
    "axes.unicode_minus": True,
    "axes.grid": False,
    "grid.color": LIGHT["line"],
    "grid.linewidth": 1.0,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "legend.labelcolor": LIGHT["muted"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "path.simplify": True,
}
_drawing = Lock()


@dataclass(frozen=True)
class Layout:
    """The size of a picture in CSS pixels, and whether it contains its title."""

    width: int
    titled: bool = False

    @property
    def narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.width < 600

    @property
    def title_room(self) -> int:
        """The height of the title, if the picture contains it."""
        return 34 if self.titled else 0


WIDE, NARROW = Layout(1000), Layout(350)


@dataclass
class Drawing:
    """A figure, and its tooltips by gid."""

    figure: Figure
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        gid = f"tip-{len(self.tips)}"
        artist.set_gid(gid)
        self.tips[gid] = text


def canvas(
    layout: Layout,
    title: str,
    height: float,
    *,
    left: float,
    right: float,
    top: float,
    bottom: float,
) -> tuple[Drawing, Axes]:
    """Return a drawing with one pair of axes, and the title above them if the layout has it.

    ``height`` and the margins are in pixels, without the title's.
    """
    width, height, top = layout.width, height + layout.title_room, top + layout.title_room
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, 1 - (top + bottom) / height)
    )
    if layout.titled:
        place = (12 / width, 1 - 24 / height)
        figure.text(*place, title, size=15, color=LIGHT["ink"], weight="bold")
    return Drawing(figure), axes


def css_variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the approximate width of a text in pixels."""
    return 0.6 * size * len(text)


def shorten(name: str, length: int) -> str:
    """Return a name cut in its middle; both ends distinguish silos."""
    if len(name) <= length:
        return name
    tail = (length - 1) // 2
    return f"{name[: length - 1 - tail]}…{name[-tail:] if tail else ''}"


@contextmanager
def settings() -> Iterator[None]:
    """Set matplotlib's global settings while a picture is drawn or written, one at a time."""
    with _drawing, matplotlib.rc_context(_SETTINGS):
        yield


def encode(drawing: Drawing, kind: Literal["svg", "png"], *, title: str) -> bytes:
    """Return a drawing as a file with its title, in the light colours."""
    buffer = io.BytesIO()
    metadata = {"Title": title} | ({"Date": None} if kind == "svg" else {})
    drawing.figure.savefig(
        buffer, format=kind, facecolor=LIGHT["paper"], dpi=144, metadata=metadata
    )
    return buffer.getvalue()


def inline_svg(drawing: Drawing, *, key: str, title: str, description: str) -> str:
    """Return an ``<svg>`` element for a page: labelled, with colour variables and unique ids."""
    buffer = io.StringIO()
    drawing.figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' id="([^"]+)"', lambda m: _id(drawing, key, m.group(1)), text)
    text = re.sub(r'(href="|url\()#', rf"\g<1>#{key}-", text)
    for gid, tip in drawing.tips.items():
        text = text.replace(
            f'<g id="{key}-{gid}">', f'<g id="{key}-{gid}"><title>{escape(tip)}</title>', 1
        )
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)  # the page's own
    for name, value in LIGHT.items():
        text = text.replace(value, f"var(--{name})")
    view = re.search(r'viewBox="([^"]+)"', text)
    assert view is not None, "matplotlib writes a view box"
    body = text[text.index(">") + 1 :]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{view.group(1)}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(title)}</title>'
        f'<desc id="{key}-d">{escape(description)}</desc>{body}'
    )


def _id(drawing: Drawing, key: str, name: str) -> str:
    """Keep only ids that something refers to: tips, clips, markers and hatches."""
    kept = name in drawing.tips or re.fullmatch(r"[pmih][0-9a-f]{10}|image[0-9a-f]+|C\d.*", name)
    return f' id="{key}-{name}"' if kept else ""
