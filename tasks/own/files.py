"""Read columns of a CSV, Parquet or Feather file, and locate errors in them.

Rows are counted from 1, without the header. An error names a column, a row, and at most the value
there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError
from coterie.tasks.own.declared import in_nfc
from coterie.tasks.own.dialect import SEPARATORS, Dialect
from coterie.tasks.own.lines import BEYOND, COMPRESSIONS, Broken, Lines, broken_rows
from coterie.tasks.own.values import (
    SHOWN,
    Coded,
    Codes,
    Numbers,
    counted,
    first,
    shown,
    texts_of,
    without_rows,
)

__all__ = ["Contents", "beginnings", "first", "names_of", "raw_texts", "read_columns", "shown"]

log = logging.getLogger("coterie.tasks")

TEXTS = (".csv", ".tsv", ".txt")
BINARY = {".parquet": "parquet", ".pq": "parquet", ".feather": "ipc", ".arrow": "ipc"}
READABLE = (
    "A table is a .csv, .tsv or .txt file (also compressed: .csv.gz, .csv.bz2, .csv.zst), a "
    ".parquet, .feather or .arrow file, or a folder of .parquet files"
)
SHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers")
BLOCKS = (1 << 22, 1 << 26, (1 << 31) - 1)
"""Bytes of a CSV file read at once; a row must fit, so longer rows need more."""
ROWS = 1 << 16
"""Rows of a Parquet file read at once."""
FIRST_ROWS = 1000
"""Rows from which a column is judged."""
PAUSE_S = 3.0
"""Seconds between progress messages."""
LAST = 20
"""Maximum number of rows that may be a footer."""


@dataclass
class Contents:
    """Columns of a file by declared name, with notes and warnings on its rows."""

    num_rows: int = 0
    numbers: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    codes: dict[str, Coded] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return self.num_rows

    def texts(self, column: str) -> list[str | None]:
        """Return each row's meaning in a column of codes; None if missing."""
        return self.codes[column].all()


def read_columns(
    place: Path,
    columns: Sequence[str],
    dialect: Dialect,
    expected: str,
    *,
    numeric: Collection[str] = (),
) -> Contents:
    """Read these columns: those of ``numeric`` as numbers, the others as codes.

    Raises ``TaskError`` if a column or all rows are missing, or the file cannot be read.
    """
    import pyarrow as pa

    for block in BLOCKS:
        try:
            opened = _source(place)(place, dialect, columns)
            read = [
                (Numbers if name in numeric else Codes)(name, dialect, opened.about)
                for name in columns
            ]
            count = _fill(read, opened.batches(block), place)
            break
        except (pa.ArrowException, OSError, TypeError, ValueError, KeyError) as error:
            if "straddling" in str(error) and block != BLOCKS[-1]:
                continue
            if isinstance(error, TaskError):
                raise
            said = without_rows(str(error))
            raise TaskError(
                f"{str(place)!r} cannot be read: {said}. Expected {expected}."
            ) from None
    found = Contents(count)
    opened.finish(found)
    if not count:
        raise TaskError(f"{str(place)!r} has no rows.")
    for column in read:
        if isinstance(column, Numbers):
            column.refuse(repr(str(place)), count)
            found.numbers[column.column] = column.done()
            found.notes += [
                f"{column.column}: {counted(rows, 'value')} of {place.name} {what}"
                for what, rows in column.done_to.items()
            ]
        else:
            found.codes[column.column] = column.done()
    return found


def _fill(read: Sequence[Codes | Numbers], batches: Iterator[Sequence[Any]], place: Path) -> int:
    """Add every batch to the columns; return the number of rows."""
    import pyarrow as pa

    count, said = 0, time.monotonic()
    for parts in batches:
        for column, part in zip(read, parts, strict=True):
            try:
                column.add(part)
            except pa.ArrowException as error:
                raise _other_type(column, place, str(error)) from None
        count += len(parts[0])
        if time.monotonic() - said > PAUSE_S:
            log.info("reading %s: %s rows so far", place.name, f"{count:,}")
            said = time.monotonic()
    return count


def _other_type(column: Codes | Numbers, place: Path, said: str) -> TaskError:
    named, what = column.dialect.named(column.column), without_rows(said)
    if isinstance(column, Numbers):
        return TaskError(
            f"numeric column {named} of {str(place)!r} contains something else: {what}."
        )
    return TaskError(
        f"column {named} of {str(place)!r} must contain one text or number per row: {what}."
    )


def _kind(place: Path) -> str:
    """Return a file's format by its ending, or raise ``TaskError``; folders hold Parquet files."""
    *_, inner, outer = ("", "", *(suffix.lower() for suffix in place.suffixes))
    kind = inner if outer in COMPRESSIONS else outer
    if place.is_dir():
        return ".parquet"
    if kind in TEXTS or outer in BINARY:
        return kind
    if kind in SHEETS:
        raise TaskError(
            f"{str(place)!r} is a spreadsheet. In the program that wrote it, save it as CSV (in "
            'Excel: "CSV UTF-8"), and give that file as data.'
        )
    raise TaskError(f"{str(place)!r} has the extension {outer!r}. {READABLE}.")


def _source(place: Path) -> type[_Delimited | _Binary]:
    return _Delimited if _kind(place) in TEXTS else _Binary


class _Binary:
    """A Parquet or Feather file, or a folder of Parquet files."""

    def __init__(self, place: Path, dialect: Dialect, columns: Sequence[str]) -> None:
        from pyarrow import dataset, fs

        self.place, self.others, kind = place, [], BINARY[_kind(place)]
        form = dataset.ParquetFileFormat() if kind == "parquet" else dataset.IpcFileFormat()
        if place.is_dir():
            inside = [file for file in sorted(place.rglob("*")) if _counts(file, place)]
            paths = [file for file in inside if file.suffix.lower() in (".parquet", ".pq")]
            self.others = [file.name for file in inside if file not in paths]
            if not paths:
                raise TaskError(f"there are no .parquet files in {str(place)!r}. {READABLE}.")
            self.opened = dataset.dataset(
                [*map(str, paths)], format=form, partitioning="hive", partition_base_dir=str(place)
            )
            found = self.opened.schema.names
        else:
            self.opened = form.make_fragment(str(place), fs.LocalFileSystem())
            found = self.opened.physical_schema.names
        self.names = [*found]
        self.called = _called(columns, found, place, dialect)
        self.about = self.opened.count_rows()

    def batches(self, block: int) -> Iterator[Sequence[Any]]:
        """Yield the columns of some rows at a time, in the order of the file names.

        Each file is read with its own types: a column may have whole numbers in one of them, and
        fractions, texts or nothing in the next.
        """
        import pyarrow as pa
        from pyarrow import dataset

        parts = self.opened.get_fragments() if self.place.is_dir() else [self.opened]
        for part in parts:
            own = part.physical_schema
            of_folders = dataset.get_partition_keys(part.partition_expression)
            if lacking := [name for name in self.called if name not in {*own.names, *of_folders}]:
                raise TaskError(f"{part.path!r} has no column {lacking[0]!r}.")
            types = [
                (self.opened.schema if name in of_folders else own).field(name)
                for name in self.called
            ]
            for batch in part.to_batches(
                schema=pa.schema(types), columns=self.called, batch_size=ROWS, batch_readahead=2,
                use_threads=False,
            ):  # fmt: skip
                yield batch.columns

    def finish(self, found: Contents) -> None:
        """Note which files of a folder were left out."""
        if self.others:
            found.notes.append(
                f"{self.place.name}: without {counted(len(self.others), 'file')} with an "
                f"extension other than .parquet, such as {shown(self.others[0])}"
            )


def _counts(file: Path, folder: Path) -> bool:
    """Return whether a path is a data file, not a program's own file such as ``_SUCCESS``."""
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden


@dataclass
class _OddRows:
    """Rows of a CSV file whose number of fields differs from the header's."""

    count: int = 0
    first: Any = None
    last: int = 0

    def __call__(self, row: Any) -> str:
        self.first = self.first or row
        self.count, self.last = self.count + 1, row.number
        return "skip"


class _Delimited:
    """A CSV file; its columns are texts."""

    def __init__(self, place: Path, dialect: Dialect, columns: Sequence[str]) -> None:
        self.place, self.dialect, self.odd = place, dialect, _OddRows()
        try:
            self.lines = Lines(place, dialect)
        except UnicodeDecodeError:
            raise _no_text(place, dialect) from None
        names, self.about = self.lines.names, self.lines.about
        self.names = [name for name in names if name != BEYOND]
        self.called = _called(columns, names, place, dialect, self.lines)
        self.called += [BEYOND] * (BEYOND in names)

    def batches(self, block: int) -> Iterator[Sequence[Any]]:
        """Yield the columns of some rows at a time."""
        import pyarrow as pa
        from pyarrow import csv

        parsing = csv.ParseOptions(
            delimiter=self.lines.separator, quote_char=self.dialect.quote or False,
            newlines_in_values=bool(self.dialect.quote), invalid_row_handler=self.odd,
        )  # fmt: skip
        converting = csv.ConvertOptions(
            column_types=dict.fromkeys(self.called, pa.string()), include_columns=self.called,
            # NA and the like stand for a missing number; in a text they may be a class or category.
            strings_can_be_null=False,
        )  # fmt: skip
        # With threads pyarrow does not know the number of a row that it cannot read.
        reading = csv.ReadOptions(
            use_threads=False, block_size=block, column_names=self.lines.names
        )
        rows = 0
        try:
            with csv.open_csv(self.lines, reading, parsing, converting) as opened:
                for batch in opened:
                    columns = batch.columns
                    if BEYOND in self.called:
                        self._refuse_beyond(columns.pop(), rows)
                    rows += len(batch)
                    yield columns
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error):
                return
            if "UTF8" in str(error):
                raise _no_text(self.place, self.dialect) from None
            raise
        except UnicodeDecodeError:
            raise _no_text(self.place, self.dialect) from None

    def _refuse_beyond(self, column: Any, rows: int) -> None:
        from pyarrow import compute

        full = compute.not_equal(column, "").to_numpy(zero_copy_only=False)
        if full.any():
            raise TaskError(
                f"{str(self.place)!r} has a value behind its last column in row "
                f"{rows + first(full)}. Is a name missing in its header line?"
            )

    def finish(self, found: Contents) -> None:
        """Report rows that are not one line each.

        Raises ``TaskError`` for a wrong number of fields, or if a quote has swallowed rows.
        """
        records, name = found.num_rows + self.odd.count, self.place.name
        if self.lines.count > records:
            _note_broken(found, broken_rows(self.place, self.dialect), name)
        elif len(self.lines.names) == 1 and self.lines.empty:
            found.notes.append(f"{name}: left out {counted(self.lines.empty, 'empty line')}")
        if self.odd.count:
            stray = "".join(f" Is there a stray quote? {note}." for note in found.notes)
            raise TaskError(f"{str(self.place)!r} has {self._odd_rows(records)}{stray}")

    def _odd_rows(self, records: int) -> str:
        odd, separator = self.odd, self.lines.separator
        row, fields = odd.first.number, odd.first.actual_columns
        said = (
            f"{counted(fields, 'field')} in row {row}, where its header line has "
            f"{odd.first.expected_columns}, separated by {separator!r}"
        )
        if odd.count > 1:
            said += f"; {counted(odd.count - 1, 'more row')} with another number of fields"
        if odd.count == records - row + 1 <= min(LAST, records - 1):
            return said + f". If the file ends with a footer, set skip-last = {odd.count}."
        if odd.count == records:
            return said + (
                ". All rows differ from the header line: does it lack a name, or is it below a "
                "title? For lines above it, set skip."
            )
        return said + f'. Where {separator!r} is part of a value, the value must be in "quotes".'


def _note_broken(found: Contents, broken: Broken, name: str) -> None:
    if broken.rows:
        found.notes.append(
            f"{name}: line breaks in quotes in {counted(broken.rows, 'row')}, the first from line "
            f"{broken.line} of the file"
        )
    if broken.joined:
        found.warnings.append(
            f"{name}: {counted(broken.joined, 'quoted value')} with line breaks may be several "
            f"rows of the table (the first from line {broken.joined_line} of the file). If a quote "
            'there is an ordinary character, rows are lost: write it twice, or set quote = "" if '
            "nothing in the file is quoted"
        )


def _no_text(place: Path, dialect: Dialect) -> TaskError:
    encoding = dialect.encoding
    encoding = encoding.upper() if encoding.startswith("utf") else encoding
    return TaskError(
        f"{str(place)!r} is not {encoding}. Save it as UTF-8, or give its encoding with the "
        f'silo\'s option encoding, such as "{_likely(place)}".'
    )


def _likely(place: Path) -> str:
    """Guess the encoding of a file that is not UTF-8; in UTF-16 every other byte is 0."""
    with place.open("rb") as file:
        start = file.read(1 << 12)
    zeros = [start[half::2].count(0) for half in (0, 1)]
    return "cp1252" if not any(zeros) else ("utf-16-be", "utf-16-le")[zeros[1] > zeros[0]]


def _called(
    columns: Sequence[str],
    found: Sequence[str],
    place: Path,
    dialect: Dialect,
    lines: Lines | None = None,
) -> list[str]:
    """Return how the file spells these columns; Unicode form and outer spaces may differ.

    Raises ``TaskError`` if the file has no such column, or two.
    """
    wanted = [dialect.columns.get(column, column) for column in columns]
    spelled: dict[str, list[str]] = {}
    stripped: dict[str, list[str]] = {}
    for name in found:
        spelled.setdefault(in_nfc(name), []).append(name)
        stripped.setdefault(in_nfc(name).strip(), []).append(name)
    called = []
    for column in wanted:
        same = spelled.get(column) or stripped.get(column.strip(), [])
        if len(same) > 1:
            raise TaskError(
                f"{str(place)!r} has {len(same)} columns named {column!r}. Rename or remove all "
                "but the intended one."
            )
        if not same and lines and any("\ufffd" in name for name in found):
            raise _no_text(place, dialect)
        if not same:
            advice = _names_elsewhere(wanted, lines, place) or (
                f"Correct {column!r} under [data.columns] in silo.toml."
                if column in dialect.columns.values()
                else "If one of them is the column, map it under [data.columns] in silo.toml: "
                f'"ITS NAME" = "{column}".'
            )
            raise TaskError(_no_column(column, found, place, lines) + advice)
        called.append(same[0])
    return called


def _no_column(column: str, found: Sequence[str], place: Path, lines: Lines | None) -> str:
    has = ", ".join(shown(name) for name in found[:SHOWN] if name != BEYOND)
    has += ", …" if len(found) > SHOWN else ""
    how = (
        "" if lines is None else f", separated by {lines.separator!r} (the silo's option separator)"
    )
    return f"{str(place)!r} has no column {column!r}. Its columns{how}: {has}. "


def _names_elsewhere(wanted: Sequence[str], lines: Lines | None, place: Path) -> str:
    """Return settings with which the names would be found; empty if unknown."""
    if lines is None:
        return ""
    if any("\0" in name for name in lines.names):
        return f'It looks like UTF-16: set encoding = "{_likely(place)}".'
    for skip, line in enumerate(lines.looked):
        for separator in dict.fromkeys((lines.separator, *SEPARATORS)):
            names = {in_nfc(name).strip(' "') for name in line.split(separator)}
            if names.issuperset(wanted):
                other = f"separator = {_quoted(separator)}" * (separator != lines.separator)
                if not skip and other:
                    return f"Its separator seems to be {separator!r}: set {other}."
                also = f" and {other}" * bool(other)
                return f"Line {skip + 1} of the file has these names: set skip = {skip}{also}."
    found = lines.names
    alike = [s for s in SEPARATORS if len(found) == 1 and s != lines.separator and s in found[0]]
    return (
        f"Its separator seems to be {alike[0]!r}: set separator = {_quoted(alike[0])}."
        if alike
        else ""
    )


def _quoted(separator: str) -> str:
    return '"\\t"' if separator == "\t" else f'"{separator}"'


def raw_texts(place: Path, column: str, dialect: Dialect, expected: str) -> list[str | None]:
    """Return a column's texts as stored, by its name in the file.

    Raises ``TaskError`` if the column is missing or cannot be read.
    """
    return read_columns(place, [column], dialect.bare(), expected).texts(column)


def names_of(place: Path, dialect: Dialect) -> list[str]:
    """Return the names of all columns as stored, or raise ``TaskError`` if unreadable."""
    with _refusing(place):
        return _source(place)(place, dialect, ()).names


def beginnings(place: Path, columns: Sequence[str], dialect: Dialect) -> list[list[str] | None]:
    """Return each column's texts in the first rows, without empty ones; None for lists and similar.

    Raises ``TaskError`` if a column is missing or cannot be read.
    """
    with _refusing(place):
        parts = next(_source(place)(place, dialect, columns).batches(BLOCKS[1]), ())
        return [_first_texts(part[:FIRST_ROWS]) for part in parts]


def _first_texts(part: Any) -> list[str] | None:
    import pyarrow as pa

    try:
        return [text for text in texts_of(part).to_pylist() if text and text.strip()]
    except pa.ArrowException:
        return None


@contextmanager
def _refusing(place: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"{str(place)!r} cannot be read: {without_rows(str(error))}.") from None
