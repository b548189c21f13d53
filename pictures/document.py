"""A document of facts under given headings, with blanks where people must write: Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coterie.pictures.page import Table

TO_WRITE = "**To be written:**"
"""Marks a blank."""


@dataclass(frozen=True)
class Section:
    """A section of a document.

    Attributes:
        point: where the law asks for it, such as "Annex IV, 2 (d)".
        facts: sentences.
        blanks: what people must write.
    """

    point: str
    title: str
    facts: Sequence[str] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    blanks: Sequence[str] = ()


def render_document(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the document as Markdown; texts from elsewhere cannot form markup."""
    lines = [f"# {escaped(title)}", "", *_sentences(lead)]
    for one in sections:
        lines += [f"## {one.point}: {escaped(one.title)}", "", *_sentences(one.facts)]
        for name, table in one.tables.items():
            if table.rows:
                lines += [f"**{escaped(name)}**", "", *_table(table), ""]
        for blank in one.blanks:
            lines += [f"> {TO_WRITE} {escaped(blank)}", ""]
    return "\n".join(lines)


def _sentences(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from (escaped(text), "")


def _table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(map(escaped, table.header))} |"
    yield f"|{'---|' * len(table.header)}"
    for row in table.rows:
        yield f"| {' | '.join(map(escaped, row))} |"


def escaped(text: str) -> str:
    """Return a text in which nothing is markup, on one line."""
    line = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>|#&$" else letter for letter in line)
