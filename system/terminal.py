"""Text and tables for terminals, files and pipes."""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 10_000
"""Columns for tables outside a terminal: more than their longest line."""
WITHOUT_TERMINAL, NARROWEST = 100, 40
"""Columns of text written to a file or pipe, and the fewest columns to wrap to."""
LEGIBLE = "coterie.legible"
"""Error handler for characters that an encoding lacks, as in ``open(…, errors=LEGIBLE)``."""
PLAIN = dict(zip("–—×·→", "--x.>", strict=True))
"""Signs in our tables and sentences → their ASCII replacement."""
shown = SimpleNamespace(quiet=False, verbose=False, still=False)
"""What the options of every command ask for; ``still``: lines instead of a display that moves."""


def _legible(error: UnicodeError) -> tuple[str, int]:
    """Replace bytes that are not UTF-8 by escapes, other characters by similar signs or ``?``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    shown = (
        f"\\x{ord(one) - 0xDC00:02x}" if "\udc80" <= one <= "\udcff" else PLAIN.get(one, "?")
        for one in lost
    )
    return "".join(shown), error.end


codecs.register_error(LEGIBLE, _legible)


def legible(text: str) -> str:
    """Return the text with only characters that UTF-8 has."""
    return text.encode(errors=LEGIBLE).decode()


def show_everything() -> None:
    """Let standard output and error accept every text, whatever the terminal's encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=LEGIBLE)


def use_color(when: str) -> None:
    """Colour output ``always``, as on a terminal, or ``never``; any other word changes nothing.

    It sets the environment variables that every rich console and child process reads.
    """
    if when == "never":
        os.environ["NO_COLOR"] = "1"
    elif when == "always":
        os.environ.pop("NO_COLOR", None)
        os.environ["FORCE_COLOR"] = "1"


def width_of(stream: TextIO) -> int:
    """Return the number of columns for text on this stream."""
    if not stream.isatty():
        return WITHOUT_TERMINAL
    return max(shutil.get_terminal_size((WITHOUT_TERMINAL, 0)).columns, NARROWEST)


def wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines folded between words, with continuation lines indented to the text of their line.

    The text begins after two or more blanks, or after the colon of an indented line; otherwise
    continuation lines are indented by two more columns than the line.
    """
    for line in lines:
        label = re.match(r" *\S+(?: \S+)* {2,}|  +[^:]{1,20}: +", line)
        indent = len(label[0]) if label else len(line) - len(line.lstrip()) + 2
        yield textwrap.fill(
            line,
            width,
            subsequent_indent=" " * min(indent, width // 2),
            break_long_words=False,
            break_on_hyphens=False,
        )


def wide(console: Console, *, on_terminals: bool = False) -> Console:
    """Return the same console with room for every cell of a table.

    A file or a pipe has no width, and rich cuts names at 80 columns there. On a terminal a table
    folds; if it cannot (``on_terminals``), lines overflow, but no figure is cut.
    """
    from rich.console import Console

    if console.is_terminal and not on_terminals:
        return console
    return Console(
        file=console.file, width=WIDE, quiet=console.quiet, force_terminal=console.is_terminal
    )


def print_table(
    console: Console,
    header: Iterable[str],
    rows: Iterable[Iterable[object]],
    *,
    folding: Collection[str] | None = None,
    title: str | None = None,
) -> None:
    """Print rows in columns without lines between them.

    ``folding`` names the columns that fold where there is no room, by default all.
    """
    from rich.table import Column, Table
    from rich.text import Text

    folds = {one: folding is None or one in folding for one in header}
    columns = [
        Column(one, no_wrap=not fold, overflow="fold" if fold else "ellipsis")
        for one, fold in folds.items()
    ]
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1))
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    wide(console).print(table, soft_wrap=False)


def aside(console: Console | None = None) -> Console:
    """Return the console for what is not a result, which ``--quiet`` silences."""
    from rich.console import Console

    return Console(quiet=True) if shown.quiet else console or Console()


def say(console: Console, text: str, *, highlight: bool = True) -> None:
    """Print a line unchanged, however long."""
    console.print(text, markup=False, highlight=highlight, soft_wrap=True)
