"""Columns of a CSV or Parquet file, and where in them something is wrong.

Rows are counted from 1, without the line of names. An error says a column, a row, and at most what
stands there in this column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError
from coterie.tasks.own.declared import in_nfc
from coterie.tasks.own.dialect import SEPARATORS, Dialect

SHOWN = 20
"""Columns of a file that an error names."""
LONGEST = 24
"""Characters of a code that an error shows."""


def read_columns(place: Path, columns: Sequence[str], dialect: Dialect, expected: str) -> Any:
    """A pyarrow table of these columns, under their declared names.

    Columns of a CSV file are texts; those of a Parquet file are what they are there.

    Raises:
        TaskError: a column or all rows are missing, or the file cannot be read.
    """
    import pyarrow as pa
    from pyarrow import parquet

    wanted = [dialect.columns.get(column, column) for column in columns]
    try:
        if place.suffix.lower() in (".parquet", ".pq"):
            if place.is_file():
                called = _called(wanted, parquet.read_schema(place).names, place, dialect)
                table = parquet.read_table(place, columns=called).select(called)
            else:
                table = parquet.read_table(place, columns=wanted).select(wanted)
        elif place.suffix.lower() in (".csv", ".tsv", ".txt"):
            table = _csv(place, wanted, dialect)
        else:
            raise TaskError(f"{str(place)!r} is neither .csv nor .parquet.")
    except (pa.ArrowException, OSError, TypeError, ValueError, KeyError) as error:
        if isinstance(error, TaskError):
            raise
        said = _without_rows(str(error))
        raise TaskError(f"{str(place)!r} cannot be read: {said}. Expected {expected}.") from None
    if not len(table):
        raise TaskError(f"{str(place)!r} has no rows.")
    return table.rename_columns(list(columns))


def _without_rows(text: str) -> str:
    """An error of pyarrow's without what it quotes of the file."""
    return re.split(r":\s|\n", text.removeprefix("CSV parse error: "))[0].rstrip(". ")


def _csv(place: Path, wanted: Sequence[str], dialect: Dialect) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    odd: list[Any] = []

    def keep(row: Any) -> str:
        odd.append(row)
        return "skip"

    parsing = csv.ParseOptions(
        delimiter=dialect.separator, newlines_in_values=True, invalid_row_handler=keep
    )
    # With threads pyarrow does not know the number of a row that it cannot read.
    reading = csv.ReadOptions(use_threads=False, encoding=dialect.encoding)
    try:
        with csv.open_csv(place, read_options=reading, parse_options=parsing) as opened:
            names = opened.schema.names
    except UnicodeDecodeError:
        raise _no_text(place, dialect) from None
    called = _called(wanted, names, place, dialect, dialect.separator)
    odd.clear()
    converting = csv.ConvertOptions(
        column_types=dict.fromkeys(called, pa.string()),
        include_columns=called,
        # NA and the like stand for a missing number; in a text they may be a class or category.
        strings_can_be_null=False,
    )
    try:
        table = csv.read_csv(
            place, read_options=reading, parse_options=parsing, convert_options=converting
        )
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            raise _no_text(place, dialect) from None
        raise
    if odd:
        first = odd[0]
        row = f"row {first.number - 1}" if first.number else "a row"
        raise TaskError(
            f"{str(place)!r} has {first.actual_columns} fields in {row}, where its first line has "
            f"{first.expected_columns}, separated by {dialect.separator!r}; so have {len(odd) - 1} "
            f"more rows. Where {dialect.separator!r} is part of a value, the value must be in "
            '"quotes".'
        )
    return table


def _no_text(place: Path, dialect: Dialect) -> TaskError:
    return TaskError(
        f"{str(place)!r} is not {dialect.encoding}. Save it as UTF-8, or say how it is written "
        'with the silo\'s option encoding, such as "cp1252".'
    )


def _called(
    columns: Sequence[str],
    found: Sequence[str],
    place: Path,
    dialect: Dialect,
    separator: str = "",
) -> list[str]:
    """How the file spells these columns: the same characters may be composed or decomposed.

    Raises:
        TaskError: the file has none of that name, or two.
    """
    spelled: dict[str, list[str]] = {}
    for name in found:
        spelled.setdefault(in_nfc(name), []).append(name)
    called = []
    for column in columns:
        same = spelled.get(column, [])
        if len(same) > 1:
            raise TaskError(
                f"{str(place)!r} has {len(same)} columns named {column!r}. Rename or remove all "
                "but the one that is meant."
            )
        if not same:
            own = column in dialect.columns.values()
            raise _no_column(column, found, place, separator, renamed=own)
        called.append(same[0])
    return called


def _no_column(
    column: str, found: Sequence[str], place: Path, separator: str, *, renamed: bool
) -> TaskError:
    has = ", ".join(map(repr, found[:SHOWN])) + (", …" if len(found) > SHOWN else "")
    how = f", separated by {separator!r} (the silo's option separator)" * bool(separator)
    advice = (
        f"Correct {column!r} under [data.columns] in silo.toml."
        if renamed
        else "If one of them is meant, say so under [data.columns] in silo.toml: "
        f'"ITS NAME" = "{column}".'
    )
    other = [s for s in SEPARATORS if len(found) == 1 and s != separator and s in found[0]]
    if separator and other:
        advice = f"It looks separated by {other[0]!r}: set separator = {_quoted(other[0])}."
    return TaskError(f"{str(place)!r} has no column {column!r}. Its columns{how}: {has}. {advice}")


def _quoted(separator: str) -> str:
    return '"\\t"' if separator == "\t" else f'"{separator}"'


def shown(text: str) -> str:
    """A code, for people, cut where it is a long text."""
    return repr(text if len(text) <= LONGEST else text[:LONGEST] + "…")


def texts_of(table: Any, column: str, place: Path, dialect: Dialect) -> list[str | None]:
    """What each row means in this column; None where it is missing.

    Raises:
        TaskError: the column holds lists or the like.
    """
    found: list[str | None] = _meant(table, column, place, dialect).to_pylist()
    return found


def raw_texts(place: Path, column: str, dialect: Dialect, expected: str) -> list[str | None]:
    """A column of a file as it stands there, under its name in the file.

    Raises:
        TaskError: there is none, or it cannot be read.
    """
    plain = Dialect(dialect.separator, encoding=dialect.encoding)
    table = read_columns(place, [column], plain, expected)
    return texts_of(table, column, place, plain)


def _meant(table: Any, column: str, place: Path, dialect: Dialect) -> Any:
    import pyarrow as pa
    from pyarrow import compute

    try:
        texts = table.column(column).cast(pa.string()).combine_chunks()
        encoded = compute.dictionary_encode(texts)
    except pa.ArrowException as error:
        raise TaskError(
            f"column {dialect.named(column)} of {str(place)!r} must hold one text or number a row: "
            f"{_without_rows(str(error))}."
        ) from None
    means = [dialect.meant(column, text) for text in encoded.dictionary.to_pylist()]
    return pa.array(means, pa.string()).take(encoded.indices)


def numbers_of(table: Any, column: str, place: Path, dialect: Dialect) -> NDArray[np.float64]:
    """(n,) Numbers of a column, NaN where one is missing.

    Raises:
        TaskError: names the first row that has none.
    """
    import pyarrow as pa

    found = table.column(column)
    is_text = pa.types.is_string(found.type) or pa.types.is_large_string(found.type)
    if not (is_text or dialect.translates(column)):
        try:
            return _float(found)
        except pa.ArrowException as error:
            raise TaskError(
                f"numeric column {dialect.named(column)} of {str(place)!r} holds something else: "
                f"{_without_rows(str(error))}."
            ) from None
    texts = found.cast(pa.string()).combine_chunks()
    if dialect.translates(column):
        texts = _translated(texts, column, dialect)
    plain = _numerals(texts, dialect)
    try:
        return _float(plain)
    except pa.ArrowException:
        odd = {one.as_py() for one in plain.unique() if not _is_number(one)}
        row = next(i for i, one in enumerate(plain.to_pylist()) if one in odd)
        text = texts[row].as_py()
        comma = dialect.decimal == "." and re.fullmatch(r"\s*[+-]?[\d.]*,\d+\s*", text)
        raise TaskError(
            f"numeric column {dialect.named(column)} of {str(place)!r} holds {shown(text)} in row "
            f"{row + 1}, which is no number. "
            + (
                'If it has a decimal comma, set the silo\'s option decimal = ",".'
                if comma
                else "If it stands for a missing value, add it to the silo's option missing; if "
                f"for a number, to [data.codes.{column}]."
            )
        ) from None


def _translated(texts: Any, column: str, dialect: Dialect) -> Any:
    """Texts of which those that are codes say what they mean.

    Most numbers differ from each other: to look up each would take long.
    """
    import pyarrow as pa
    from pyarrow import compute

    forms = "|".join(f"{re.escape(code)}{dialect.nothing}?" for code in dialect.codes_of(column))
    coded = compute.fill_null(compute.match_substring_regex(texts, rf"^\s*({forms})\s*$"), False)
    means = [dialect.meant(column, text) for text in texts.filter(coded).to_pylist()]
    return compute.replace_with_mask(texts, coded, pa.array(means, pa.string()))


def _float(found: Any) -> NDArray[np.float64]:
    import pyarrow as pa

    values: NDArray[np.float64] = found.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values.astype(np.float64)


def _is_number(text: Any) -> bool:
    import pyarrow as pa

    try:
        text.cast(pa.float64())
    except pa.ArrowException:
        return False
    return True


def _numerals(texts: Any, dialect: Dialect) -> Any:
    """Texts with a decimal point and no thousands, and null for what says that it is missing."""
    import pyarrow as pa
    from pyarrow import compute, csv

    texts = compute.utf8_trim_whitespace(texts)
    missing = compute.is_in(texts, value_set=pa.array(csv.ConvertOptions().null_values))
    texts = compute.if_else(missing, None, texts)
    if mark := dialect.thousands:
        every, decimal = re.escape(mark), re.escape(dialect.decimal)
        grouped = compute.match_substring_regex(
            texts, rf"^[+-]?\d{{1,3}}({every}\d{{3}})+({decimal}\d*)?$"
        )
        texts = compute.if_else(grouped, compute.replace_substring(texts, mark, ""), texts)
    if dialect.decimal != ".":
        # A point that is left is no decimal point: 1.5 must not become 15.
        texts = compute.replace_substring(texts, ".", "?")
        texts = compute.replace_substring(texts, dialect.decimal, ".")
    return texts


def first(rows: NDArray[np.bool_] | Sequence[bool]) -> int:
    """Number of the first row that is so, from 1."""
    return int(np.argmax(rows)) + 1


def flags_of(table: Any, column: str, place: Path, dialect: Dialect) -> NDArray[np.float32]:
    """(n,) 0 or 1 of a column.

    Raises:
        TaskError: names the first row that has neither.
    """
    known = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0}
    found = texts_of(table, column, place, dialect)
    number: dict[str | None, float | None] = {
        text: known.get(dialect.code(text).lower()) for text in set(found) if text is not None
    }
    values = [number.get(text) for text in found]
    if None in values:
        row = values.index(None)
        text = found[row]
        raise TaskError(
            f"target column {dialect.named(column)} of {str(place)!r} must hold 0 or 1. Row "
            + (
                f"{row + 1} holds nothing: leave such rows out of the file."
                if text is None
                else f"{row + 1} holds {shown(text)}: say under [data.codes.{column}] in silo.toml "
                "what it means."
            )
        )
    return np.array(values, np.float32)


def names_of(place: Path, dialect: Dialect) -> list[str]:
    """Names of all columns of a file, as they stand there.

    Raises:
        TaskError: it cannot be read.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if place.suffix.lower() in (".parquet", ".pq"):
            return list(parquet.read_schema(place).names)
        parsing = csv.ParseOptions(
            delimiter=dialect.separator,
            newlines_in_values=True,
            invalid_row_handler=lambda row: "skip",
        )
        reading = csv.ReadOptions(use_threads=False, encoding=dialect.encoding)
        with csv.open_csv(place, read_options=reading, parse_options=parsing) as opened:
            return list(opened.schema.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = _without_rows(str(error))
        raise TaskError(f"{str(place)!r} cannot be read: {said}.") from None
