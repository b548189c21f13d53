"""A table of one's own, CSV or Parquet: numeric and categorical columns.

Numbers are standardised with the mean and deviation of this silo's own training rows; these
stay at the silo, with its models. Categories are declared, so that a column of the model
means the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from coterie.tasks.base import ColumnScale, Option, Samples, TaskError, read_options
from coterie.tasks.own.declared import OPTIONS, Declaration, DeclaredTask, in_nfc

LARGEST = 1e100
"""Numbers beyond it are refused: their squares would overflow."""
SHOWN = 20
"""Columns of a file that an error names."""
ROUNDING = 1e-12
"""Numbers whose difference is a smaller share of them are the same."""


class TableDeclaration(Declaration):
    """``numeric``: names of columns. ``categorical``: name of a column → its values."""

    kind: Literal["table"]
    target: str
    numeric: tuple[str, ...] = ()
    categorical: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _columns_differ(self) -> TableDeclaration:
        columns = [self.target, *self.numeric, *self.categorical]
        if len(set(columns)) != len(columns):
            raise ValueError("a column is named twice among target, numeric and categorical")
        if len(columns) == 1:
            raise ValueError("there must be at least one numeric or categorical column")
        if not all(self.categorical.values()):
            raise ValueError("a categorical column needs at least one value")
        return self


@dataclass(frozen=True)
class Rows:
    """Of a table: numbers (n, numeric columns) with NaN where missing, and 0/1 (n, values)."""

    numbers: NDArray[np.float64]
    categories: NDArray[np.float32]
    y: NDArray[np.int64]

    def take(self, rows: NDArray[np.intp]) -> Rows:
        """These rows only."""
        return Rows(self.numbers[rows], self.categories[rows], self.y[rows])


class Table(DeclaredTask):
    """Rows with a class in the target column. Beside the options of every declared task:

    Options of a silo:
        separator: of a CSV file.
    """

    declaration: TableDeclaration
    options: Mapping[str, Option] = {**OPTIONS, "separator": ","}

    @property
    def shape(self) -> tuple[int, ...]:
        """Numeric columns, and one number per declared category."""
        return (
            len(self.declaration.numeric)
            + sum(len(values) for values in self.declaration.categorical.values()),
        )

    def expected(self) -> str:
        """See ``DeclaredTask``."""
        columns = [*self.declaration.numeric, *self.declaration.categorical]
        return (
            f"a .csv or .parquet file with target column {self.declaration.target!r} and columns "
            f"{', '.join(columns)}"
        )

    def read(self, place: Path, options: Mapping[str, Any]) -> Rows:
        """Read the declared columns and no others."""
        table = self._table(place, str(options["separator"]), (self.declaration.target,))
        target = _texts(table, self.declaration.target, place)
        if None in target:
            raise TaskError(
                f"{str(place)!r} has no value in target column {self.declaration.target!r} in row "
                f"{target.index(None) + 1} (and maybe others). Leave such rows out of the file."
            )
        y = self.labels([str(value) for value in target], str(place))
        return Rows(*self._columns(table, place), y)

    def samples(self, train: Rows, test: Rows) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Standardise by the training rows; a missing number becomes their mean."""
        scale = self.scale_of(train)
        return _scaled(train, scale), _scaled(test, scale)

    def scale_of(self, train: Rows) -> ColumnScale:
        """Mean and deviation of the training rows, unless a kept model brings its own."""
        return _scale(train.numbers) if self.scale is None else self.scale

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """The rows of a table; it needs no target column.

        The scale is ``self.scale``, else that of the silo's own training rows: its ``data`` must
        then still be there.

        Raises:
            TaskError: a column is missing, or something cannot be read.
        """
        chosen = read_options(self.name, options, self.options)
        scale = self.scale
        if scale is None:
            scale = self.scale_of(self.read_both(chosen)[0])
        self._notes = []
        table = self._table(file, str(chosen["separator"]), ())
        rows = Rows(*self._columns(table, file), np.zeros(len(table), np.int64))
        return Samples(_scaled(rows, scale), notes=tuple(self._notes))

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        """See ``Task``: the column of every number that goes in, in order."""
        columns: list[dict[str, Any]] = [{"column": name} for name in self.declaration.numeric]
        for column, (mean, width) in zip(columns, self.scale or (), strict=self.scale is not None):
            column |= {"mean": mean, "deviation": width}
        columns += [
            {"column": name, "category": value}
            for name, values in self.declaration.categorical.items()
            for value in values
        ]
        assert len(columns) == self.shape[0], "every input must be told"
        return {
            "numbers": "(value − mean) / deviation; 0 where the value is missing",
            "categories": "1 if the column has this category, else 0",
            "columns": [{"input": i, **column} for i, column in enumerate(columns)],
        }

    def _columns(self, table: Any, place: Path) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Numbers and one-hot categories of all rows."""
        numbers = np.empty((len(table), len(self.declaration.numeric)))
        for i, column in enumerate(self.declaration.numeric):
            numbers[:, i] = self._numbers(table, column, place)
        blocks = [
            self._one_hot(_texts(table, column, place), column, values, place)
            for column, values in self.declaration.categorical.items()
        ]
        categories = np.concatenate(blocks, axis=1) if blocks else np.empty((len(table), 0))
        return numbers, categories.astype(np.float32)

    def _table(self, place: Path, separator: str, target: tuple[str, ...]) -> Any:
        import pyarrow as pa
        from pyarrow import csv, parquet

        texts = [*target, *self.declaration.categorical]
        columns = [*texts, *self.declaration.numeric]
        try:
            if place.suffix.lower() in (".parquet", ".pq"):
                if not place.is_file():
                    return _with_rows(parquet.read_table(place, columns=columns), place)
                called = _called(columns, parquet.read_schema(place).names, place)
                table = parquet.read_table(place, columns=list(called.values()))
                return _with_rows(table.select(list(called.values())), place, names=list(called))
            if place.suffix.lower() not in (".csv", ".tsv", ".txt"):
                raise TaskError(f"{str(place)!r} is neither .csv nor .parquet.")
            parsing = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
            with csv.open_csv(place, parse_options=parsing) as opened:
                called = _called(columns, opened.schema.names, place, separator)
            types = {called[name]: pa.string() for name in texts}
            types |= {called[name]: pa.float64() for name in self.declaration.numeric}
            # NA and the like stand for a missing number; in a text they may be a class or category.
            table = csv.read_csv(
                place,
                parse_options=parsing,
                convert_options=csv.ConvertOptions(
                    column_types=types, include_columns=list(types), strings_can_be_null=False
                ),
            )
            return _with_rows(table, place, names=columns)
        except (pa.ArrowException, OSError, TypeError, ValueError) as error:
            if isinstance(error, TaskError):
                raise
            raise TaskError(
                f"{str(place)!r} cannot be read: {error}. Expected {self.expected()}."
            ) from None

    def _numbers(self, table: Any, column: str, place: Path) -> NDArray[np.float64]:
        import pyarrow as pa

        found = _column(table, column, place)
        try:
            cast = (_numerals(found) if pa.types.is_string(found.type) else found).cast(
                pa.float64()
            )
        except pa.ArrowException as error:
            raise TaskError(
                f"numeric column {column!r} of {str(place)!r} holds something else: {error}."
            ) from None
        values: NDArray[np.float64] = cast.to_numpy().astype(np.float64)
        if (large := np.abs(values) > LARGEST).any():
            raise TaskError(
                f"numeric column {column!r} of {str(place)!r} holds infinite values, or some "
                f"beyond {LARGEST:g}, in row {int(large.argmax()) + 1} (and maybe others). Correct "
                "them, or leave the field empty: it counts as missing."
            )
        missing = int(np.isnan(values).sum())
        if missing:
            self._notes.append(f"{column}: {missing} missing in {place.name}, taken as the mean")
        return values

    def _one_hot(
        self, found: list[str | None], column: str, values: tuple[str, ...], place: Path
    ) -> NDArray[np.float32]:
        numbers = {value: i for i, value in enumerate(values)}
        number = {value: numbers.get(in_nfc(value)) for value in set(found) if value is not None}
        block = np.zeros((len(found), len(values)), np.float32)
        other = 0
        for row, value in enumerate(found):
            column_of = None if value is None else number[value]
            if column_of is None:
                other += 1
            else:
                block[row, column_of] = 1
        if other:
            self._notes.append(
                f"{column}: {other} missing or not declared in {place.name}, taken as none of them"
            )
        return block


def _scale(numbers: NDArray[np.float64]) -> ColumnScale:
    """Mean and deviation of training rows (n, columns), without what is missing."""
    present = np.isfinite(numbers)
    count = np.maximum(present.sum(axis=0), 1)
    mean = np.where(present, numbers, 0).sum(axis=0) / count
    square = np.where(present, (numbers - mean) ** 2, 0).sum(axis=0) / count
    low = np.where(present, numbers, np.inf).min(axis=0)
    high = np.where(present, numbers, -np.inf).max(axis=0)
    # A constant's deviation is not 0 but what rounding its mean leaves.
    constant = high - low <= ROUNDING * np.maximum(np.abs(low), np.abs(high))
    width = np.where(constant, 1.0, np.sqrt(square))
    found: ColumnScale = np.stack([mean, width], axis=1).tolist()
    return found


def _scaled(rows: Rows, scale: ColumnScale) -> NDArray[np.float32]:
    """Standardise; what is missing becomes the mean."""
    mean, width = np.array(scale).reshape(-1, 2).T
    standard = np.nan_to_num((rows.numbers - mean) / width, nan=0.0)
    return np.concatenate([standard.astype(np.float32), rows.categories], axis=1)


def _numerals(texts: Any) -> Any:
    """Texts of a Parquet column, with null for what is missing where a CSV file says so."""
    import pyarrow as pa
    from pyarrow import compute, csv

    texts = compute.utf8_trim_whitespace(texts)
    missing = compute.is_in(texts, value_set=pa.array(csv.ConvertOptions().null_values))
    return compute.if_else(missing, None, texts)


def _called(
    columns: Sequence[str], found: Sequence[str], place: Path, separator: str = ""
) -> dict[str, str]:
    """Declared columns, and what the file calls them: it may spell the same characters otherwise.

    Raises:
        TaskError: the file has none of that name, or two.
    """
    spelled: dict[str, list[str]] = {}
    for name in found:
        spelled.setdefault(in_nfc(name), []).append(name)
    called = {}
    for column in columns:
        same = spelled.get(column, [])
        if len(same) > 1:
            raise TaskError(
                f"{str(place)!r} has {len(same)} columns named {column!r}. Rename or remove all "
                "but the one that is meant."
            )
        if not same:
            has = ", ".join(map(repr, found[:SHOWN])) + (", …" if len(found) > SHOWN else "")
            how = f", separated by {separator!r} (the silo's option separator)" * bool(separator)
            raise TaskError(f"{str(place)!r} has no column {column!r}. Its columns{how}: {has}.")
        called[column] = same[0]
    return called


def _with_rows(table: Any, place: Path, *, names: Sequence[str] = ()) -> Any:
    """The table, with these names for its columns; empty: as it calls them."""
    if not len(table):
        raise TaskError(f"{str(place)!r} has no rows.")
    return table.rename_columns(list(names)) if names else table


def _column(table: Any, column: str, place: Path) -> Any:
    if column not in table.column_names:
        raise TaskError(f"{str(place)!r} has no column {column!r}.")
    return table.column(column)


def _texts(table: Any, column: str, place: Path) -> list[str | None]:
    import pyarrow as pa

    try:
        found: list[str | None] = _column(table, column, place).cast(pa.string()).to_pylist()
    except pa.ArrowException as error:
        raise TaskError(
            f"column {column!r} of {str(place)!r} must hold one text or number a row: {error}."
        ) from None
    return [value if value else None for value in found]
