"""Read JSON values that may be damaged: invalid ones are named, the rest is read."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from coterie.strategies.rounds.reports import Evaluation, Figures
from coterie.wire import Value

Kind = TypeVar("Kind")
Groups = tuple[tuple[str, ...], ...]


class Fields:
    """One JSON object; invalid values are added to ``lost``, by their place and key."""

    __slots__ = ("lost", "place", "values")

    def __init__(self, value: object, place: str, lost: list[str]) -> None:
        self.values: dict[str, Any] = value if isinstance(value, dict) else {}
        self.place, self.lost = place, lost
        if value is not None and not isinstance(value, dict):
            self.lose("an entry")

    def lose(self, key: str) -> None:
        self.lost.append(f"{self.place}{key} is damaged")

    def of(self, key: str, kind: type[Kind]) -> Kind:
        """Return a value of this kind, or an empty one."""
        value = self.values.get(key)
        if isinstance(value, kind):
            return value
        if value is not None:
            self.lose(key)
        return kind()

    def number(self, key: str) -> float:
        """Return a number; NaN if there is none."""
        value: Any = self.values.get(key)
        kind = type(value)
        if (kind is float or kind is int) and (-1e300 < value < 1e300 or abs(value) == math.inf):
            return float(value)
        if value is not None:
            self.lose(key)
        return math.nan

    def amount(self, key: str) -> float:
        """Return a number of at least 0; 0 if it is unknown."""
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
        """Return disjoint groups; a silo that is named twice counts once."""
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
        """Return name → finite number of at least 0, for those that are known."""
        own = self.inside(key)
        found = {clean(name): own.number(name) for name in own.values}
        return {name: value for name, value in found.items() if 0 <= value < math.inf}

    def read(self, kind: type[Kind], /, **given: Any) -> Kind:
        """Read a dataclass whose fields are named like the keys, with dashes; see ``READERS``.

        Unknown values (NaN) become the field's default if there is one. ``given`` has fields with
        other keys or without a reader.
        """
        shape: Any = kind
        for name, key, read, has_default in _readers(shape):
            if name not in given:
                value = read(self, key)
                if not has_default or value == value:
                    given[name] = value
        return kind(**given)

    def flag(self, key: str) -> bool:
        return self.values.get(key) is True

    def inside(self, key: str) -> Fields:
        return Fields(self.of(key, dict), f"{self.place}{key}: ", self.lost)

    def each(self, key: str) -> Iterator[tuple[str, Fields]]:
        """Yield the objects in an object, by name."""
        place = f"{self.place}{key}: "
        for name, value in self.of(key, dict).items():
            yield clean(name), Fields(value, place, self.lost)

    def listed(self, key: str, kind: type[Kind]) -> tuple[Kind, ...]:
        """Return the objects in a list, each read as ``kind``."""
        found = (Fields(one, f"{self.place}{key}: ", self.lost) for one in self.of(key, list))
        return tuple(one.read(kind) for one in found)

    def optional(self, key: str, kind: type[Kind]) -> Kind | None:
        """Return an object read as ``kind``; None if there is none, or it is empty."""
        own = self.inside(key)
        return own.read(kind) if own.values else None

    def named(self, key: str, kind: type[Kind]) -> dict[str, Kind]:
        """Return the objects in an object, by name, each read as ``kind``."""
        return {name: one.read(kind) for name, one in self.each(key)}

    def figures(self, key: str) -> dict[str, Figures]:
        """Return silo → metric → number or numbers, for those that are known."""
        found: dict[str, dict[str, Value]] = {}
        for name, own in self.each(key):
            for metric, value in own.values.items():
                numbers = value if isinstance(value, list) else [value]
                if all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
                    found.setdefault(name, {})[clean(metric)] = value
                else:
                    own.lose(metric)
        return dict(found)

    def evaluation(self, key: str) -> dict[str, Evaluation]:
        return {
            name: (one.number("loss"), one.number("error"), one.whole("num-examples"))
            for name, one in self.each(key)
        }


def _lines(text: object) -> str:
    return "" if text is None else "\n".join(map(_cleaned, str(text).split("\n")))


def clean(text: object) -> str:
    """Return text without characters that a page, a picture or a terminal cannot hold."""
    return _cleaned(str(text))


@lru_cache(maxsize=100_000)
def _cleaned(text: str) -> str:
    if text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(c)[0] == "C" else c for c in text)


def clean_within(value: Any) -> Any:
    """Apply ``clean`` to every text in a JSON value."""
    if isinstance(value, str):
        return _cleaned(value)
    if isinstance(value, list):
        return [clean_within(one) for one in value]
    if isinstance(value, dict):
        return {clean(key): clean_within(one) for key, one in value.items()}
    return value


def known(value: float) -> float | None:
    """Return a finite value or None, because JSON has no NaN."""
    return value if math.isfinite(value) else None


Reader = Callable[[Fields, str], Any]
READERS: dict[Any, Reader] = {
    int: Fields.whole,
    float: Fields.number,
    str: Fields.text,
    bool: Fields.flag,
    tuple[str, ...]: Fields.names,
    Groups: Fields.groups,
    Mapping[str, str]: Fields.texts,
    Mapping[str, float]: Fields.numbers,
    Mapping[str, Any]: lambda entry, key: entry.of(key, dict),
    Mapping[str, Evaluation]: Fields.evaluation,
    Mapping[str, Figures]: Fields.figures,
}
"""Reader for each field type; dataclasses in it are read field by field as well."""


@cache
def _readers(kind: Any) -> list[tuple[str, str, Reader, bool]]:
    types = get_type_hints(kind)
    found = []
    for one in fields(kind):
        read = READERS.get(types[one.name]) or _nested(types[one.name])
        if read is None:
            continue
        has_default = one.default is not MISSING or one.default_factory is not MISSING
        found.append((one.name, one.name.replace("_", "-"), read, has_default))
    return found


def _nested(kind: Any) -> Reader | None:
    """Return a reader of a dataclass, of one or none, or of a tuple or a mapping of them."""
    if is_dataclass(kind):
        whole: Any = kind
        return lambda fields, key: fields.inside(key).read(whole)
    inner: Any = next(filter(is_dataclass, get_args(kind)), None)
    by_origin = {UnionType: Fields.optional, tuple: Fields.listed, Mapping: Fields.named}
    read = by_origin.get(get_origin(kind)) if inner else None
    return None if read is None else lambda fields, key: read(fields, key, inner)


def plain(value: Any) -> Any:
    """Return a dataclass of numbers and texts, or several, as JSON values."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    if is_dataclass(value):
        return {name.replace("_", "-"): plain(one) for name, one in vars(value).items()}
    return known(value) if isinstance(value, float) else value
