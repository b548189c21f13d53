"""Files in a run's folder that have one value as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from coterie import wire
from coterie.strategies.errors import refused
from coterie.system.files import write_atomically
from coterie.wire.checked import problem_of

T = TypeVar("T")


def write(file: Path, kind: TypeAdapter[T], value: T) -> None:
    """Write a value, atomically."""
    write_atomically(file, kind.dump_json(value, indent=1, by_alias=True))


def read(file: Path, kind: TypeAdapter[T], advice: str) -> T:
    """Return a written value, checked.

    Raises:
        FederationError: there is none, or it cannot be read; then with the advice.
    """
    try:
        return kind.validate_json(file.read_bytes())
    except OSError as error:
        raise refused(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        problem = wire.plain_text(problem_of(error), 200)
        raise refused(
            f"{file} is damaged, or was written by another version: {problem}. {advice}"
        ) from None
