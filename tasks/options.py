"""What users write: options of a silo, places of files, and the run keys of a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.tasks.base import Option
from coterie.tasks.errors import TaskError


def as_option(value: Any) -> Any:
    """Return an option in transmittable form: a TOML table or list becomes JSON text."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def read_options(
    task: str, options: Mapping[str, Option], defaults: Mapping[str, Option]
) -> dict[str, Any]:
    """Fill in defaults and convert to their types; raise ``TaskError`` for invalid options."""
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise TaskError(
            f"task {task!r} has no option {unknown[0]!r}. It has: {', '.join(sorted(defaults))}."
        )
    filled: dict[str, Any] = dict(defaults)
    for key, value in options.items():
        kind = type(defaults[key])
        try:
            filled[key] = _flag(value) if kind is bool else kind(as_option(value))
            if isinstance(value, float) and kind is int and filled[key] != value:
                raise ValueError  # not cut to a whole number
        except (TypeError, ValueError, OverflowError):
            must = "true or false" if kind is bool else f"of type {kind.__name__}"
            raise TaskError(
                f"option {key!r} of task {task!r} must be {must}. Got {value!r}."
            ) from None
    return filled


def _flag(value: Option) -> bool:
    """Parse a flag from text, because ``bool("false")`` is true."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError from None


def place_of(text: str) -> Path:
    """Return the path in a user's text, or raise ``TaskError`` for an unknown home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise TaskError(
            f"{text!r} does not exist: there is no home folder {Path(text).parts[0]} on this "
            "machine. Use an absolute path."
        ) from None


def with_task_keys(keys: Any) -> Any:
    """Return a file's run keys, ``[run.task]`` flattened to ``task.<name>``."""
    if not isinstance(keys, Mapping) or not isinstance(keys.get("task"), Mapping):
        return keys
    own = {f"task.{name}": value for name, value in keys["task"].items()}
    return {**{key: value for key, value in keys.items() if key != "task"}, **own}
