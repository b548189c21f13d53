"""Random tables in random dialects with random quirks: read as they were meant, or refused with a
place and what to do; never fewer rows without a word.

``make test`` tries a hundred tables, ``make nightly`` 2,000.
"""

from __future__ import annotations

import bz2
import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.tasks import TaskError
from coterie.tasks.options import read_options
from coterie.tasks.own.declared import load_declared
from coterie.tasks.own.rows import Rows
from coterie.tasks.own.table import Table
from tests.tables import declaration

TASK = declaration("age", "crp", sex="fmü")
NAMES = ["note", "age", "crp", "sex", "ill"]
NOTES = [
    "",
    "plain",
    "two words",
    "a{s}b",
    'say "hi"',
    "line\nbreak",
    "\n",
    "ß µ €",
    "'",
    "x{s}\n{s}y",
]
QUIRKS = ["stray", "torn", "extra", "word", "code", "title", "footer", "empty", "cut", "name"]


class Written:
    """A table, and how one program writes it.

    Attributes:
        options: of the silo.
        numbers, sexes, ills: what each row means; NaN where missing.
        quirk: what is wrong with it, empty: nothing that the options do not say.
    """

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        pick, flip = self.pick, self.flip
        count = int(self.draw.integers(4, 30))
        self.separator = pick(",;\t|")
        self.decimal = pick(".," if self.separator != "," else ".")
        thousands = {".": ["", ",", " ", "'", "_"], ",": ["", ".", " ", "'"]}[self.decimal]
        self.thousands = pick([mark for mark in thousands if mark != self.separator])
        self.encoding = pick(["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1", "utf-16-le"])
        self.ends, self.packed = pick(["\n", "\r\n", "\r"]), pick(["", "", ".gz", ".bz2"])
        self.censored, self.mark = pick(["", "limit", "missing"]), pick(["", "%", "mg/l", "*"])
        self.quirk = pick(QUIRKS) if flip(0.4) else ""
        self.numbers = np.round(self.draw.normal(0, [5, 9e5], (count, 2)), 3)
        self.numbers[self.draw.random((count, 2)) < 0.1] = np.nan
        self.sexes = self.draw.integers(0, 3, count)
        self.ills = self.draw.permutation(np.arange(count) % 2)
        meant = zip(self.numbers, self.sexes, self.ills, strict=True)
        cells = [
            [self.note(), *map(self.number, two), "fmü"[sex], ("no", "yes")[ill]]
            for two, sex, ill in meant
        ]
        if self.censored:
            self.limit(cells)
        self.options: dict[str, Any] = {
            "separator": self.separator, "decimal": self.decimal, "thousands": self.thousands,
            "encoding": self.encoding, "missing": ["?", "-9"], "censored": self.censored,
            "ignore-marks": [self.mark] if self.mark else "",
        }  # fmt: skip
        self.text = self.lines(cells)

    def pick(self, among: Any) -> Any:
        return among[int(self.draw.integers(len(among)))]

    def flip(self, share: float = 0.5) -> bool:
        return bool(self.draw.random() < share)

    def note(self) -> str:
        note: str = self.pick(NOTES).format(s=self.separator)
        return note.replace("€", "") if self.encoding == "latin-1" else note

    def number(self, value: float) -> str:
        if np.isnan(value):
            return str(self.pick(["", "NA", "?", "-9", " "]))
        text = f"{value:,.3f}" if self.thousands else f"{value:.3f}"
        text = text.replace(",", "§").replace(".", self.decimal)
        unicode = self.encoding.startswith("utf")
        alike = {" ": "\u00a0\u202f" if unicode else "\u00a0", "'": "’'" if unicode else "'"}
        text = text.replace("§", self.pick(alike.get(self.thousands, self.thousands) or [""]))
        if unicode and self.flip(0.3):
            text = text.replace("-", "\u2212")
        if self.mark and self.flip(0.3):
            text += self.pick(["", " ", "\u00a0"]) + self.mark
        return self.pick(["", " "]) + text

    def limit(self, cells: list[list[str]]) -> None:
        """Put a sign before some numbers."""
        for row in np.flatnonzero(
            ~np.isnan(self.numbers[:, 1]) & (self.draw.random(len(cells)) < 0.3)
        ):
            cells[row][2] = self.pick(["<", "> ", "<="]) + cells[row][2].strip()
            self.numbers[row, 1] *= 1 if self.censored == "limit" else np.nan

    def lines(self, cells: list[list[str]]) -> str:
        """All lines, with what stands above and below them and behind each."""
        fields = [[self.quoted(cell) for cell in row] for row in cells]
        names = [self.pick(["", " "]) + name for name in NAMES]
        self.spoil(fields, names)
        rows = [self.separator.join(row) for row in [names, *fields]]
        behind = self.separator if self.flip(0.2) and self.quirk != "extra" else ""
        rows = [row + behind * bool(i or self.flip()) for i, row in enumerate(rows)]
        titles, footers = (int(self.draw.integers(3)) * self.flip(0.3) for _ in range(2))
        if self.flip(0.2):
            rows, titles = (
                [f"sep={self.separator}", *["A title"] * titles, *rows],
                titles and titles + 1,
            )
            self.options["separator"] = ","
        else:
            rows = ["A title"] * titles + rows
        rows += ["Total" + self.separator] * footers
        if self.quirk == "title":
            rows, titles = ["Another", *rows], 0
        rows += ["Total"] * (self.quirk == "footer")
        self.options |= {"skip": titles, "skip-last": footers}
        return self.ends.join(rows) + self.ends * int(self.draw.integers(1, 3))

    def quoted(self, cell: str) -> str:
        """In quotes where needed, and at times where not."""
        needs = any(mark in cell for mark in (self.separator, "\n", "\r", '"'))
        return '"' + cell.replace('"', '""') + '"' if needs or self.flip(0.1) else cell

    def spoil(self, fields: list[list[str]], names: list[str]) -> None:
        """Put a mistake into the rows, without a word in the options."""
        row = fields[int(self.draw.integers(len(fields)))]
        at = 1 + int(self.draw.integers(2))
        if self.quirk == "stray":
            row[0] = '"5 inch'
        elif self.quirk == "torn":
            row[0] = "torn\napart"
        elif self.quirk == "extra":
            row.insert(0, "extra")
        elif self.quirk == "word":
            row[at] = self.pick(["unknown", "1.2.3", "1,2,3 x", "<", "12 furlongs", "#"]).replace(
                self.separator, ""
            )
        elif self.quirk == "code":
            row[4] = "perhaps"
        elif self.quirk == "empty":
            row[4] = ""
        elif self.quirk == "name":
            names[at] = "AGE"

    def load(self, folder: Path) -> tuple[Rows, list[str]]:
        """What is read of it, with what is said of it."""
        place = folder / f"data.csv{self.packed}"
        raw = self.text.encode(self.encoding)
        packed = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[self.packed](raw)
        place.write_bytes(packed[: -9 if self.packed and self.quirk == "cut" else None])
        (folder / "study.toml").write_text(TASK)
        task = load_declared(folder / "study.toml")
        assert isinstance(task, Table)
        chosen = read_options(task.name, self.options, task.options)
        return task.read(place, chosen), task.notes() + task.warnings()


def check(seed: int, folder: Path) -> bool:
    """Whether it was read; it is as it was meant, or refused with a reason."""
    written = Written(seed)
    try:
        found, said = written.load(folder)
    except TaskError as error:
        assert written.quirk, f"refused without need: {error}"
        text = str(error)
        assert re.search("in row|in line|no column|cannot be read", text), text
        assert re.search("[Ss]et |[Mm]ap |[Ss]ay |Write |Where |Leave |add it|Expected ", text), (
            text
        )
        return False
    if len(found.y) != len(written.ills):
        assert any("rows of the table" in line for line in said), said
        return True
    np.testing.assert_array_equal(found.y, written.ills)
    np.testing.assert_array_equal(found.numbers, written.numbers)
    np.testing.assert_array_equal(found.categories.argmax(axis=1), written.sexes)
    assert (found.categories.sum(axis=1) == 1).all()
    return True


@pytest.mark.parametrize(
    "seeds",
    [
        range(100),
        *(
            pytest.param(range(start, start + 200), marks=pytest.mark.nightly)
            for start in range(100, 2100, 200)
        ),
    ],
)
def test_a_table_is_read_as_it_was_meant_or_refused_in_words(seeds: range, tmp_path: Path) -> None:
    done = [check(seed, tmp_path) for seed in seeds]
    assert 0.5 * len(done) < sum(done) < len(done), "some of each kind"
