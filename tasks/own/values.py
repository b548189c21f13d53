"""Values of one column of texts: numbers or codes.

A column is read in parts, so that its texts are never all in memory. Rows are counted from 1,
without the header.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError
from coterie.tasks.own.dialect import LOOKALIKES, MINUS, Dialect

SHOWN = 20
"""Columns or forms that an error lists."""
FEW, MANY = 1 << 12, 1 << 25
"""Fewest and most rows for which memory is reserved at the start."""
EXACT = 2.0**53
"""Smaller whole numbers are exact as floating-point numbers."""
LONGEST = 24
"""Characters of a code that an error shows."""
NUMBER = r"^[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(?i:inf|infinity|nan(?:\(.*\))?))$"
MINUS_BEHIND = ("-", MINUS, ")")
"""What follows a number below 0 in accounting and in SAP exports: 5- or (5)."""
LIMIT = re.compile(r"^(<=|>=|[<>≤≥])\s*")
DATE = re.compile(
    r"^(?:\d{4}([-/.])(?:\d{1,2}|[A-Za-z]{3,9})\1\d{1,2}"
    r"|\d{1,2}([-/.])(?:\d{1,2}|[A-Za-z]{3,9})\2(?:\d{4}|\d{2}))(?:$|[ T]\d)"
)


def shown(text: str) -> str:
    """Return a code for display, truncated if long."""
    return repr(text if len(text) <= LONGEST else text[:LONGEST] + "…")


def counted(count: int, what: str) -> str:
    """Return a count and its noun, for display."""
    return f"{count} {what}{'s' * (count != 1)}"


def without_rows(text: str) -> str:
    """Return a pyarrow error message without its quotation from the file."""
    return re.split(r":\s|\n", text.removeprefix("CSV parse error: "))[0].rstrip(". ")


def is_text(kind: Any) -> bool:
    """Return whether a pyarrow type holds texts."""
    import pyarrow as pa

    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def texts_of(part: Any) -> Any:
    """Return a pyarrow array as texts; whole numbers as digits.

    pyarrow writes 12345678901.0 as 1.2345678901e+10: not the text of the same key or code in a
    column of whole numbers.
    """
    import pyarrow as pa
    from pyarrow import compute

    part = part.dictionary_decode() if pa.types.is_dictionary(part.type) else part
    if not pa.types.is_floating(part.type):
        return part.cast(pa.string())
    numbers = part.cast(pa.float64())
    is_small = compute.less(compute.abs(numbers), EXACT)
    is_whole = compute.and_(is_small, compute.equal(numbers, compute.trunc(numbers)))
    digits = compute.if_else(is_whole, numbers, None).cast(pa.int64()).cast(pa.string())
    return compute.if_else(is_whole, digits, part.cast(pa.string()))


class Growing:
    """An array that grows part by part in one piece, which avoids memory fragmentation.

    ``about`` is the expected length; unused room takes no memory.
    """

    def __init__(self, kind: Any, about: int) -> None:
        self._held, self.count = np.empty(min(about + about // 10 + FEW, MANY), kind), 0

    def add(self, part: NDArray[Any]) -> None:
        """Append a part."""
        end = self.count + len(part)
        if end > len(self._held):
            grown = np.empty(max(end, 2 * len(self._held)), self._held.dtype)
            grown[: self.count] = self._held[: self.count]
            self._held = grown
        self._held[self.count : end] = part
        self.count = end

    def all(self) -> NDArray[Any]:
        """Return all parts."""
        return self._held[: self.count]


@dataclass(frozen=True)
class Coded:
    """Rows of a column as (n,) indices of its distinct ``texts``; -1: the value is missing."""

    at: NDArray[np.int32]
    texts: list[str]

    def all(self) -> list[str | None]:
        """Return the text of each row; None if missing."""
        known = [*self.texts, None]
        return [known[one] for one in self.at.tolist()]

    def places(self, place_of: Callable[[str], int | None]) -> NDArray[np.int64]:
        """Return (n,) ``place_of`` of each row's text; -1 where None or missing."""
        found = [place_of(text) for text in self.texts]
        return np.array([-1 if one is None else one for one in found] + [-1])[self.at]

    def listed(self, rows: NDArray[np.bool_]) -> str:
        """List the distinct texts of these rows for display, each with its first row."""
        where = np.flatnonzero(rows)
        numbers, starts, counts = np.unique(self.at[where], return_index=True, return_counts=True)
        order = np.argsort(starts)
        each = [
            f"{shown(self.texts[numbers[i]])} in row {where[starts[i]] + 1}{_also(int(counts[i]))}"
            for i in order[:SHOWN]
        ]
        return ", ".join(each) + f", and {len(order) - SHOWN} more" * (len(order) > SHOWN)


def _also(count: int) -> str:
    return "" if count == 1 else f" and {counted(count - 1, 'more row')}"


def read_flags(found: Coded, column: str, place: Path, dialect: Dialect) -> NDArray[np.float32]:
    """Return a column's 0 and 1 as (n,); raise ``TaskError`` naming what is neither."""
    known = {"0": 0, "1": 1, "false": 0, "true": 1}
    values = found.places(lambda text: known.get(dialect.code(text).lower()))
    if (wrong := values < 0).any():
        about = f"target column {dialect.named(column)} of {str(place)!r} must contain 0 or 1. "
        if (empty := found.at < 0).any():
            raise TaskError(f"{about}Row {first(empty)} is empty: leave such rows out of the file.")
        about += (
            f"It contains {found.listed(wrong)}: define them under [data.codes.{column}] in "
            "silo.toml."
        )
        if known_rows := len(wrong) - int(wrong.sum()):
            about += (
                f" Other {known_rows} rows are read as {found.listed(~wrong)}: where 1 and 2 stand "
                "for 0 and 1, define both."
            )
        raise TaskError(about)
    return values.astype(np.float32)


class Codes:
    """A collector of one column's texts, part by part."""

    def __init__(self, column: str, dialect: Dialect, about: int) -> None:
        self.column, self.dialect = column, dialect
        self._numbers: dict[str, int] = {}
        self._at = Growing(np.int32, about)

    def add(self, part: Any) -> None:
        """Add rows; raise ``pyarrow.ArrowException`` if they are lists or similar."""
        encoded = texts_of(part).dictionary_encode()
        numbers = [
            self._numbers.setdefault(text, len(self._numbers))
            for text in encoded.dictionary.to_pylist()
        ]
        at = encoded.indices.fill_null(len(numbers)).to_numpy()
        self._at.add(np.array([*numbers, -1], np.int32)[at])

    def done(self) -> Coded:
        """Return the meanings of all rows."""
        means = [self.dialect.meant(self.column, text) for text in self._numbers]
        distinct = {text: i for i, text in enumerate(dict.fromkeys(filter(None, means)))}
        numbers = [distinct[text] if text else -1 for text in means]
        return Coded(np.array([*numbers, -1], np.int32)[self._at.all()], list(distinct))


@dataclass
class Form:
    """Values that are not numbers and share the text before and after."""

    example: str
    row: int
    count: int = 0


class Numbers:
    """A collector of one column's numbers, part by part.

    ``odd`` holds values that are not numbers by form; ``done_to`` counts rows by how they were
    changed to read them.
    """

    def __init__(self, column: str, dialect: Dialect, about: int) -> None:
        self.column, self.dialect = column, dialect
        self.odd: dict[tuple[str, str], Form] = {}
        self.done_to: Counter[str] = Counter()
        self._values, self._simple = Growing(np.float64, about), True

    def add(self, part: Any) -> None:
        """Add rows; raise ``pyarrow.ArrowException`` if they are neither numbers nor texts."""
        import pyarrow as pa

        if pa.types.is_dictionary(part.type):
            part = part.dictionary_decode()
        is_plain = not (is_text(part.type) or self.dialect.translates(self.column))
        read = _float if is_plain else self._read
        self._values.add(read(part))

    def done(self) -> NDArray[np.float64]:
        """Return (n,) all rows, NaN where a value is missing."""
        return self._values.all()

    def _read(self, part: Any) -> NDArray[np.float64]:
        import pyarrow as pa
        from pyarrow import compute

        texts, dialect = texts_of(part), self.dialect
        if not is_text(part.type):  # numbers of Parquet, written with a point
            dialect = replace(dialect, decimal=".", thousands="")
        if dialect.translates(self.column):
            texts = _translated(texts, self.column, dialect)
        elif dialect.decimal == "." and self._simple:
            try:
                return _float(texts)
            except pa.ArrowException:
                self._simple = False
        plain = numerals(texts, dialect)
        try:
            return _float(plain)
        except pa.ArrowException:
            pass
        is_odd = compute.invert(compute.match_substring_regex(plain, NUMBER))
        values = _float(compute.if_else(is_odd, None, plain))
        odd = np.flatnonzero(is_odd.fill_null(False))
        values[odd] = self._odd(texts.take(odd).to_pylist(), odd)
        return values

    def _odd(self, texts: list[str], rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return (k,) numbers without adjacent marks and limits; record the rest in ``odd``."""
        import pyarrow as pa
        from pyarrow import compute

        counts = Counter(texts)
        first_at = dict(zip(reversed(texts), reversed(rows.tolist()), strict=True))
        how = {text: self._without_marks(text) for text in counts}
        plain = numerals(pa.array([number for number, _ in how.values()]), self.dialect)
        good = compute.match_substring_regex(plain, NUMBER).to_pylist()
        values = _float(compute.if_else(pa.array(good), plain, None)).tolist()
        meant = {}
        for text, is_number, value in zip(how, good, values, strict=True):
            done = how[text][1]
            self.done_to.update(dict.fromkeys(done, counts[text]) if is_number else {})
            meant[text] = np.nan if not is_number or LIMITS["missing"] in done else value
            if not is_number:
                row = self._values.count + first_at[text] + 1
                self.odd.setdefault(_form(text), Form(text, row)).count += counts[text]
        return np.array([meant[text] for text in texts])

    def _without_marks(self, text: str) -> tuple[str, list[str]]:
        """Return a value without adjacent marks and limits, and what was removed."""
        text, done = text.strip().replace(MINUS, "-"), []
        marks = self.dialect.marks_of(self.column)
        censored = self.dialect.censored_as(self.column)
        while True:
            if found := next((mark for mark in marks if _beside(text, mark)), None):
                text = text.removesuffix(found) if text.endswith(found) else text[len(found) :]
                done.append(f"read without {found!r}")
            elif censored and (limit := LIMIT.match(text)):
                text = text[limit.end() :]
                done.append(LIMITS[censored])
            else:
                return text, done
            text = text.strip()

    def refuse(self, where: str, rows: int) -> None:
        """Raise ``TaskError`` if some values are not numbers, with advice for each form."""
        if not self.odd:
            return
        forms = [*self.odd.values()]
        total = sum(form.count for form in forms)
        each = [
            f"{shown(form.example)} in row {form.row}" + _also(form.count) for form in forms[:SHOWN]
        ]
        more = f", and {len(forms) - SHOWN} more forms" * (len(forms) > SHOWN)
        said = ", ".join(each) + more
        said += ", which is not a number. " if total == 1 else ", which are not numbers. "
        last = (
            " If the file ends with a footer, set skip-last = 1."
            if total == 1 and forms[0].row == rows
            else ""
        )
        raise TaskError(
            f"numeric column {self.dialect.named(self.column)} of {where} contains {said}"
            + " ".join(self._advice(forms))
            + last
        )

    def _advice(self, forms: list[Form]) -> list[str]:
        """Return advice for these forms, one sentence per setting."""
        marks, limits, rest, dates, negative = [], [], [], False, ""
        for form in forms:
            if DATE.match(form.example):
                dates = True
                continue
            before, number, behind = _split(form.example)
            behind, limit = behind.strip(), LIMIT.match(before)
            if number and behind in MINUS_BEHIND:
                negative = form.example
                continue
            if limit and number:
                limits.append(form.example)
            if number and (mark := (before[limit.end() :] if limit else before).strip()):
                marks.append(mark)
            if any(letter.isdigit() for letter in behind):
                number = ""
            elif number and behind:
                marks.append(behind)
            if not number or not _reads([number], self.dialect):
                rest.append(number or form.example)
        said = []
        if dates:
            said.append(
                "These look like dates: write numbers instead, such as days since a day that all "
                "silos agree on."
            )
        if negative:
            said.append(f"If {shown(negative)} is below 0, write the minus in front of the number.")
        if limits:
            said.append(
                f'Set the silo\'s option censored = "limit" to read {shown(limits[0])} as its '
                'limit, or "missing" to leave it out.'
            )
        if marks := list(dict.fromkeys(marks)):
            listed = ", ".join(f'"{mark[:LONGEST]}"' for mark in marks[:SHOWN])
            said.append(f"To read only the numbers, set ignore-marks = [{listed}].")
        if rest:
            said.append(self._setting_for(rest))
        return said

    def _setting_for(self, texts: list[str]) -> str:
        """Return decimal and thousands settings that would read all of these."""
        now = {"decimal": self.dialect.decimal, "thousands": self.dialect.thousands}
        ways = []
        for decimal, thousands in product((",", "."), ("", ".", ",", " ", "'", "_")):
            if decimal != thousands and _reads(
                texts, Dialect(decimal=decimal, thousands=thousands)
            ):
                other = {"decimal": decimal, "thousands": thousands}
                ways.append([f'{key} = "{to}"' for key, to in other.items() if to != now[key]])
        if not ways:
            return (
                "If it means a missing value, add it to the silo's option missing; if a "
                f"number, to [data.codes.{self.column}]."
            )
        least = min(map(len, ways))
        best = [" and ".join(way) for way in ways if len(way) == least]
        return f"If it is a number, set the silo's option {', or '.join(best)}."


LIMITS = {"limit": "read as the limit", "missing": "beyond a limit, read as missing"}
"""Setting → message about censored values."""


def _beside(text: str, mark: str) -> bool:
    return text != mark and (text.endswith(mark) or text.startswith(mark))


def _split(text: str) -> tuple[str, str, str]:
    """Return the text before a number, the number, and the text after it."""
    found = re.search(rf"[+\-{MINUS}]?\d(?:[\d.,'’_\s]*\d)?", text)
    if not found:
        return text, "", ""
    return text[: found.start()], found[0], text[found.end() :]


def _form(text: str) -> tuple[str, str]:
    """Return a value's form; values of one form differ only in their number."""
    before, number, behind = _split(text.strip())
    plain = bool(number) and not (before or behind)
    return (before.strip(), behind.strip()) if not plain else ("", re.sub(r"\d+", "0", number))


def _reads(texts: list[str], dialect: Dialect) -> bool:
    import pyarrow as pa
    from pyarrow import compute

    plain = numerals(pa.array([text.replace(MINUS, "-") for text in texts]), dialect)
    return bool(compute.all(compute.match_substring_regex(plain, NUMBER)).as_py())


def _translated(texts: Any, column: str, dialect: Dialect) -> Any:
    """Replace codes by their meaning.

    Only texts that are codes are looked up: most numbers differ, and looking up each is slow.
    """
    import pyarrow as pa
    from pyarrow import compute

    texts = compute.replace_substring(compute.utf8_trim_whitespace(texts), MINUS, "-")
    forms = "|".join(f"{re.escape(code)}{dialect.nothing}?" for code in dialect.codes_of(column))
    coded = compute.fill_null(compute.match_substring_regex(texts, rf"^\s*({forms})\s*$"), False)
    means = [dialect.meant(column, text) for text in texts.filter(coded).to_pylist()]
    return compute.replace_with_mask(texts, coded, pa.array(means, pa.string()))


def _float(found: Any) -> NDArray[np.float64]:
    import pyarrow as pa

    # Whole numbers beyond 2**53 are rounded, as they are if they come as texts.
    values: NDArray[np.float64] = found.cast(pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return values.astype(np.float64)


def numerals(texts: Any, dialect: Dialect) -> Any:
    """Return texts with a decimal point and no thousands marks; null if missing."""
    import pyarrow as pa
    from pyarrow import compute, csv

    texts = compute.utf8_trim_whitespace(texts)
    missing = compute.is_in(texts, value_set=pa.array(csv.ConvertOptions().null_values))
    texts = compute.if_else(missing, None, texts)
    if mark := dialect.thousands:
        for alike in LOOKALIKES.get(mark, ""):
            texts = compute.replace_substring(texts, alike, mark)
        every, decimal = re.escape(mark), re.escape(dialect.decimal)
        grouped = compute.match_substring_regex(
            texts, rf"^[+-]?[1-9]\d{{0,2}}({every}\d{{3}})+({decimal}\d*)?$"
        )
        texts = compute.if_else(grouped, compute.replace_substring(texts, mark, ""), texts)
    if dialect.decimal != ".":
        # A point that is left is no decimal point: 1.5 must not become 15.
        texts = compute.replace_substring(texts, ".", "?")
        texts = compute.replace_substring(texts, dialect.decimal, ".")
    return texts


def first(rows: NDArray[np.bool_]) -> int:
    """Return the number of the first true row, from 1."""
    return int(np.argmax(rows)) + 1
