"""How one silo writes its tables: its separators, column names and codes.

A file's content is translated to the terms of the declaration before anything else. These settings
belong to the silo and stay in its ``silo.toml``.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.tasks.base import Option, TaskError
from coterie.tasks.own.declared import in_nfc

EVERY = "*"
"""Stands for every column."""
TABLES = ("columns", "codes")
"""Options set per column."""

OPTIONS: dict[str, Option] = {
    "separator": ",",
    "decimal": ".",
    "thousands": "",
    "encoding": "utf-8",
    "quote": '"',
    "skip": 0,
    "skip-last": 0,
    "columns": "",
    "codes": "",
    "missing": "",
    "censored": "",
    "ignore-marks": "",
    "pass-through": "",
}
SEPARATORS = (",", ";", "\t", "|")
LOOKALIKES = {" ": "\u00a0\u202f\u2009", "'": "\u2019"}
"""Thousands mark → what programs write for it."""
MINUS = "\u2212"
"""The typographic minus sign."""
CENSORED = ("limit", "missing")
"""How a value such as ``<0.5`` can be read."""


@dataclass(frozen=True)
class Dialect:
    """How one silo writes its tables.

    Attributes:
        separator, encoding, quote: of a CSV file; empty quote: nothing is quoted.
        skip, skip_last: number of lines above the header of a CSV file, and below its last row.
        decimal, thousands: marks in numbers; empty thousands: none.
        columns: declared name → name in the file, if different.
        codes: declared column → value in the file → meaning.
        missing: declared column, or ``*`` → codes for a missing value.
        censored: declared column, or ``*`` → one of ``CENSORED``.
        marks: declared column, or ``*`` → texts next to a number to ignore.
        passed: columns to copy from a prediction input to the answers.
    """

    separator: str = ","
    decimal: str = "."
    thousands: str = ""
    encoding: str = "utf-8"
    quote: str = '"'
    skip: int = 0
    skip_last: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    censored: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    passed: Sequence[str] = ()

    def code(self, text: str) -> str:
        """Return the form in which codes are compared: stripped, ``4.0`` as ``4``."""
        plain = in_nfc(text).strip().replace(MINUS, "-")
        return re.sub(rf"^([+-]?\d+){self.nothing}$", r"\1", plain)

    @property
    def nothing(self) -> str:
        """The pattern of a whole number's zero fraction.

        Programs write ``4.0`` with any decimal mark; a single 0 is not a group of thousands.
        """
        return rf"(?:{re.escape(self.decimal)}0+|\.0)"

    def meant(self, column: str, text: str | None) -> str | None:
        """Return the meaning of a text in a declared column; None: missing."""
        if text is None or not text.strip():
            return None
        code = self.code(text)
        if any(code in self.missing.get(name, ()) for name in (EVERY, column)):
            return None
        return self.codes.get(column, {}).get(code, text)

    def codes_of(self, column: str) -> list[str]:
        """Return all codes of a declared column, including those for a missing value."""
        missing = (self.missing.get(name, frozenset()) for name in (EVERY, column))
        return sorted({*self.codes.get(column, ())}.union(*missing))

    def translates(self, column: str) -> bool:
        """Return whether a declared column has codes."""
        return bool(self.codes_of(column))

    def censored_as(self, column: str) -> str:
        """Return how to read censored values of a declared column; empty: not set."""
        return self.censored.get(column, self.censored.get(EVERY, ""))

    def marks_of(self, column: str) -> list[str]:
        """Return the texts to ignore next to a declared column's numbers, longest first."""
        marks = (*self.marks.get(EVERY, ()), *self.marks.get(column, ()))
        return sorted(filter(None, marks), key=len, reverse=True)

    def bare(self) -> Dialect:
        """Return the format of the file without the meanings of its columns and codes."""
        return replace(self, columns={}, codes={}, missing={}, censored={}, marks={}, passed=())

    def placing(self, declared: Sequence[str]) -> Callable[[str], int | None]:
        """Return a function that returns which of the declared values a text is, or None."""
        exact: dict[str, int] = {}
        alike: dict[str, list[int]] = {}
        for i, value in enumerate(declared):
            exact.setdefault(value, i)
            alike.setdefault(self.code(value), []).append(i)

        def place(text: str) -> int | None:
            if (named := exact.get(in_nfc(text))) is not None:
                return named
            same = alike.get(self.code(text), ())
            return same[0] if len(same) == 1 else None

        return place

    def named(self, column: str) -> str:
        """Return a declared column's name for display."""
        own = self.columns.get(column, column)
        return repr(column) if own == column else f"{column!r} ({own!r} in the file)"


def read_dialect(
    task: str, declared: Mapping[str, Sequence[str]], options: Mapping[str, Any]
) -> Dialect:
    """Read the options of a silo.

    ``declared`` maps a column to its allowed values; empty: any. ``options`` have defaults filled
    in; tables and lists are JSON. Raises ``TaskError`` if an option is malformed, or names
    something undeclared.
    """
    plain = _marks_of_file(options)
    named_so = [(in_nfc(means), in_nfc(own)) for own, means in _table(options, "columns").items()]
    columns = dict(named_so)
    if len(columns) < len(named_so):
        raise TaskError("option columns gives two columns of the file the same name.")
    given = _tables(options, "codes")
    codes = {
        in_nfc(column): {plain.code(code): in_nfc(str(means)) for code, means in of.items()}
        for column, of in given.items()
    }
    for column, of in given.items():
        for code, means in of.items():
            if codes[in_nfc(column)][plain.code(code)] != in_nfc(str(means)):
                raise TaskError(
                    f"option codes gives {code!r} of column {column!r} two meanings: whole numbers "
                    "are compared without their fraction, 1.0 as 1."
                )
    missing = {
        in_nfc(column): frozenset(plain.code(str(code)) for code in of)
        for column, of in _by_column(options, "missing").items()
    }
    censored = {
        in_nfc(column): str([*of, ""][0]) for column, of in _by_column(options, "censored").items()
    }
    if wrong := [one for one in censored.values() if one not in CENSORED]:
        raise TaskError(f"censored must be {' or '.join(CENSORED)}. Got {wrong[0]!r}.")
    marks = {
        in_nfc(column): [in_nfc(str(mark)).strip() for mark in of]
        for column, of in _by_column(options, "ignore-marks").items()
    }
    named: dict[str, Iterable[str]] = {
        "columns": columns, "codes": codes, "missing": missing, "censored": censored,
        "ignore-marks": marks,
    }  # fmt: skip
    for key, names in named.items():
        unknown = sorted(set(names) - set(declared) - (set() if key in TABLES else {EVERY}))
        if unknown:
            raise TaskError(
                f"option {key} names {unknown[0]!r}, which is not a column of task {task!r}. It "
                f"has: {', '.join(declared)}."
            )
    for column, means in codes.items():
        allowed = declared[column]
        place = plain.placing(allowed)
        wrong = [m for m in means.values() if allowed and place(m) is None]
        if wrong:
            raise TaskError(
                f"option codes gives {wrong[0]!r} for column {column!r}, which is not declared. "
                f"Declared: {', '.join(allowed)}."
            )
    return replace(
        plain, columns=columns, codes=codes, missing=missing, censored=censored, marks=marks,
        passed=tuple(map(in_nfc, _list(options, "pass-through"))),
    )  # fmt: skip


def _marks_of_file(options: Mapping[str, Any]) -> Dialect:
    """Read the options that describe the file itself, or raise ``TaskError``."""
    thousands = next(
        (mark for mark, alike in LOOKALIKES.items() if options["thousands"] in [*alike]),
        options["thousands"],
    )
    known = {
        "decimal": (".", ","), "thousands": ("", ".", ",", " ", "'", "_"), "quote": ("", '"', "'")
    }  # fmt: skip
    for key, allowed in known.items():
        if (thousands if key == "thousands" else options[key]) not in allowed:
            raise TaskError(
                f"{key} must be one of {', '.join(map(repr, allowed))}. Got {options[key]!r}."
            )
    if options["decimal"] == thousands:
        raise TaskError(f"decimal and thousands must differ. Got {thousands!r} for both.")
    if len(options["separator"].encode()) != 1:
        raise TaskError(f"separator must be one character. Got {options['separator']!r}.")
    for key in ("skip", "skip-last"):
        if options[key] < 0:
            raise TaskError(f"{key} must be at least 0. Got {options[key]}.")
    try:
        "a".encode(options["encoding"])
        encoding = codecs.lookup(options["encoding"]).name
    except LookupError:
        raise TaskError(
            "encoding must be one that Python supports, such as utf-8 or cp1252. Got "
            f"{options['encoding']!r}."
        ) from None
    return Dialect(
        options["separator"], options["decimal"], thousands, encoding, options["quote"],
        options["skip"], options["skip-last"],
    )  # fmt: skip


def _json(options: Mapping[str, Any], key: str) -> Any:
    """Parse a table or list in JSON; return any other text unchanged."""
    text = str(options[key]).strip()
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise TaskError(f"option {key} is not JSON: {error}.") from None


def _table(options: Mapping[str, Any], key: str) -> dict[str, str]:
    found = _json(options, key) or {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise TaskError(
            f'option {key} must be a table of texts, such as [data.{key}] with AGE = "age".'
        )
    return found


def _tables(options: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    found = _json(options, key) or {}
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise TaskError(
            f'option {key} must have a table per column, such as [data.{key}.sex] with 1 = "f".'
        )
    return found


def _list(options: Mapping[str, Any], key: str) -> list[str]:
    found = _json(options, key)
    found = [found] if isinstance(found, str) and found else found or []
    if not isinstance(found, list) or any(isinstance(one, dict | list) for one in found):
        raise TaskError(f'option {key} must be a list, such as {key} = ["first", "second"].')
    return [str(one) for one in found]


def _by_column(options: Mapping[str, Any], key: str) -> dict[str, list[Any]]:
    """Read a text or list for every column, or a table of them by column."""
    found = _json(options, key)
    if not isinstance(found, dict):
        of = _list(options, key)
        return {EVERY: of} if of else {}
    return {column: of if isinstance(of, list) else [of] for column, of in found.items()}
