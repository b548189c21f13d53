"""Text and tables, on terminals of any width and encoding and where there is none."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.engine.synthetic import write_run
from coterie.client.home.files import LEDGER
from coterie.client.home.folder import create
from coterie.system.terminal import LEGIBLE, legible, wide, wrapped


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


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        (b"R\xf6ntgen.png", "utf-8", "R\\xf6ntgen.png"),
        ("Röntgen.png".encode(), "utf-8", "Röntgen.png"),
        ("1×8 – 3 · ε".encode(), "ascii", "1x8 - 3 . ?"),
        ("µ €".encode(), "latin-1", "µ ?"),
    ],
)
def test_what_an_encoding_does_not_have_stays_legible(
    text: bytes, encoding: str, shown: str
) -> None:
    assert os.fsdecode(text).encode(encoding, LEGIBLE).decode(encoding) == shown
    if encoding == "utf-8":
        assert legible(os.fsdecode(text)) == shown


def test_lines_are_folded_between_words_below_their_text() -> None:
    lines = ["label     one two three", "  who knows: some of it", "", "plain words", "x" * 30]
    assert "\n".join(wrapped(lines, 20)).split("\n") == [
        "label     one two",
        "          three",
        "  who knows: some of",
        "          it",
        "",
        "plain words",
        "x" * 30,
    ]


COMMANDS = """
import sys
from coterie.server.cli.main import main
for line in sys.argv[1:]:
    sys.argv = ["coterie", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (line, ended.code)
"""
ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
]


@pytest.mark.parametrize("more", [ASCII[0], pytest.param(ASCII[1], marks=pytest.mark.nightly)])
def test_commands_end_well_on_terminals_without_utf_8(more: dict[str, str], tmp_path: Path) -> None:
    create(tmp_path / "a", "a")
    entry = {"run": "r", "type": "train", "round": 3, "bytes": 5, "values": {}}
    (tmp_path / "a" / LEDGER).write_text(json.dumps(entry) + "\n")
    write_run(tmp_path / "hcct-1", num_silos=3, num_rounds=2, strategy="hcct")
    keys = 'silos = 2\n[split]\nkind = "iid"\n[run]\nrounds = 1\nstrategy = "hcct"\n'
    (tmp_path / "two.toml").write_text(keys)
    lines = [
        "silo check --home a",
        "silo ledger --home a",
        "runs explain hcct-1 --runs-dir .",
        "runs --runs-dir .",
        *(["simulate two.toml --runs-dir runs"] if more == ASCII[1] else []),
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *lines],
        cwd=tmp_path, env={**os.environ, **more},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1x8x8" in done.stdout and done.stdout.isascii() and "Traceback" not in done.stderr
