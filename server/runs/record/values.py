"""JSON values that may be damaged: what is not as it should be is named, the rest is read."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import cache, lru_cache
from typing import Any, TypeVar

from coterie.strategies.rounds.reports import Evaluation

Kind = TypeVar("Kind")
Groups = tuple[tuple[str, ...], ...]


class Fields:
    """One JSON object; what is not as it should be goes into ``lost``, by its place and key."""

    __slots__ = ("lost", "place", "values")

    def __init__(self, value: object, place: str, lost: list[str]) -> None:
        self.values: dict[str, Any] = value if isinstance(value, dict) else {}
        self.place, self.lost = place, lost
        if value is not None and not isinstance(value, dict):
            self.lose("an entry")

    def lose(self, key: str) -> None:
        self.lost.append(f"{self.place}{key} is damaged")

    def of(self, key: str, kind: type[Kind]) -> Kind:
        """A value of this kind, else an empty one."""
        value = self.values.get(key)
        if isinstance(value, kind):
            return value
        if value is not None:
            self.lose(key)
        return kind()

    def number(self, key: str) -> float:
        """NaN where there is none."""
        value: Any = self.values.get(key)
        kind = type(value)
        if (kind is float or kind is int) and (-1e300 < value < 1e300 or abs(value) == math.inf):
            return float(value)
        if value is not None:
            self.lose(key)
        return math.nan

    def amount(self, key: str) -> float:
        """At least 0; 0 where it is not known."""
        value: Any = self.values.get(key)
        kind = type(value)
        if (kind is float or kind is int) and 0 <= value < 1e300:
            amount: float = value
            return amount
        self.number(key)
        return 0

    def whole(self, key: str) -> int:
        value = self.values.get(key)
        return value if type(value) is int and value >= 0 else int(self.amount(key))

    def text(self, key: str) -> str:
        return _lines(self.values.get(key))

    def texts(self, key: str) -> dict[str, str]:
        return {clean(name): _lines(value) for name, value in self.of(key, dict).items()}

    def names(self, key: str) -> tuple[str, ...]:
        return self._names(key, self.of(key, list))

    def _names(self, key: str, values: list[Any]) -> tuple[str, ...]:
        names = tuple(clean(name) for name in values if isinstance(name, str))
        if len(names) < len(values):
            self.lose(key)
        return names

    def groups(self, key: str) -> Groups:
        """Disjoint; a silo that is named twice counts once."""
        seen: set[str] = set()
        groups = []
        for group in self.of(key, list):
            names = self._names(key, group if isinstance(group, list) else [group])
            fresh = tuple(name for name in dict.fromkeys(names) if name not in seen)
            if len(fresh) < len(names):
                self.lose(key)
            seen |= set(fresh)
            groups += [fresh] if fresh else []
        return tuple(groups)

    def numbers(self, key: str) -> dict[str, float]:
        """Name → number at least 0, of those that are known."""
        own = self.inside(key)
        found = {clean(name): own.number(name) for name in own.values}
        return {name: value for name, value in found.items() if 0 <= value < math.inf}

    def scalars(self, kind: type[Kind]) -> Kind:
        """A dataclass of scalars whose fields are called like the keys; see ``dashed``.

        What is unknown, NaN, has the field's default if there is one.
        """
        shape: Any = kind
        required, others = _readers(shape)
        told = {name: read(self, key) for name, key, read in required}
        known = ((name, read(self, key)) for name, key, read in others)
        return kind(**told, **{name: value for name, value in known if value == value})

    def flag(self, key: str) -> bool:
        return self.values.get(key) is True

    def inside(self, key: str) -> Fields:
        return Fields(self.of(key, dict), f"{self.place}{key}: ", self.lost)

    def each(self, key: str) -> Iterator[tuple[str, Fields]]:
        """The objects in an object, by name."""
        place = f"{self.place}{key}: "
        for name, value in self.of(key, dict).items():
            yield clean(name), Fields(value, place, self.lost)

    def evaluation(self, key: str) -> dict[str, Evaluation]:
        return {
            name: (one.number("loss"), one.number("error"), one.whole("num-examples"))
            for name, one in self.each(key)
        }


def _lines(text: object) -> str:
    """Text of several lines."""
    return "" if text is None else "\n".join(map(_cleaned, str(text).split("\n")))


def clean(text: object) -> str:
    """Text without what neither a page nor a picture nor a terminal can hold."""
    return _cleaned(str(text))


@lru_cache(maxsize=100_000)
def _cleaned(text: str) -> str:
    if text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(c)[0] == "C" else c for c in text)


def clean_within(value: Any) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return _cleaned(value)
    if isinstance(value, list):
        return [clean_within(one) for one in value]
    if isinstance(value, dict):
        return {clean(key): clean_within(one) for key, one in value.items()}
    return value


def known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


_Readers = list[tuple[str, str, Callable[[Fields, str], Any]]]


@cache
def _readers(kind: Any) -> tuple[_Readers, _Readers]:
    """Name, key and what reads it, of the fields without and of those with a default."""
    by_type = {"int": Fields.whole, "float": Fields.number, "str": Fields.text, "bool": Fields.flag}
    found: tuple[_Readers, _Readers] = [], []
    for one in fields(kind):
        read: Callable[[Fields, str], Any] = by_type[str(one.type)]
        found[one.default is not MISSING].append((one.name, one.name.replace("_", "-"), read))
    return found


def dashed(value: Any) -> dict[str, Any]:
    """A dataclass of numbers as JSON."""
    return {
        name.replace("_", "-"): known(one) if isinstance(one, float) else one
        for name, one in vars(value).items()
    }
