"""What a silo has answered about its data as a whole: the same answer, until enough rows differ.

The difference of two answers describes the rows that changed between them. So a silo repeats its
last answer until no row, or at least as many as its policy names for that question, have changed
since it was computed. Rows are compared by hashes, which stay in the silo's folder; a silo without
a folder remembers while its process runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from coterie.client.work.request import Request
from coterie.client.work.session import Session
from coterie.engine.saved import content_of, packed
from coterie.system.files import make_folder, write_atomically
from coterie.tasks.base import Column, leaves

FOLDER = "answered"

_memory: dict[tuple[str, str, str], Answered] = {}
"""(silo, home, file's name) → what was answered, for silos without a folder."""


@dataclass(frozen=True)
class Answered:
    """An answer, and the data that it was computed from.

    Attributes:
        asked_as: digest of the settings that decide what is answered.
        rows: of every training sample, 16 hexadecimal digits.
        persons: of every training sample, as the data number them; empty if each has another.
        reply: the answer as Flower sends it, in hexadecimal digits.
    """

    asked_as: str
    rows: tuple[str, ...]
    persons: tuple[int, ...]
    reply: str


def answer_once(
    request: Request, columns: Sequence[Column], least: int, make: Callable[[], RecordDict]
) -> RecordDict:
    """Return a new answer, or the last one if fewer than ``least`` rows have changed since.

    Args:
        columns: of the training samples; without any, samples are compared as the model sees them.
        least: rows, or persons where one may have several, that must differ.
        make: computes the answer.

    Raises:
        RefusedError: too few rows have changed, and the silo's settings have as well, so that the
            last answer is not what they allow.
    """
    session = request.session
    kind = request.message.metadata.message_type
    policy = session.settings.policy
    asked = (policy.statistics, policy.statistics_from, policy.column_sums_from)
    known = json.dumps([session.parts, asked], sort_keys=True)
    persons = session.data.train.persons
    now = Answered(
        hashlib.sha256(known.encode()).hexdigest(),
        _rows(session, columns),
        () if persons is None else tuple(persons.tolist()),
        "",
    )
    name = f"{kind}-{hashlib.sha256(session.task.name.encode()).hexdigest()[:16]}"
    before = _read(session, name)
    if before is not None and 0 < _changed(before, now) < least:
        if before.asked_as != now.asked_as:
            request.refuse_for(
                f"answers {kind} again only after {least} rows of its data have changed: its "
                "settings have changed since its last answer, and fewer rows."
            )
        return content_of(bytes.fromhex(before.reply))
    content = make()
    reply = packed(Message(content, reply_to=request.message))
    _write(session, name, Answered(now.asked_as, now.rows, now.persons, reply.hex()))
    return content


def _rows(session: Session, columns: Sequence[Column]) -> tuple[str, ...]:
    """Return a hash of every training sample, of its values and targets."""
    train = session.data.train
    if columns:
        odd = [column.odd for column in columns if column.odd is not None]
        return _hashed([*(column.values for column in columns), *odd])
    found: list[str] = []
    for x, y in train.batches(None, 1024):
        found += _hashed([leaf.cpu().numpy() for leaf in (*leaves(x), *leaves(y))])
    return tuple(found)


def _hashed(arrays: Sequence[NDArray[np.generic]]) -> tuple[str, ...]:
    rows = zip(*(np.ascontiguousarray(array) for array in arrays), strict=True)
    return tuple(
        hashlib.sha256(b"".join(part.tobytes() for part in row)).hexdigest()[:16] for row in rows
    )


def _changed(before: Answered, now: Answered) -> int:
    """Return how many persons' rows were added or removed, whichever are more."""
    return max(_extra(now, before), _extra(before, now))


def _extra(one: Answered, other: Answered) -> int:
    """Return how many persons have rows in ``one`` that ``other`` lacks."""
    left, whose = Counter(other.rows), set()
    for place, row in enumerate(one.rows):
        if left[row]:
            left[row] -= 1
        else:
            whose.add(one.persons[place] if one.persons else place)
    return len(whose)


def _key(session: Session, name: str) -> tuple[str, str, str]:
    return session.settings.name, session.settings.home, name


def _file(session: Session, name: str) -> Path:
    return Path(session.settings.home) / FOLDER / f"{name}.json"


def _read(session: Session, name: str) -> Answered | None:
    if not session.settings.home:
        return _memory.get(_key(session, name))
    try:
        plain = json.loads(_file(session, name).read_bytes())
        rows, persons = tuple(map(str, plain["rows"])), tuple(map(int, plain["persons"]))
        return Answered(str(plain["asked_as"]), rows, persons, str(plain["reply"]))
    except FileNotFoundError:
        return None


def _write(session: Session, name: str, answered: Answered) -> None:
    if not session.settings.home:
        _memory[_key(session, name)] = answered
        return
    make_folder(Path(session.settings.home) / FOLDER, private=True)
    write_atomically(_file(session, name), json.dumps(asdict(answered)).encode(), private=True)


def forget() -> None:
    """Clear what silos without a folder have answered."""
    _memory.clear()
