"""Text and tables for terminals, files and pipes."""

from __future__ import annotations

import codecs
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 10_000
"""Columns of a table that no terminal shows: more than its longest line."""
WITHOUT_TERMINAL, NARROWEST = 100, 40
"""Columns of text that goes into a file or a pipe, and the fewest that text is wrapped to."""
LEGIBLE = "coterie.legible"
"""How to encode what an encoding does not have, as ``open(…, errors=LEGIBLE)`` takes it."""
PLAIN = dict(zip("–—×·→", "--x.>", strict=True))
"""Signs of our tables and sentences, and what stands for them in ASCII."""


def _legible(error: UnicodeError) -> tuple[str, int]:
    """A byte of a file's name that is not UTF-8 as in ``\\xfc``; of other characters a sign like
    it, or ``?``."""
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
    """The text with only characters that UTF-8 has."""
    return text.encode(errors=LEGIBLE).decode()


def show_everything() -> None:
    """Let standard output and error take every text, whatever the terminal's encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=LEGIBLE)


def width_of(stream: TextIO) -> int:
    """How many columns text on this stream may have."""
    if not stream.isatty():
        return WITHOUT_TERMINAL
    return max(shutil.get_terminal_size((WITHOUT_TERMINAL, 0)).columns, NARROWEST)


def wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    """Lines folded between words; what follows stands below where the text of its line begins.

    That is after two blanks or more, or after the colon of an indented line; else two columns
    further in than the line.
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
    """The same output with room for every cell of a table.

    A file or a pipe has no width, and rich cuts names at 80 columns there. On a terminal a table
    folds; where it cannot (``on_terminals``), lines run on, but no figure is cut.
    """
    from rich.console import Console

    if console.is_terminal and not on_terminals:
        return console
    return Console(
        file=console.file,
        width=WIDE,
        quiet=console.quiet,
        force_terminal=console.is_terminal,
    )
