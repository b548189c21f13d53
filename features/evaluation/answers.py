"""A silo's answer to ``evaluate.given``: figures of given models, as checked JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Annotated

from flwr.app import ConfigRecord, RecordDict
from pydantic import AfterValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from coterie.wire.checked import checked_answer
from coterie.wire.errors import WireError
from coterie.wire.limits import MAX_NAME, MAX_WORD, plain_text
from coterie.wire.names import CONFIG, GIVEN

ANSWER = "evaluation"
MOST_MODELS = 50
MOST_PARTS = 1000
LARGEST = 1e100
"""Largest absolute value: above the squares of all 32-bit targets."""
Number = Annotated[float, Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Short = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Name = Annotated[str, AfterValidator(lambda text: plain_text(text, MAX_NAME))]
Word = Annotated[str, AfterValidator(lambda text: plain_text(text, MAX_WORD))]
Text = Annotated[str, AfterValidator(plain_text)]


@dataclass(frozen=True)
class Value:
    """A metric's value with its 95% interval; without ends if it has none."""

    value: Number
    low: Number | None = None
    high: Number | None = None


Figures = Mapping[Short, Value]
"""Metric → value; ``error`` is the primary metric's shortfall (``Metric.shortfall``)."""


@dataclass(frozen=True)
class Difference:
    """Error of the model ``second`` less that of ``first`` on the same samples.

    ``p`` is of the hypothesis that both are equally good; None where it cannot be computed.
    """

    first: Short
    second: Short
    value: Number
    low: Number | None = None
    high: Number | None = None
    p: Annotated[float, Field(ge=0, le=1)] | None = None


@dataclass(frozen=True)
class Part:
    """A subgroup of the test samples; ``samples`` is None if it is hidden."""

    column: Name
    value: Word
    samples: Count | None = None
    models: Annotated[Mapping[str, Figures], Field(max_length=MOST_MODELS)] = Field(
        default_factory=dict
    )


@dataclass(frozen=True)
class Answer:
    """What a silo says of the models that it was sent.

    Attributes:
        samples: number of test samples.
        kept_back: metrics that its policy keeps at the silo.
        models: name of a model → figures.
        left_out: subgroup's column → why it is not in ``parts``.
    """

    samples: Count
    models: Annotated[Mapping[str, Figures], Field(max_length=MOST_MODELS)]
    kept_back: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    differences: Annotated[tuple[Difference, ...], Field(max_length=MOST_MODELS**2)] = ()
    parts: Annotated[tuple[Part, ...], Field(max_length=MOST_PARTS)] = ()
    left_out: Annotated[Mapping[Name, Text], Field(max_length=64)] = Field(default_factory=dict)


_ANSWER = TypeAdapter(Answer)


def encode_answer(answer: Answer) -> RecordDict:
    text = _ANSWER.dump_json(answer, exclude_defaults=True).decode()
    return RecordDict({CONFIG: ConfigRecord({ANSWER: text})})


def decode_answer(content: RecordDict, names: Sequence[str]) -> Answer:
    """Read the reply of a silo that was sent the models ``names``.

    Raises:
        WireError: a field is missing, of the wrong kind, out of bounds, or of another model; or two
            models are compared several times.
    """
    found = checked_answer(content, ANSWER, _ANSWER, "its evaluation")
    named = {*found.models, *(name for one in found.parts for name in one.models)}
    pairs = [(one.first, one.second) for one in found.differences]
    if len({*pairs}) < len(pairs) or not {*pairs} <= {*combinations(names, 2)}:
        raise WireError(f"its evaluation must compare two of {', '.join(names)} at most once.")
    if named - {*names} or {*names} - found.models.keys():
        raise WireError(f"its evaluation must be of the models {', '.join(names)}.")
    return found


def names_in(config: ConfigRecord, number: int) -> tuple[str, ...]:
    """Return the names of the models in a message.

    Raises:
        WireError: they are not ``number`` different, short names.
    """
    given = config.get(GIVEN)
    names = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
    fits = len({*names}) == len(names) == number <= MOST_MODELS
    if not fits or not all(0 < len(one) <= MAX_NAME for one in names):
        raise WireError(f"{GIVEN!r} must name each of the {number} models, at most {MOST_MODELS}.")
    return tuple(names)
