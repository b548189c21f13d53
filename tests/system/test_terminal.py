"""Tables where no terminal shows them."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from coterie.system.terminal import wide


def test_a_wide_console_cuts_no_cell_whatever_the_width_it_is_given() -> None:
    out = io.StringIO()
    narrow = Console(file=out, width=40)
    table = Table()
    for number in range(6):
        table.add_column(f"a long heading {number}", no_wrap=True)
    table.add_row(*[f"cell-{number}-of-the-row" for number in range(6)])
    wide(narrow).print(table)
    assert "…" not in out.getvalue() and "cell-5-of-the-row" in out.getvalue()
    quiet = Console(file=out, quiet=True)
    before = out.getvalue()
    wide(quiet).print(table)
    assert out.getvalue() == before
