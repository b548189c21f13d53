"""Own data in a CSV or Parquet table, with numeric and categorical columns.

Numbers and real targets are standardised with the mean and deviation of the silo's own training
rows, which stay at the silo with its models. With ``scale = "federation"`` they come from the rows
of all silos that allow it, and the run supplies them. Categories are declared, so that each model
input means the same everywhere; how a silo writes them is its own setting
(``coterie.tasks.own.dialect``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import (
    Column,
    ColumnScale,
    Option,
    Persons,
    Samples,
    SiloData,
    TaskError,
)
from coterie.tasks.draws import number_persons
from coterie.tasks.options import place_of, read_options
from coterie.tasks.own import dialect, files, looks, whose
from coterie.tasks.own.declared import OPTIONS, DeclaredTask
from coterie.tasks.own.dialect import Dialect
from coterie.tasks.own.files import Contents
from coterie.tasks.own.rows import Rows, digest_of
from coterie.tasks.own.scaling import in_32_bits, scale_of, sums_of
from coterie.tasks.own.table_declaration import TableDeclaration
from coterie.tasks.own.targets import LabelColumns, NumberColumns
from coterie.tasks.own.values import read_flags
from coterie.tasks.problems import Survival

LARGEST = 1e100
"""Larger numbers are refused: their squares would overflow."""
MOST = 0.5
"""Largest share of undeclared values in a column; above it, it is probably a different column."""
BLOCK = 1 << 16
"""Rows scaled at once."""


class Table(DeclaredTask):
    """Rows with a target.

    These options add to those of every declared task; see ``coterie.tasks.own.dialect``.

    Options of a silo:
        separator, encoding, quote: of a CSV file.
        skip, skip-last: number of lines above the column names and below the last row.
        decimal, thousands: marks in numbers.
        columns: name in the file → declared name.
        codes: declared column → value in the file → meaning.
        missing: codes for a missing value, for every column or by column.
        censored: how to read ``<0.5``: ``limit`` or ``missing``.
        ignore-marks: texts next to a number to ignore, such as ``%``.
        pass-through: columns to copy from the prediction input to the answers.
        blocks: the column whose equal values are on one side of every split, such as the month.
    """

    declaration: TableDeclaration
    options: Mapping[str, Option] = {**OPTIONS, **dialect.OPTIONS, "blocks": ""}

    def __init__(self, declaration: TableDeclaration) -> None:
        super().__init__(declaration)
        self._loaded: set[bytes] = set()
        if isinstance(declaration.target, str):
            self.class_column = declaration.target

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of inputs: numeric columns, one per declared category, and indicators."""
        return (
            len(self.declaration.numeric)
            + sum(len(values) for values in self.declaration.categorical.values())
            + len(self.declaration.indicators),
        )

    @property
    def _inputs(self) -> tuple[str, ...]:
        return (*self.declaration.numeric, *self.declaration.categorical)

    def expected(self) -> str:
        targets = self.declaration.targets
        return (
            f"a .csv or .parquet file with target column{'s' * (len(targets) > 1)} "
            f"{', '.join(map(repr, targets))} and columns {', '.join(self._inputs)}"
        )

    def read(self, place: Path, options: Mapping[str, Any]) -> Rows:
        """Read only the declared columns."""
        written = self._dialect(options)
        table = self._contents(place, [*self.declaration.targets, *self._inputs], written)
        y = self._targets(table, place, written)
        return Rows(*self._columns(table, place, written, strict=True), y, np.arange(len(table)))

    def _contents(self, place: Path, columns: Sequence[str], written: Dialect) -> Contents:
        """Read these columns; remarks on the rows become notes or warnings."""
        numeric = {*self.declaration.numeric, *self.declaration.real_targets}
        found = files.read_columns(place, columns, written, self.expected(), numeric=numeric)
        self._notes += found.notes
        self._warnings += found.warnings
        return found

    def keys(self, of: Rows, place: Path, options: Mapping[str, Any], which: str) -> Sequence[str]:
        """Return each row's value in the column ``group``."""
        keys = whose.keys_in_column(place, options["group"], self._dialect(options))
        return [keys[row] for row in of.rows]

    def look_for_persons(self, options: Mapping[str, Option]) -> list[str]:
        """Return hints on undeclared and numeric columns that may be person keys."""
        chosen = read_options(self.name, options, self.options)
        if chosen["group"] or not chosen["data"]:
            return []
        declared = {*self.declaration.targets, *self.declaration.categorical}
        return whose.repeated_in_columns(
            place_of(chosen["data"]), self._dialect(chosen), declared, self.declaration.numeric
        )

    def numbered(
        self, chosen: Mapping[str, Any], *read: tuple[Rows, Path, str]
    ) -> tuple[Rows, ...]:
        """Return the parts, the first one also with the blocks that the option names."""
        parts, column = super().numbered(chosen, *read), chosen["blocks"]
        if not column:
            return parts
        if chosen["group"]:
            raise TaskError(
                "group and blocks are both set. Rows of a person stay together by group alone: "
                "leave blocks out."
            )
        keys = whose.keys_in_column(read[0][1], column, self._dialect(chosen), "blocks")
        (blocks,) = number_persons([keys[row] for row in parts[0].rows])
        return replace(parts[0], blocks=blocks), *parts[1:]

    def held(self, train: Rows, test: Rows) -> SiloData:
        self._loaded.add(digest_of(train, test))
        return replace(super().held(train, test), blocks=train.blocks)

    def samples(self, train: Rows, test: Rows) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Standardise by the training rows; a missing number becomes their mean."""
        self._look_at(train)
        scale = self.scale_of(train)
        return self._scaled(train, scale), self._scaled(test, scale)

    def _scaled(self, rows: Rows, scale: ColumnScale) -> NDArray[np.float32]:
        return _scaled(rows, scale, missing=np.nan if self.boosted else 0.0)

    def scale_of(self, train: Rows) -> ColumnScale:
        """Return mean and deviation of the numbers, then of real targets.

        A kept model's own scale takes precedence over that of the training rows.
        """
        if self.scale is not None:
            return self.scale
        if self.boosted:
            return [(0.0, 1.0)] * self.scaled_inputs
        return [*scale_of(train.numbers), *(scale_of(train.y) if self.scaled_targets else ())]

    @property
    def scaled_inputs(self) -> int:  # type: ignore[override]
        return len(self.declaration.numeric)

    @property
    def pooled_columns(self) -> int:  # type: ignore[override]
        pooled = self.declaration.scale == "federation" and not self.boosted
        return self.scaled_inputs + self.scaled_targets if pooled else 0

    def column_sums(self, options: Mapping[str, Option]) -> NDArray[np.float64]:
        train, _ = self.read_both(read_options(self.name, options, self.options))
        return sums_of(train.persons, train.numbers, *([train.y] if self.scaled_targets else []))

    def columns(self, options: Mapping[str, Option], file: Path | None = None) -> Sequence[Column]:
        if file is None:
            return self._as_columns(self._as_loaded(options)[0])
        chosen = read_options(self.name, options, self.options)
        return self._as_columns(self._without_targets(file, chosen))

    def test_columns(self, options: Mapping[str, Option]) -> Sequence[Column]:
        return self._as_columns(self._as_loaded(options)[1])

    def _as_loaded(self, options: Mapping[str, Option]) -> tuple[Rows, Rows]:
        """Read training and test rows again; ``TaskError`` if they are not those in memory.

        Answers and targets in memory would belong to other rows, if only the order has changed.
        """
        both = self.read_both(read_options(self.name, options, self.options))
        if self._loaded and digest_of(*both) not in self._loaded:
            raise TaskError("the data changed after the silo started. Restart it.")
        return both

    def _as_columns(self, rows: Rows) -> list[Column]:
        odd = iter(rows.odd.T)
        found = [
            Column(name, values, odd=next(odd))
            for name, values in zip(self.declaration.numeric, rows.numbers.T, strict=True)
        ]
        for name, (values, block) in self._blocks(rows.categories).items():
            place = np.where(block.any(axis=1), block.argmax(axis=1), -1).astype(np.float64)
            found.append(Column(name, place, values, odd=next(odd)))
        return found

    def _blocks(
        self, categories: NDArray[np.float32]
    ) -> dict[str, tuple[tuple[str, ...], NDArray[np.float32]]]:
        """Return categorical column → its values, and each row's 0/1 for them (n, values)."""
        names = self.declaration.categorical
        ends = np.cumsum([len(values) for values in names.values()])[:-1]
        blocks = np.split(categories, ends, axis=1) if names else []
        return {
            name: (values, block)
            for (name, values), block in zip(names.items(), blocks, strict=True)
        }

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """Read the rows of a table to predict from; it needs no target column.

        The scale is ``self.scale``, otherwise that of the silo's training rows, so ``data`` must
        still exist. If the silo names no ``data`` (it has no labels yet), these rows define it.
        """
        chosen = read_options(self.name, options, self.options)
        scale = self.scale
        if scale is None and chosen["data"]:
            scale = self.scale_of(self.read_both(chosen)[0])
        rows = self._without_targets(file, chosen)
        notes = (*self._notes, *self._warnings)
        passed = self._passed(file, self._dialect(chosen), rows)
        if scale is None:
            scale = self.scale_of(rows) if self.boosted else scale_of(rows.numbers)
        return Samples(self._scaled(rows, scale), notes=notes, passed=passed, scale=scale)

    def persons_in(self, file: Path, options: Mapping[str, Option]) -> Persons | None:
        chosen = read_options(self.name, options, self.options)
        group, written = chosen["group"], self._dialect(chosen)
        if not group or not whose.column_in(file, group, written):
            return None
        return number_persons(whose.keys_in_column(file, group, written))[0]

    def _without_targets(self, file: Path, chosen: Mapping[str, Any]) -> Rows:
        """Read the rows of a table without its targets."""
        self._notes, self._warnings = [], []
        written = self._dialect(chosen)
        table = self._contents(file, self._inputs, written)
        columns = self._columns(table, file, written, strict=False)
        return Rows(*columns, np.zeros(len(table), np.int64), np.arange(len(table)))

    def passed_through(self, options: Mapping[str, Option]) -> Mapping[str, Sequence[str]]:
        chosen = read_options(self.name, options, self.options)
        written = self._dialect(chosen)
        if not written.passed:
            return {}
        _, test = self.read_both(chosen)
        return self._passed(place_of(chosen["test-data"] or chosen["data"]), written, test)

    def _passed(self, file: Path, written: Dialect, of: Rows) -> dict[str, list[str]]:
        """Return column name → its texts in these rows."""
        found = {}
        for name in written.passed:
            texts = files.raw_texts(file, name, written, self.expected())
            found[name] = [texts[row] or "" for row in of.rows]
        return found

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        """Describe every model input in order, with its column and preparation."""
        columns: list[dict[str, Any]] = [{"column": name} for name in self.declaration.numeric]
        for column, (mean, width) in zip(columns, self.scale or (), strict=False):
            column |= {"mean": mean, "deviation": width}
        columns += [
            {"column": name, "category": value}
            for name, values in self.declaration.categorical.items()
            for value in values
        ]
        columns += [{"column": name, "missing": True} for name in self.declaration.indicators]
        assert len(columns) == self.shape[0], "every input must be stated"
        pooled = self.pooled_columns
        return {
            "numbers": "(value − mean) / deviation; "
            f"{'NaN' if self.boosted else 0} where the value is missing or out of bounds",
            "categories": "1 if the column has this category, else 0",
            "missing": "1 if the value is missing or out of bounds, else 0",
            "bounds": {name: list(ends) for name, ends in self.declaration.bounds.items()},
            **({"mean and deviation": "one pair for all silos of the run"} if pooled else {}),
            "columns": [{"input": i, **column} for i, column in enumerate(columns)],
            **self.prepared_targets(),
        }

    def _dialect(self, options: Mapping[str, Any]) -> Dialect:
        names = (*self._inputs, *self.declaration.targets)
        declared: dict[str, Sequence[str]] = {
            name: self.declaration.categorical.get(name, ()) for name in names
        }
        if isinstance(self.declaration.target, str):
            declared[self.declaration.target] = self.classes
        return dialect.read_dialect(self.name, declared, options)

    def _targets(self, table: Contents, place: Path, written: Dialect) -> NDArray[Any]:
        """Return (n,) classes, or (n, columns) real numbers."""
        target = self.declaration.target
        if isinstance(target, str):
            return self._classes(table, target, place, written)
        if isinstance(target, LabelColumns):
            found: list[NDArray[Any]] = [
                read_flags(table.codes[name], name, place, written) for name in target.columns
            ]
        elif isinstance(target, NumberColumns):
            found = [self._known(table, name, place, written) for name in target.columns]
        else:
            times = self._known(table, target.time, place, written)
            if (early := times < 0).any():
                raise TaskError(
                    f"target column {written.named(target.time)} of {str(place)!r} contains a "
                    f"time below 0 in row {files.first(early)}. Times must be at least 0."
                )
            found = [times, read_flags(table.codes[target.event], target.event, place, written)]
        names = [f"target column {written.named(name)}" for name in target.columns]
        return in_32_bits(np.stack(found, axis=1), names, place)

    def _classes(
        self, table: Contents, column: str, place: Path, written: Dialect
    ) -> NDArray[np.int64]:
        found = table.codes[column]
        if (missing := found.at < 0).any():
            raise _no_target(column, missing, place, written)
        places = found.places(written.placing(self.classes))
        if (other := places < 0).any():
            raise TaskError(
                f"target column {written.named(column)} of {str(place)!r} has values that are "
                f"not declared: {found.listed(other)}. Declared: {', '.join(self.classes)}. Map "
                f"the file's codes under [data.codes.{column}] in silo.toml."
            )
        return places

    def _known(
        self, table: Contents, column: str, place: Path, written: Dialect
    ) -> NDArray[np.float64]:
        """Return the numbers of a target column; refuse missing ones."""
        values = self._finite(table, column, place, written)
        if (missing := np.isnan(values)).any():
            raise _no_target(column, missing, place, written)
        return values

    def _columns(
        self, table: Contents, place: Path, written: Dialect, *, strict: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]:
        """Return numbers, one-hot categories, indicators and undeclared values of all rows.

        With ``strict``, refuse a column with mostly undeclared values.
        """
        numbers = np.empty((len(table), len(self.declaration.numeric)))
        missing: dict[str, NDArray[np.bool_]] = {}
        odd = []
        for i, column in enumerate(self.declaration.numeric):
            numbers[:, i], beyond = self._numbers(table, column, place, written, strict=strict)
            missing[column] = np.isnan(numbers[:, i])
            odd.append(beyond)
        categorical = self.declaration.categorical
        categories = np.zeros((len(table), sum(map(len, categorical.values()))), np.float32)
        before = 0
        for column, values in categorical.items():
            missing[column] = table.codes[column].at < 0
            places = self._places(table, column, place, written, strict=strict)
            known = np.flatnonzero(places >= 0)
            categories[known, before + places[known]] = 1
            odd.append(~missing[column] & (places < 0))
            before += len(values)
        flags = [missing[column].astype(np.float32) for column in self.declaration.indicators]
        indicators = np.stack(flags, axis=1) if flags else np.empty((len(table), 0), np.float32)
        return numbers, categories, indicators, np.stack(odd, axis=1)

    def _finite(
        self, table: Contents, column: str, place: Path, written: Dialect
    ) -> NDArray[np.float64]:
        values = table.numbers.pop(column)  # a column of them is read once
        if (large := np.abs(values) > LARGEST).any():
            raise TaskError(
                f"numeric column {written.named(column)} of {str(place)!r} contains infinite "
                f"values, or values beyond {LARGEST:g}, in row {files.first(large)} (and maybe "
                "others). Correct them, or leave the field empty: it counts as missing."
            )
        return values

    def _numbers(
        self, table: Contents, column: str, place: Path, written: Dialect, *, strict: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return numbers, NaN where missing or out of bounds, and which are out of bounds."""
        values = self._finite(table, column, place, written)
        present = int(np.isfinite(values).sum())
        low, high = self.declaration.bounds.get(column, (-np.inf, np.inf))
        beyond = (values < low) | (values > high)
        if beyond.any():
            said = (
                f"{beyond.sum()} of {present} values of {written.named(column)} in {place.name} "
                f"are outside the declared {low:g} to {high:g} (the first in row "
                f"{files.first(beyond)})"
            )
            if strict and beyond.sum() > MOST * present:
                raise TaskError(f"{said}. Is it in the declared unit?")
            self._warnings.append(f"{said}; they count as missing")
            values = np.where(beyond, np.nan, values)
        missing = len(values) - present
        if missing:
            what = "which trees take as they are" if self.boosted else "replaced by the mean"
            self._notes.append(f"{column}: {missing} missing in {place.name}, {what}")
        return values, beyond

    def _places(
        self, table: Contents, column: str, place: Path, written: Dialect, *, strict: bool
    ) -> NDArray[np.int64]:
        """Return (n,) the declared category of each row; -1: none."""
        values, found = self.declaration.categorical[column], table.codes[column]
        places = found.places(written.placing(values))
        if missing := int((found.at < 0).sum()):
            self._notes.append(f"{column}: {missing} missing in {place.name}, in no category")
        present, odd = len(places) - missing, (places < 0) & (found.at >= 0)
        if other := int(odd.sum()):
            said = (
                f"{other} of {present} values of {written.named(column)} in "
                f"{place.name} match no declared category: {found.listed(odd)}"
            )
            if strict and other > MOST * present:
                raise TaskError(
                    f"{said}. Declared: {', '.join(values)}. Map the file's codes under "
                    f"[data.codes.{column}] in silo.toml, or correct the declaration."
                )
            self._warnings.append(f"{said}; they count as no category")
        return places

    def _look_at(self, train: Rows) -> None:
        """Warn about uninformative columns and suspicious numbers."""
        if len(train.y) < 2:
            return
        for i, column in enumerate(self.declaration.numeric):
            present = train.numbers[np.isfinite(train.numbers[:, i]), i]
            varies = bool(len(present) and np.ptp(present))
            empty = 1 - len(present) / len(train.y)
            self._warnings += looks.says_little(column, empty, varies=varies)
            self._warnings += looks.odd_numbers(column, train.numbers[:, i], train.rows)
        for column, (_, block) in self._blocks(train.categories).items():
            empty = float((block.sum(axis=1) == 0).mean())
            varies = bool(np.ptp(block, axis=0).any())
            self._warnings += looks.says_little(column, empty, varies=varies)
        known = train.persons is not None or train.blocks is not None
        if not known and not isinstance(self.problem, Survival):
            self._warnings += looks.similar_neighbours(train.y)


def _no_target(column: str, missing: NDArray[np.bool_], place: Path, written: Dialect) -> TaskError:
    row, count = files.first(missing), int(missing.sum())
    last = missing.argmax() == len(missing) - count
    advice = f" If the file ends with a footer, set skip-last = {count}." if last else ""
    return TaskError(
        f"{str(place)!r} has no value in target column {written.named(column)} in row {row}"
        + f" and {count - 1} more" * (count > 1)
        + f". Leave such rows out of the file.{advice}"
    )


def _scaled(rows: Rows, scale: ColumnScale, *, missing: float) -> NDArray[np.float32]:
    """Standardise; a number that is missing becomes ``missing``."""
    own = scale[: rows.numbers.shape[1]]  # behind them come real targets
    mean, width = np.array(own).reshape(-1, 2).T
    ends = np.cumsum([len(mean), rows.categories.shape[1], rows.missing.shape[1]])
    found = np.empty((len(rows.y), ends[2]), np.float32)
    for start in range(0, len(found), BLOCK):
        some = slice(start, start + BLOCK)
        standard = (rows.numbers[some] - mean) / width
        found[some, : ends[0]] = np.where(np.isnan(standard), missing, standard)
    found[:, ends[0] : ends[1]] = rows.categories
    found[:, ends[1] :] = rows.missing
    return found
