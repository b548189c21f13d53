"""A self-contained page: inline pictures, no script unless it is live, no external resources.

Every picture is drawn twice, for a wide and for a narrow window; a style sheet shows one.
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
    """Rows of text under a header; the first column names the row.

    ``cards`` shows each row as a card on a phone.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    cards: bool = False


@dataclass(frozen=True)
class Picture:
    """One picture, drawn on demand.

    Attributes:
        key: short and unique; the name of its file and the prefix of ids.
        caption: how to read it, and what was omitted to keep it readable.
        table: the figures of the picture, or None.
    """

    key: str
    title: str
    caption: str
    draw: Callable[[Layout], Drawing]
    table: Table | None = None


@dataclass(frozen=True)
class Fold:
    """A part of a page that opens on a click: a sentence, pictures, and tables by title."""

    key: str
    title: str
    text: str
    pictures: Sequence[Picture] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    open: bool = False


@dataclass(frozen=True)
class Page:
    """The content of a page, from top to bottom.

    Attributes:
        lead: the most important sentence.
        figures: short name → large number.
        warnings: what to look at first.
        missing: what could not be shown, for people.
        tables: title → table, below the pictures; those without rows are left out.
        commands: title → what to type.
        detail: sentences after the lead.
        notes: how to read the page, below the figures.
        links: text → id of a part; without any, all pictures and tables are linked.
        folds: below the tables.
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
    detail: str = ""
    notes: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    folds: Sequence[Fold] = ()

    def __post_init__(self) -> None:
        tables = {title: table for title, table in self.tables.items() if table.rows}
        object.__setattr__(self, "tables", tables)


def render(page: Page, *, live: str = "", body: str = "") -> str:
    """Return the whole page as HTML.

    ``live`` is the address of the body, for a page that is updated while it is open; ``body`` is a
    result of ``render_body``, if there is one already.
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
    """Return the content of ``<main>``."""
    pictures = [*page.pictures, *(one for fold in page.folds for one in fold.pictures)]
    drawn = {one.key: (_inline(one, WIDE, "w"), _inline(one, NARROW, "n")) for one in pictures}
    return _filled("body.html", page=page, drawn=drawn)


def save(picture: Picture, kind: Literal["svg", "png"]) -> bytes:
    """Return one picture as a separate file."""
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
