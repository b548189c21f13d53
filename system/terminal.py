"""Tables for terminals, files and pipes."""

from __future__ import annotations

from rich.console import Console

WIDE = 10_000
"""Columns of a table that no terminal shows: more than its longest line."""


def wide(console: Console, *, on_terminals: bool = False) -> Console:
    """The same output with room for every cell of a table.

    A file or a pipe has no width, and rich cuts names at 80 columns there. On a terminal a table
    folds; where it cannot (``on_terminals``), lines run on, but no figure is cut.
    """
    if console.is_terminal and not on_terminals:
        return console
    return Console(
        file=console.file,
        width=WIDE,
        quiet=console.quiet,
        force_terminal=console.is_terminal,
    )
