"""Models trained by sums: what a coordinator asks, what silos answer, and the checks of both.

A family of models (``coterie.features.sums.regression``, for example) has two sides. The silo's
side answers a question with arrays; the coordinator adds up the answers of all silos of a fit and
computes the next state from the sum (``Family``). A sum is always of one fixed set of silos: where
one is silent or wrong, the fit goes on without it, and asks all others again.

Both sides check every answer against the same layout. In a secure run answers are masked, and only
the silos and their sum can be checked.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from coterie import wire
from coterie.wire.fixed import SUMS, Words, total_of

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]
"""Arrays of real numbers by name."""
Layout = Mapping[str, tuple[int, ...]]
"""Shape of every array of an answer, by name."""
May = Callable[[NDArray[np.bool_]], str]
"""Returns why sums over these rows (n,) may not leave a silo; empty, once they are remembered. The
first call for an answer has all rows that the answer uses."""

LARGEST = 1e100
"""Largest absolute value of a number in a question or an answer."""
MOST_NUMBERS = 16_000_000
"""Most numbers of a question or an answer, together."""
MOST_WORDS = 10_000
MOST_SETTINGS = 100_000
"""Most characters of a fit's settings."""
WORDS = "words"


class FitError(ValueError):
    """A fit cannot go on. The text says why, for people; no silo's row is in it."""


class TooFarError(FitError):
    """The silo cannot answer at a question's coefficients, but may after a smaller step."""


@dataclass(frozen=True)
class Question:
    """What the silos of a fit are asked.

    Attributes:
        family: name of the family.
        settings: of the whole fit, as JSON values.
        arrays: of the present state; empty in the first exchange of a family that needs none.
    """

    family: str
    settings: Mapping[str, Any]
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a silo answers.

    Attributes:
        arrays: to be added to those of the others.
        words: names of what the numbers belong to, which all silos of a fit must have in common:
            from the task's declaration, never from rows.
    """

    arrays: Arrays
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Masked:
    """What a silo answers in a secure run: the numbers of an ``Answer``, masked."""

    numbers: Words
    words: tuple[str, ...]


def _plain(array: NDArray[Any]) -> dict[str, Any]:
    text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"type": array.dtype.str, "shape": array.shape, "base64": text}


def _array(plain: Any) -> NDArray[Any]:
    try:
        numbers = np.frombuffer(base64.b64decode(plain["base64"]), np.dtype(plain["type"]))
        return numbers.reshape(plain["shape"]).copy()
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an array: {error}") from None


Stored = Annotated[NDArray[Any], PlainValidator(_array), PlainSerializer(_plain)]
"""An array that a file of JSON keeps bit by bit."""


@dataclass(frozen=True)
class State:
    """A fit between two exchanges, or its end.

    Attributes:
        arrays: what the family remembers, any types and shapes.
        words: those of the silos; empty before their first answer.
        step: exchanges that were added up.
        done: whether ``arrays`` have the result.
    """

    arrays: Mapping[str, Stored] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    step: int = 0
    done: bool = False


class Family(Protocol):
    """The coordinator's side of a family: pure functions of a state."""

    name: ClassVar[str]
    """The name of a run of this family, in place of a strategy's."""

    def layout(self, question: Question, words: Sequence[str]) -> Layout:
        """Return the shapes that an answer to the question must have.

        Raises:
            ValueError: the question is not one of this family, or does not fit the words.
        """

    def objection(self, question: Question, arrays: Arrays, samples: int) -> str:
        """Return why an answer of the right shape is impossible; empty if it is possible.

        ``samples`` is the number of training samples that the silo stated.
        """

    def asked(self, settings: Mapping[str, Any], state: State) -> Arrays:
        """Return the arrays of the next question."""

    def next(self, settings: Mapping[str, Any], state: State, total: Arrays) -> State:
        """Return the state after one more sum over all silos of the fit.

        Raises:
            FitError: there is no such model.
        """

    def halved(self, settings: Mapping[str, Any], state: State) -> State | None:
        """Return the state with half the last step, after a silo answered that it went too far.

        None if there was no step yet: then the silo is left out.

        Raises:
            FitError: the step was halved too often.
        """

    def without(self, settings: Mapping[str, Any], state: State) -> State:
        """Return the state from which a fit goes on after a silo was left out of it."""


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as text for an entry of a message, the same text for equal settings."""
    return json.dumps(settings, sort_keys=True)


def read_settings(text: object) -> dict[str, Any]:
    """Read the settings of a fit.

    Raises:
        WireError: they are missing, too long, or no JSON object.
    """
    try:
        if not isinstance(text, str) or len(text) > MOST_SETTINGS:
            raise ValueError
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise wire.WireError(f"{wire.SUMS_OF!r} must be a JSON object, as a short text.")
    return found


def encode_question(question: Question) -> RecordDict:
    """Return the arrays of a question as a message's content; settings are among its terms."""
    arrays: wire.Model = {**question.arrays}
    return RecordDict({wire.ARRAYS: wire.encode_arrays(arrays, packed=True)} if arrays else {})


def decode_question(content: RecordDict, config: Mapping[str, object]) -> Question:
    """Read a question.

    Raises:
        WireError: it cannot be read, or has numbers that are not finite or out of bounds.
    """
    settings = read_settings(config.get(wire.SUMS_OF))
    return Question(str(config.get(wire.STRATEGY, "")), settings, _arrays(content))


def encode_answer(answer: Answer) -> RecordDict:
    arrays = wire.encode_arrays({**answer.arrays}, packed=True)
    words = ConfigRecord({WORDS: json.dumps(answer.words)})
    return RecordDict({wire.ARRAYS: arrays, wire.CONFIG: words})


def decode_answer(family: Family, question: Question, content: RecordDict, samples: int) -> Answer:
    """Read and check the reply of a silo that stated ``samples`` training samples.

    Raises:
        WireError: it is not a possible answer to the question.
    """
    answer = Answer(_arrays(content), _words(content))
    check_answer(family, question, answer, samples)
    return answer


def decode_masked(family: Family, question: Question, content: RecordDict) -> Masked:
    """Read the masked reply of a silo.

    Raises:
        WireError: it is not as long as an answer to the question.
    """
    words = _words(content)
    sizes = _layout(family, question, words).values()
    record = wire.array_records(content).get(wire.MASKED, ArrayRecord())
    sent = wire.decode_arrays(record).get(wire.MASKED)
    return Masked(SUMS.receive(sent, sum(map(math.prod, sizes))), words)


def _words(content: RecordDict) -> tuple[str, ...]:
    config = wire.config_records(content).get(wire.CONFIG)
    text = None if config is None else config.get(WORDS)
    try:
        words = json.loads(text) if isinstance(text, str) and len(text) < MOST_SETTINGS else None
    except (ValueError, RecursionError):
        words = None
    short = isinstance(words, list) and len(words) <= MOST_WORDS
    if words is None or not short or not all(_is_word(one) for one in words):
        raise wire.WireError(f"its answer must have {WORDS!r}: a list of short names.")
    return tuple(words)


def check_answer(family: Family, question: Question, answer: Answer, samples: int) -> None:
    """Check an answer: at the silo before it leaves, and at the coordinator.

    Raises:
        WireError: names the array that is missing, of another shape, or impossible.
    """
    layout = _layout(family, question, answer.words)
    if answer.arrays.keys() != layout.keys():
        raise wire.WireError(f"its answer must have the arrays {', '.join(sorted(layout))}.")
    for name, shape in layout.items():
        array = answer.arrays[name]
        if array.shape != shape:
            raise wire.WireError(f"array {name!r} must have shape {shape}. Got {array.shape}.")
        _check_numbers(name, array)
    if why := family.objection(question, answer.arrays, samples):
        raise wire.WireError(f"its answer is impossible: {why}.")


def _layout(family: Family, question: Question, words: Sequence[str]) -> Layout:
    try:
        return family.layout(question, words)
    except ValueError as error:
        raise wire.WireError(f"its answer does not fit the question: {error}.") from None


def unmasked(
    family: Family, question: Question, answers: Sequence[Masked], samples: int
) -> dict[str, Array]:
    """Return the sum of the masked answers of all silos that were asked together.

    ``samples`` is the number of training samples of all of them.

    Raises:
        WireError: it is not a possible sum: a silo has answered something else.
    """
    numbers = SUMS.decode(total_of([one.numbers for one in answers]))
    found, start = {}, 0
    for name, shape in sorted(_layout(family, question, answers[0].words).items()):
        size = math.prod(shape)
        found[name], start = numbers[start : start + size].reshape(shape), start + size
    check_answer(family, question, Answer(found, answers[0].words), samples)
    return found


def added(answers: Mapping[str, Answer]) -> dict[str, Array]:
    """Return the sum of answers, added in the order of the silos' names."""
    first, *others = (answers[name].arrays for name in sorted(answers))
    total = {name: array.copy() for name, array in first.items()}
    for one in others:
        for name, array in one.items():
            total[name] += array
    return total


def _arrays(content: RecordDict) -> dict[str, Array]:
    record = wire.array_records(content).get(wire.ARRAYS, ArrayRecord())
    found = wire.decode_arrays(record)
    if sum(array.size for array in found.values()) > MOST_NUMBERS:
        raise wire.WireError(f"a message of sums has at most {MOST_NUMBERS:,} numbers.")
    checked: dict[str, Array] = {}
    for name, array in found.items():
        if array.dtype != np.float64:
            raise wire.WireError(f"array {name!r} must be float64. Got {array.dtype}.")
        checked[name] = np.asarray(array, np.float64)
        _check_numbers(name, checked[name])
    return checked


def _check_numbers(name: str, array: Array) -> None:
    if array.size and not np.abs(array).max() <= LARGEST:  # NaN is not
        raise wire.WireError(f"array {name!r} has numbers that are not finite, or above {LARGEST}.")


def _is_word(one: object) -> bool:
    return isinstance(one, str) and 0 < len(one) <= wire.MAX_WORD and one.isprintable()
