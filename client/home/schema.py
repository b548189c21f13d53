"""The declaration of a silo's settings.

A setting is a dataclass field, annotated with its type and bounds and with ``In``: its section of
``silo.toml`` and its meaning. The file's reader and template, Flower's node configuration and the
table in the documentation are generated from it.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, create_model

from coterie.tasks.base import Option
from coterie.wire.checked import first_problem

WIDTH = 98
"""Characters per line of the file."""


@dataclass(frozen=True)
class In:
    """A setting's place in ``silo.toml``, and its meaning.

    Attributes:
        section: of the file; empty: before all sections.
        example: as TOML, shown in a comment; empty: the default is written.
    """

    section: str
    help: str
    example: str = ""


@dataclass(frozen=True)
class Setting:
    """A field that is a setting.

    Attributes:
        name: with underscores, as in the file.
        kind: its type with all bounds.
        default: its value if the file omits it; ``MISSING`` if it is required.
    """

    name: str
    kind: Any
    default: Any
    place: In

    @property
    def key(self) -> str:
        """Its name in a node configuration."""
        return self.name.replace("_", "-")

    @cached_property
    def is_list(self) -> bool:
        """Whether it is a list, which a node configuration writes with commas."""
        kinds = [self.kind, *get_args(self.kind)]
        kinds += [inner for kind in kinds for inner in get_args(kind)]
        return any(get_origin(kind) is tuple for kind in kinds)

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:  # made once: nodes are read with every message
        return TypeAdapter(self.kind, config=ConfigDict(coerce_numbers_to_str=True))

    def read(self, value: Any) -> Any:
        """Return a parsed value of a node configuration.

        Raises:
            ValueError: it is invalid. The text says what it must be.
        """
        if self.is_list:
            value = [word.strip() for word in str(value).split(",") if word.strip()]
        try:
            return self._adapter.validate_python(value)
        except ValueError as error:
            entry = first_problem(error)
            names = self.is_list and entry["type"].startswith("string")
            what = "names with commas between them" if names else _expected(entry)
            raise ValueError(what) from None


def _expected(entry: Any) -> str:
    kind, message = entry["type"].split("_")[0], str(entry["msg"])
    known = {"bool": "true or false", "int": "a whole number", "float": "a number"}
    text = message.removeprefix("Value error, must be ").removeprefix("Input should be ")
    return known.get(kind) or text.partition(". Got")[0]


def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares, in order."""
    return _settings_of(kind)


@cache
def _settings_of(kind: Any) -> tuple[Setting, ...]:
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        place = next(
            (one for one in getattr(hint, "__metadata__", ()) if isinstance(one, In)), None
        )
        if place is not None:
            found.append(Setting(field.name, hint, field.default, place))
    return tuple(found)


def in_section(name: str, kinds: Iterable[type]) -> list[Setting]:
    """Return the settings of a section of the file, in order."""
    return [one for kind in kinds for one in settings_of(kind) if one.place.section == name]


def section_model(name: str, kinds: Iterable[type], base: type) -> Any:
    """Return a pydantic model of a section of the file."""
    fields: Any = {
        one.name: (one.kind, ... if one.default is dataclasses.MISSING else one.default)
        for one in in_section(name, kinds)
    }
    return create_model(f"Section{name.title()}", __base__=base, **fields)


def template(name: str, kinds: Iterable[type], *, commented: bool = False) -> str:
    """Return a section of the file: every setting with its meaning and its default."""
    lines = [f"{'# ' * commented}[{name}]"]
    for one in in_section(name, kinds):
        lines += textwrap.wrap(one.place.help, WIDTH, initial_indent="# ", subsequent_indent="# ")
        shown = one.place.example or json.dumps(_plain(one.default))
        lines.append(f"{'# ' * (commented or bool(one.place.example))}{one.name} = {shown}")
    return "\n".join(lines) + "\n"


def table(sections: Mapping[str, Iterable[type]]) -> str:
    """Return the settings as a Markdown table."""
    lines = ["| `silo.toml` | default | meaning |", "|---|---|---|"]
    for name, kinds in sections.items():
        for one in in_section(name, kinds):
            none = one.default in (None, dataclasses.MISSING)
            default = "" if none else f"`{json.dumps(_plain(one.default))}`"
            lines.append(f"| `[{name}]` `{one.name}` | {default} | {one.place.help} |")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_all(
    config: Mapping[str, Option], kind: type, *, prefix: str = ""
) -> tuple[dict[str, Any], str]:
    """Return field → value for a dataclass's settings in a node config, and the first error.

    The error is empty if all values are valid.
    """
    found: dict[str, Any] = {}
    for one in settings_of(kind):
        key = prefix + one.key
        if key in config:
            try:
                found[one.name] = one.read(config[key])
            except (ValueError, OverflowError) as error:
                return found, f"{key} must be {error}. Got {config[key]!r}."
    return found, ""
