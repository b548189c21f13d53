"""What a silo has answered about sets of its rows: no two answers are about nearly the same rows.

The difference of two such answers would describe the few rows between them. So until no row, or at
least as many as its policy names, have changed, a silo repeats its stored answer to the same
question, and refuses any other. Where answers are sums of the same numbers of each row, no
combination of several answers may describe few rows either. Rows are compared by hashes, which stay
in the silo's folder; a silo without a folder remembers while its process runs.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from coterie.client.work.data import Part
from coterie.client.work.measure import batch_size
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Session
from coterie.system.files import make_folder, write_atomically
from coterie.tasks.base import Column, Persons, leaves

FOLDER = "answered"
MOST_SETS, MOST_COMBINED, MOST_REPLIES = 1000, 100, 100
"""Most sets of rows; most sets of answers that can be combined, which are all compared at once;
most stored answers of one kind."""
SETS, REPLIES = ".npy", ".json"
Marks = NDArray[np.uint64]
"""(n, 2) hash and person of each row; without persons, the second is a number of the row."""


@dataclass
class Answered:
    """What was answered to questions of one kind.

    Attributes:
        folder: of its files; None: there are none.
        replies: digest of a question → number of the set of rows, and the reply as JSON.
        checked: digest of a set of rows → the count that it was last compared with.
    """

    folder: Path | None
    sets: list[Marks] = field(default_factory=list)
    replies: dict[str, tuple[int, str]] = field(default_factory=dict)
    checked: dict[bytes, int] = field(default_factory=dict)

    def objection(self, rows: Marks, least: int, *, combined: bool = False) -> str:
        """Return why nothing about these rows may leave; empty, once they are remembered.

        ``least`` rows, or persons where one may have several, must differ from every earlier set,
        and if ``combined``, no combination of sets may be about fewer.
        """
        digest = hashlib.sha256(rows.tobytes()).digest()
        if self.checked.get(digest, 0) >= least:  # most exchanges of a fit
            return ""
        differences = [difference(rows, one) for one in self.sets]
        if any(0 < size < least for size in differences):
            return (
                "answers nothing about these rows: they differ from rows that it has answered "
                f"about by fewer than {least}, which the two answers together would show."
            )
        if all(differences):
            most = MOST_COMBINED if combined else MOST_SETS
            if len(self.sets) >= most:
                return f"has answered about {most} different sets of its rows, and no more."
            if combined and shows_few([*self.sets, rows], least):
                return (
                    "answers nothing about these rows: combined with its answers about others, the "
                    f"answer could show fewer than {least} of them."
                )
            file = io.BytesIO()
            np.save(file, rows)
            self._write(f"{len(self.sets):04}{SETS}", file.getvalue())
            self.sets.append(rows)
        self.checked[digest] = least
        return ""

    def repeated(self, question: str, rows: Marks, least: int) -> RecordDict | None:
        """Return the stored answer, if it is of rows of which only few have changed since."""
        number, reply = self.replies.get(question, (0, ""))
        few = bool(reply) and 0 < difference(rows, self.sets[number]) < least
        return _content(reply) if few else None

    def keep(self, question: str, rows: Marks, content: RecordDict) -> None:
        """Store an answer about rows that were remembered, in place of an earlier one.

        It consists of texts and numbers, without arrays.
        """
        number = next(i for i, one in enumerate(self.sets) if not difference(rows, one))
        if self.replies.get(question, (-1, ""))[0] == number:
            return
        parts = content.config_records, content.metric_records
        reply = json.dumps([{name: dict(one) for name, one in part.items()} for part in parts])
        self._drop(question)
        while len(self.replies) >= MOST_REPLIES:
            self._drop(next(iter(self.replies)))
        self._write(f"{number:04}-{question}{REPLIES}", reply.encode())
        self.replies[question] = number, reply

    def _drop(self, question: str) -> None:
        number, _ = self.replies.pop(question, (0, ""))
        if self.folder is not None:
            (self.folder / f"{number:04}-{question}{REPLIES}").unlink(missing_ok=True)

    def _write(self, name: str, content: bytes) -> None:
        if self.folder is not None:
            make_folder(self.folder, private=True)
            write_atomically(self.folder / name, content, private=True)


def _content(reply: str) -> RecordDict:
    config, metrics = json.loads(reply)
    found = {name: ConfigRecord(one) for name, one in config.items()}
    return RecordDict({**found, **{name: MetricRecord(one) for name, one in metrics.items()}})


_answered: dict[tuple[str, str, str], Answered] = {}
"""(silo, home, kind and task) → what was answered."""


def answered_of(session: Session, kind: str) -> Answered:
    """Return what the silo has answered to questions of this kind, about this task's rows.

    Raises:
        RefusedError: a file of it cannot be read; without it the silo answers no such question.
    """
    settings = session.settings
    name = f"{kind}-{hashlib.sha256(session.task.name.encode()).hexdigest()[:16]}"
    key = settings.name, settings.home, name
    if key not in _answered:
        folder = Path(settings.home) / FOLDER / name if settings.home else None
        try:  # all or nothing: with a part, the silo would forget answers
            _answered[key] = _read(folder)
        except (OSError, EOFError, ValueError) as error:
            raise RefusedError(
                f"silo {settings.name!r} cannot read what it has answered before, in its folder "
                f"{FOLDER}/{name}: {type(error).__name__}. Restore that folder from a backup."
            ) from error
    return _answered[key]


def _read(folder: Path | None) -> Answered:
    found = Answered(folder)
    files = [] if folder is None else sorted(folder.glob("*"))
    found.sets = [np.load(f, allow_pickle=False) for f in files if f.suffix == SETS]
    for file in files:
        if file.suffix == REPLIES:
            number, _, question = file.stem.partition("-")
            found.replies[question] = int(number), file.read_text("utf-8")
    return found


def answer_once(
    request: Request, asked: str, rows: Marks, least: int, make: Callable[[], RecordDict]
) -> RecordDict:
    """Return a new answer, or the stored one if fewer than ``least`` rows have changed since.

    Args:
        asked: all that decides the answer beside the rows.
        least: rows, or persons where one may have several, that must differ.
        make: computes the answer.

    Raises:
        RefusedError: few rows differ from those of an answer to another question.
    """
    known = answered_of(request.session, request.message.metadata.message_type)
    question = hashlib.sha256(asked.encode()).hexdigest()[:32]
    if (reply := known.repeated(question, rows, least)) is not None:
        return reply
    request.refuse_for(known.objection(rows, least))
    content = make()
    known.keep(question, rows, content)
    return content


def marks_of_columns(columns: Sequence[Column], persons: Persons | None) -> Marks:
    """Return the marks of rows by their columns."""
    parts = [np.asarray(column.values, np.float64) for column in columns]
    parts += [column.odd.astype(np.float64) for column in columns if column.odd is not None]
    return _marks([np.stack(parts, axis=1)], persons)


def marks_of_samples(part: Part) -> Marks:
    """Return the marks of samples as the model sees them, with their targets."""
    found = [
        _marks([leaf.cpu().numpy() for leaf in (*leaves(x), *leaves(y))], None)
        for x, y in part.batches(None, batch_size(part))
    ]
    marks = np.concatenate(found)
    marks[:, 1] = _numbers(marks[:, 0]) if part.persons is None else part.persons
    return marks


def _marks(arrays: Sequence[NDArray[Any]], persons: Persons | None) -> Marks:
    hashes = [
        int.from_bytes(hashlib.blake2b(b"".join(r.tobytes() for r in row), digest_size=8).digest())
        for row in zip(*arrays, strict=True)
    ]
    rows = np.array(hashes, np.uint64)
    whose = _numbers(rows) if persons is None else persons.astype(np.uint64)
    return np.stack([rows, whose], axis=1)


def _numbers(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a number for each row (n,), which stays the same if other rows come or go."""
    order = np.argsort(hashes, kind="stable")
    ordered, again = hashes[order], np.empty(len(hashes), np.uint64)
    again[order] = np.arange(len(hashes)) - np.searchsorted(ordered, ordered)
    return hashes + again


def difference(one: Marks, other: Marks) -> int:
    """Return how many rows, or persons, only one of two sets has, whichever has more."""
    return max(_extra(one, other), _extra(other, one))


def _extra(one: Marks, other: Marks) -> int:
    values, place, counts = np.unique(one[:, 0], return_inverse=True, return_counts=True)
    others, times = np.unique(other[:, 0], return_counts=True)
    found = np.searchsorted(others, values)
    there = np.minimum(found, max(len(others) - 1, 0))
    same = (found < len(others)) & (others[there] == values) if len(others) else found < 0
    surplus = np.maximum(counts - np.where(same, times[there] if len(others) else 0, 0), 0)
    whose = np.unique(one[surplus[place] > 0, 1])
    return int(min(surplus.sum(), len(whose)))


def shows_few(sets: Sequence[Marks], least: int) -> bool:
    """Return whether a combination of sums over these sets may be about few rows (persons).

    A combination gives each row a number: how often it is in each set, times a factor for the set,
    added up. Rows that are in the same sets form a cell, and have the same number. Either of two
    conditions excludes combinations that are about fewer than ``least`` rows:

    - each combination that is zero in all cells of ``least`` rows or more is zero everywhere: their
      matrix of sets has the rank of that of all cells;
    - no row has more than 1/``least`` of the sum of squared numbers in any combination. The most
      that it can have is its leverage, and the leverages of the rows that a combination is about
      add up to 1 or more. Those of a person's rows are added; a row's weight is one through their
      number.
    """
    values = np.unique(np.concatenate([rows[:, 0] for rows in sets]))
    places = [np.searchsorted(values, rows[:, 0]) for rows in sets]
    times = [np.bincount(place, minlength=len(values)) for place in places]
    cell = np.zeros(len(values), np.int64)
    for own in times:
        cell = np.unique(cell * (own.max(initial=0) + 1) + own, return_inverse=True)[1]
    first = np.unique(cell, return_index=True)[1]
    table = np.stack([own[first] for own in times], axis=1).astype(np.float64)
    persons = [np.unique(rows[:, 1], return_inverse=True)[1] for rows in sets]
    cells = [cell[place] for place in places]
    sizes, weights, known = np.zeros((3, len(table)))
    for own, whose in zip(cells, persons, strict=True):
        pairs = np.unique(own * (whose.max(initial=0) + 1) + whose) // (whose.max(initial=0) + 1)
        sizes = np.maximum(sizes, np.bincount(pairs, minlength=len(table)))
        weights += np.bincount(own, 1 / np.bincount(whose)[whose], len(table))
        known += np.bincount(own, minlength=len(table))
    scaled, weights = table / table.max(axis=1)[:, None], weights / known
    if _rank(scaled) == _rank(scaled[sizes >= least]):
        return False
    rows = np.bincount(cell, np.max(times, axis=0), len(table))
    inverse = np.linalg.pinv(scaled.T * (rows * weights) @ scaled, hermitian=True)
    leverage = weights * (scaled @ inverse * scaled).sum(axis=1)
    pairs = [
        np.stack([place, own[:, 1].view(np.int64)], 1)
        for place, own in zip(places, sets, strict=True)
    ]
    found = [np.unique(own, axis=0, return_counts=True) for own in pairs]
    every, which = np.unique(np.concatenate([p for p, _ in found]), axis=0, return_inverse=True)
    often = np.zeros(len(every))  # a person may have equal rows
    np.maximum.at(often, which.ravel(), np.concatenate([n for _, n in found]))
    whose = np.unique(every[:, 1], return_inverse=True)[1]
    shares = np.bincount(whose, leverage[cell[every[:, 0]]] * often)
    return float(shares.max(initial=0)) * least > 1 + 1e-9


def _rank(table: NDArray[np.float64]) -> int:
    return int(np.linalg.matrix_rank(table.T @ table, hermitian=True)) if len(table) else 0
