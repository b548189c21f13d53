"""A self-contained page: pictures inline, no script, nothing that is fetched from anywhere.

Every picture is there twice, drawn for a wide and for a narrow window; a style sheet shows one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from coterie.pictures.style import (
    DARK,
    LIGHT,
    NARROW,
    WIDE,
    Drawing,
    Layout,
    css_variables,
    encode,
    inline_svg,
    settings,
)


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """One picture, drawn when it is needed.

    Attributes:
        key: short and unique; a file's name and the prefix of ids.
        title: what it shows.
        caption: how to read it, and what was left out to keep it readable.
        draw: makes it for a layout.
        table: the same in figures, or None.
    """

    key: str
    title: str
    caption: str
    draw: Callable[[Layout], Drawing]
    table: Table | None = None


@dataclass(frozen=True)
class Page:
    """What a page says, from top to bottom.

    Attributes:
        title: of the page.
        subtitle: one line below it.
        lead: the most important sentence.
        figures: short name → large number.
        warnings: what to look at before anything else.
        missing: what could not be shown, in words.
        pictures: in order.
        tables: title → table, below the pictures.
        commands: title → what to type.
    """

    title: str
    subtitle: str
    lead: str
    figures: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    missing: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)


def render(page: Page, *, live: str = "", body: str = "") -> str:
    """The whole page.

    Args:
        page: what it says.
        live: for a page that fills while it is open, the address of its body.
        body: what ``render_body`` gave, if that is known already.
    """
    script = (Path(__file__).parent / "live.js").read_text(encoding="utf-8") if live else ""
    return _filled(
        "page.html",
        page=page,
        body=Markup(body or render_body(page)),
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        live=live,
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def render_body(page: Page) -> str:
    """What is inside ``<main>``."""
    drawn = [(one, _inline(one, WIDE, "w"), _inline(one, NARROW, "n")) for one in page.pictures]
    return _filled("body.html", page=page, drawn=drawn)


def save(picture: Picture, kind: Literal["svg", "png"]) -> bytes:
    """One picture as a file of its own."""
    with settings():
        drawing = picture.draw(Layout(WIDE.width, titled=True))
        return encode(drawing, kind, title=picture.title)


def _inline(picture: Picture, layout: Layout, suffix: str) -> Markup:
    with settings():
        svg = inline_svg(
            picture.draw(layout),
            key=f"{picture.key}-{suffix}",
            title=picture.title,
            description=picture.caption,
        )
    return Markup(svg)  # the drawing escapes its texts


def _filled(template: str, **values: Any) -> str:
    text: str = _environment().get_template(template).render(**values)
    return text


@cache
def _environment() -> Any:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
