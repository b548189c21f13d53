"""Options: one frozen class is the only source of its keys, their defaults, bounds and help.

A field with a description is a key of a run, written with dashes (``num-groups``) in files and on
command lines; a field without one can be set from Python only. A field whose type is an options
class adds its keys to the containing class. Help, documentation, the defaults in ``pyproject.toml``
and the errors are all derived from here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from coterie.strategies.errors import FederationError, refused
from coterie.wire import NotNegative as NotNegative
from coterie.wire import Positive as Positive
from coterie.wire import Scalar as Scalar

Config = Mapping[str, Scalar]
"""Entries of training messages, by wire key."""
Count = Annotated[int, Field(ge=1, le=100_000)]
CountOrNone = Annotated[int, Field(ge=0, le=100_000)]
Times = Annotated[int, Field(ge=1, le=10_000)]
TimesOrNone = Annotated[int, Field(ge=0, le=10_000)]
Seed = Annotated[int, Field(ge=0, title="Seed of the strategy's random choices.")]
Sample = Annotated[
    CountOrNone, Field(description="Number of silos sampled per round, using the seed. 0: all.")
]
Spell = Callable[[str], str]

SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WORDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def dashed(name: str) -> str:
    """Return a field's name as it is written in files and on command lines."""
    return name.replace("_", "-")


def underscored(name: str) -> str:
    """Return a key's name as it is written in Python."""
    return name.replace("-", "_")


@dataclass(frozen=True)
class Key:
    """One key of a run, named with dashes; ``path`` leads from the options class to the value."""

    name: str
    default: Scalar
    help: str
    path: tuple[str, ...]
    field: FieldInfo = dataclasses.field(repr=False, compare=False)

    @property
    def takes_numbers(self) -> bool:
        """Whether a number is allowed, be it beside texts."""
        schema = schema_of(self.field)
        kinds = {part.get("type") for part in (schema, *schema.get("anyOf", ()))}
        return bool(kinds & {"number", "integer"})

    @property
    def bounds(self) -> str:
        """The allowed values in signs; computed on access, because that is slow."""
        return _signs(schema_of(self.field))


class Options(BaseModel):
    """The base of frozen option classes; see the module.

    Raises:
        FederationError: an unknown name, or a value out of bounds; every problem is named.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, arbitrary_types_allowed=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            known = ", ".join(sorted(type(self).model_fields))
            raise wrong_options(problems_of(error, type(self), underscored, known)) from None

    # Checking one from keys (``build``) does not go through here: it names what it was given.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    @cache
    def own_keys(cls) -> dict[str, Key]:
        """Return the keys by name, in order."""
        return dict(_keys(cls))

    @classmethod
    def build(cls, values: Mapping[str, Any], **fields: Any) -> Self:
        """Create options from keys with dashes, and from fields that are not keys.

        Raises:
            FederationError: a value is out of bounds; the keys are named as they are written.
        """
        parts: dict[str, Any] = {}
        for name, value in values.items():
            key = cls.own_keys()[name]
            *path, last = key.path
            part = parts
            for step in path:
                part = part.setdefault(step, {})
            # Otherwise true would be 1.
            part[last] = str(value) if isinstance(value, bool) and key.takes_numbers else value
        try:
            return cls.model_validate({**parts, **fields})
        except ValidationError as error:
            raise wrong_options(
                problems_of(error, cls, dashed, ", ".join(cls.own_keys()))
            ) from None

    def plain(self) -> dict[str, Scalar]:
        """Return the keys and their values."""
        keys = self.own_keys().items()
        return {name: attrgetter(".".join(key.path))(self) for name, key in keys}

    def problems(self, training: Config) -> Iterator[str]:
        """Yield what does not fit together, in keys with dashes; nothing by default.

        Args:
            training: entries of the run's training messages, as far as they are known.
        """
        yield from ()

    def require_consistency(self, training: Config, *, spell: Spell) -> None:
        """Check that options fit together, and fit the training.

        Raises:
            FederationError: every problem is named.
        """
        keys = self.own_keys()

        def respelled(word: re.Match[str]) -> str:
            return spell(word[0]) if word[0] in keys else word[0]

        dashed_words = r"[a-z]+(?:-[a-z]+)+"
        found = [re.sub(dashed_words, respelled, text) for text in self.problems(training)]
        if found:
            raise wrong_options(found)


def wrong_options(problems: list[str]) -> FederationError:
    """Return the error that names all problems."""
    return refused(f"{'; '.join(problems)}.")


def problems_of(
    error: ValidationError, kind: type[BaseModel], spell: Spell, known: str
) -> list[str]:
    """Return one sentence per wrong field: what it must be, and what it is."""
    found: dict[str, str] = {}
    for entry in error.errors():
        owner, name = kind, str(entry["loc"][0]) if entry["loc"] else ""
        for step in entry["loc"][1:]:
            nested = owner.model_fields.get(underscored(name))
            if nested is None or not _is_options(nested):
                break  # what follows are the members of a union
            owner, name = nested.annotation, str(step)  # type: ignore[assignment]
        found.setdefault(name, _problem(entry, owner, name, spell, known))
    return list(found.values())


def _problem(entry: Any, owner: type[BaseModel], name: str, spell: Spell, known: str) -> str:
    if entry["type"] == "extra_forbidden":
        return f"unknown key {name!r} (known: {known})"
    if not name or entry["type"] == "value_error":
        text = str(entry["msg"]).removeprefix("Value error, ").rstrip(".")
        problem = f"{spell(name)}: {text}" if name and name not in text else text
        return problem if "Got" in problem else f"{problem}. Got {entry['input']!r}"
    field = owner.model_fields.get(underscored(name)) or next(
        f for f in owner.model_fields.values() if f.alias == name
    )
    whole = "a whole number, " if entry["type"].startswith("int_") else ""
    words = whole + _words(schema_of(field))
    return f"{spell(field.alias or name)} must be {words}. Got {entry['input']!r}"


def _keys(kind: type[Options], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Key]]:
    own = kind.__annotations__  # they come before those of the classes that it is made of
    for name, field in sorted(kind.model_fields.items(), key=lambda one: one[0] not in own):
        here = (*path, name)
        if _is_options(field) and field.description is None:
            if field.json_schema_extra != {"keys": False}:
                yield from _keys(field.annotation, here)  # type: ignore[arg-type]
        elif field.description is not None:
            key = field.alias or dashed(name)
            default = field.get_default(call_default_factory=True)
            yield key, Key(key, default, field.description, here, field)


def _is_options(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Options)


def schema_of(field: FieldInfo) -> Mapping[str, Any]:
    """Return a field's allowed values as a JSON schema."""
    kind: Any = field.annotation
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    return _schema_of_kind(kind)


@cache
def _schema_of_kind(kind: Any) -> Mapping[str, Any]:
    return TypeAdapter(kind).json_schema()


def _signs(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_signs, schema["anyOf"])))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    bounds = [f"{sign} {_number(schema[name])}" for name, sign in SIGNS.items() if name in schema]
    return ", ".join(bounds)


def _words(schema: Mapping[str, Any]) -> str:
    """Return bounds as words: "at least 0 and at most 1, or 'auto'"."""
    if "anyOf" in schema:
        return ", or ".join(map(_words, schema["anyOf"]))
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        *most, last = schema["enum"]
        return f"{', '.join(most)} or {last}"
    bounds = [f"{word} {_number(schema[name])}" for name, word in WORDS.items() if name in schema]
    kind = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    return " and ".join(bounds) or kind.get(schema.get("type", ""), _text(schema))


def _number(value: float) -> str:
    """Return a bound in full: 2147483647, not 2.14748e+09."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def _text(schema: Mapping[str, Any]) -> str:
    if "pattern" in schema:
        return f"text of the form {schema['pattern']}"
    if "maxLength" in schema:
        return f"text of at most {schema['maxLength']} characters"
    return "text that is not empty" if "minLength" in schema else "text"


def rows_of(keys: Mapping[str, Key]) -> list[str]:
    """Return keys as rows of a Markdown table: key, default, bounds, meaning."""
    return [
        f"| `{key.name}` | `{key.default!r}` | ".replace("'", '"') + f"{key.bounds} | {key.help} |"
        for key in keys.values()
    ]
