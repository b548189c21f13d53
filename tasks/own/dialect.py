"""How one silo writes its tables: its separators, its names of columns, its codes.

What a file holds is translated into what the declaration means before anything else is done with
it. All of this is the silo's own and stays in its ``silo.toml``.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.tasks.base import Option, TaskError
from coterie.tasks.own.declared import in_nfc

EVERY = "*"
"""In ``missing``: every column."""

OPTIONS: dict[str, Option] = {
    "separator": ",",
    "decimal": ".",
    "thousands": "",
    "encoding": "utf-8",
    "columns": "",
    "codes": "",
    "missing": "",
    "pass-through": "",
}
SEPARATORS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class Dialect:
    """See the module.

    Attributes:
        separator, encoding: of a CSV file.
        decimal, thousands: marks in numbers; no thousands: they have none.
        columns: declared name → the file's, where that is another one.
        codes: declared column → what stands in the file → what is meant.
        missing: declared column, or ``*`` → codes that stand for a missing value.
        passed: columns of a file to predict from that are copied to the answers.
    """

    separator: str = ","
    decimal: str = "."
    thousands: str = ""
    encoding: str = "utf8"
    columns: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    missing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    passed: Sequence[str] = ()

    def code(self, text: str) -> str:
        """The form in which codes are compared: without spaces around, ``4.0`` as ``4``."""
        return re.sub(rf"^([+-]?\d+){self.nothing}$", r"\1", in_nfc(text).strip())

    @property
    def nothing(self) -> str:
        """Pattern of what a whole number may end with. Programs write ``4.0`` whatever the decimal
        mark is, and a single 0 is no group of thousands."""
        return rf"(?:{re.escape(self.decimal)}0+|\.0)"

    def meant(self, column: str, text: str | None) -> str | None:
        """What a text in a declared column means; None: it is missing."""
        if text is None or text == "":
            return None
        code = self.code(text)
        if any(code in self.missing.get(name, ()) for name in (EVERY, column)):
            return None
        return self.codes.get(column, {}).get(code, text)

    def codes_of(self, column: str) -> list[str]:
        """All that stand for something else in a declared column."""
        missing = (self.missing.get(name, frozenset()) for name in (EVERY, column))
        return sorted({*self.codes.get(column, ())}.union(*missing))

    def translates(self, column: str) -> bool:
        """Whether a text in this column may mean another one."""
        return bool(self.codes_of(column))

    def place(self, text: str, declared: Sequence[str]) -> int | None:
        """Which of the declared values a text is; None: none of them."""
        named = in_nfc(text)
        if named in declared:
            return declared.index(named)
        same = [i for i, value in enumerate(declared) if self.code(value) == self.code(text)]
        return same[0] if len(same) == 1 else None

    def named(self, column: str) -> str:
        """A declared column, for people."""
        own = self.columns.get(column, column)
        return repr(column) if own == column else f"{column!r} ({own!r} in the file)"


def read_dialect(
    task: str, declared: Mapping[str, Sequence[str]], options: Mapping[str, Any]
) -> Dialect:
    """Read the options of a silo.

    Args:
        task: its name, for errors.
        declared: column → the values that it may have; none: any.
        options: with defaults filled in; tables and lists are JSON.

    Raises:
        TaskError: an option of another form, or one that names what is not declared.
    """
    for key, known in (("decimal", (".", ",")), ("thousands", ("", ".", ",", " ", "'", "_"))):
        if options[key] not in known:
            raise TaskError(
                f"{key} must be one of {', '.join(map(repr, known))}. Got {options[key]!r}."
            )
    if options["decimal"] == options["thousands"]:
        raise TaskError(f"decimal and thousands must differ. Got {options['decimal']!r} for both.")
    if len(options["separator"]) != 1:
        raise TaskError(f"separator must be one character. Got {options['separator']!r}.")
    try:
        # pyarrow reads by itself what is called just so.
        encoding = codecs.lookup(options["encoding"]).name.replace("utf-8", "utf8")
    except LookupError:
        raise TaskError(
            "encoding must be one that Python knows, such as utf-8 or cp1252. "
            f"Got {options['encoding']!r}."
        ) from None
    plain = Dialect(options["separator"], options["decimal"], options["thousands"], encoding)
    columns = {in_nfc(means): in_nfc(own) for own, means in _table(options, "columns").items()}
    codes = {
        in_nfc(column): {plain.code(code): in_nfc(str(means)) for code, means in of.items()}
        for column, of in _tables(options, "codes").items()
    }
    missing = {
        in_nfc(column): frozenset(plain.code(str(code)) for code in of)
        for column, of in _missing(options).items()
    }
    for key, names in (("columns", columns), ("codes", codes), ("missing", missing)):
        unknown = sorted(set(names) - set(declared) - ({EVERY} if key == "missing" else set()))
        if unknown:
            raise TaskError(
                f"option {key} names {unknown[0]!r}, which is not a column of task {task!r}. It "
                f"has: {', '.join(declared)}."
            )
    for column, of in codes.items():
        allowed = declared[column]
        wrong = [m for m in of.values() if allowed and plain.place(m, allowed) is None]
        if wrong:
            raise TaskError(
                f"option codes gives {wrong[0]!r} for column {column!r}, which is not declared. "
                f"Declared: {', '.join(allowed)}."
            )
    return Dialect(
        plain.separator, plain.decimal, plain.thousands, plain.encoding, columns, codes, missing,
        tuple(map(in_nfc, _list(options, "pass-through"))),
    )  # fmt: skip


def _json(options: Mapping[str, Any], key: str) -> Any:
    """A table or list as it was written in JSON; any other text is itself."""
    text = str(options[key]).strip()
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise TaskError(f"option {key} is no JSON: {error}.") from None


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


def _missing(options: Mapping[str, Any]) -> dict[str, list[Any]]:
    found = _json(options, "missing")
    if not isinstance(found, dict):
        codes = _list(options, "missing")
        return {EVERY: codes} if codes else {}
    return {column: of if isinstance(of, list) else [of] for column, of in found.items()}
