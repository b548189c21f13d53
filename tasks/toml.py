"""TOML files that people write: read, checked, and refused in one way.

``refuse`` makes the error that a caller raises from its text.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from coterie.tasks.text import read_text

Model = TypeVar("Model", bound=BaseModel)
Refuse = Callable[[str], Exception]


def read_table(
    file: Path, refuse: Refuse, *, absent: str = "", tidy: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return a file's content; ``absent`` is the error's text if there is no file."""
    try:
        text = read_text(file)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise refuse(f"{file} is not UTF-8: {byte}. Save it as UTF-8.") from None
    except OSError as error:
        is_absent = absent and isinstance(error, FileNotFoundError)
        reason = absent if is_absent else f"{file} cannot be read: {error.strerror}."
        raise refuse(reason) from None
    return table_of(tidy(text), str(file), refuse)


def table_of(text: str, source: str, refuse: Refuse) -> dict[str, Any]:
    """Return the content of a TOML text; ``source`` names it in errors."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise refuse(f"{source} is not TOML: {error}.") from None
    except RecursionError:
        raise refuse(f"{source} has arrays or tables nested too deeply.") from None


def checked(kind: type[Model], table: dict[str, Any], source: object, refuse: Refuse) -> Model:
    """Return the content as a model; the error names every problem."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        problems = "; ".join(_problem(entry, kind) for entry in error.errors())
        raise refuse(f"{source} is wrong: {problems}.") from None


def _problem(entry: ErrorDetails, kind: type[BaseModel]) -> str:
    # Without the names that pydantic gives to the members of a union.
    loc = [str(part) for part in entry["loc"] if "[" not in str(part)]
    key = ".".join(loc)
    if entry["type"] == "missing":
        return f"key {key!r} is missing"
    if entry["type"] == "extra_forbidden":
        known = sorted(_keys(kind, loc[:-1]))
        near = get_close_matches(loc[-1], known, n=1)
        advice = f"the nearest is {near[0]}" if near else f"there are {', '.join(known)}"
        return f"unknown key {key!r}" + f": {advice}" * bool(known)
    text = entry["msg"].removeprefix("Value error, ").rstrip(".")
    text = f"{key}: {text[:1].lower()}{text[1:]}" if key else text
    is_short = isinstance(entry["input"], str | int | float)
    return f"{text}. Got {entry['input']!r}" if key and is_short and "Got" not in text else text


def _keys(kind: Any, path: list[str]) -> list[str]:
    """Return the keys of a table inside a model; empty if it is not a model."""
    fields = {own.alias or name: own.annotation for name, own in kind.model_fields.items()}
    if not path:
        return list(fields)
    inner = fields.get(path[0])
    is_model = isinstance(inner, type) and issubclass(inner, BaseModel)
    return _keys(inner, path[1:]) if is_model else []
