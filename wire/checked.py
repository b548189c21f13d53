"""Answers in JSON, as checked values."""

from __future__ import annotations

from typing import TypeVar

from flwr.app import ConfigRecord, RecordDict
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from coterie.wire.errors import WireError
from coterie.wire.limits import MAX_ANSWER_BYTES, plain_text
from coterie.wire.names import CONFIG

T = TypeVar("T")


def checked_answer(content: RecordDict, entry: str, kind: TypeAdapter[T], what: str) -> T:
    """Return the value of a text in an answer; ``what`` names it in errors.

    Raises:
        WireError: there is no such text, it is too long, or the value is of the wrong kind.
    """
    config = content.get(CONFIG)
    text = config.get(entry) if isinstance(config, ConfigRecord) else None
    if not isinstance(text, str) or len(text) > MAX_ANSWER_BYTES:
        raise WireError(f"{what} must be a text of at most {MAX_ANSWER_BYTES:,} bytes.")
    try:
        return kind.validate_json(text)
    except ValueError as error:
        raise WireError(f"{what} cannot be read: {plain_text(problem_of(error), 200)}.") from None


def problem_of(error: ValueError) -> str:
    """Return the first problem that pydantic found in a value, with the place where it is."""
    first = first_problem(error)
    place = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Value error, ")
    return f"{place}: {problem}" if place else problem


def first_problem(error: ValueError) -> ErrorDetails:
    """Return the first problem that pydantic found in a value, without the value."""
    assert isinstance(error, ValidationError)
    return error.errors(include_url=False, include_context=False, include_input=False)[0]
