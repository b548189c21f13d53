"""A silo's training rows, as families of models that are trained by sums read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.client.work.answered import answered_of, marks_of_columns
from coterie.client.work.columns import inputs_of, targets_of
from coterie.client.work.data import Data
from coterie.client.work.session import Session
from coterie.tasks.base import Column, Persons, TaskError


@dataclass(frozen=True)
class Rows:
    """The training rows of a silo, column by column and before any scaling.

    Attributes:
        inputs, targets: columns of n values; categories are numbered, see ``Column``.
        persons: (n,) person of each row; None: each is of another.
        kept: what a family computes once from the rows, by a key that it chooses.
    """

    inputs: Sequence[Column]
    targets: Sequence[Column]
    persons: Persons | None = None
    kept: dict[Any, Any] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.targets[0].values)


_rows: dict[tuple[str, str, str], tuple[Data, Rows]] = {}
"""(silo, home, task) → its data, and the rows read from them."""


def rows_of(session: Session) -> Rows:
    """Return the training rows, read once.

    Raises:
        TaskError: they cannot be read again, have changed since the silo started, or have no single
            target.
    """
    key = session.settings.name, session.settings.home, session.task.name
    known = _rows.get(key)
    if known is None or known[0] is not session.data:
        data = session.data
        inputs = list(inputs_of(session.task, session.settings.options, data.train))
        targets = list(targets_of(session.task, data.train))
        if not targets:
            raise TaskError("the task's samples have no single target.")
        if any(len(column.values) != len(data.train) for column in (*inputs, *targets)):
            raise TaskError("the data changed after the silo started. Restart it.")
        known = _rows[key] = data, Rows(inputs, targets, data.train.persons)
    return known[1]


def objection(
    session: Session, rows: Rows, used: NDArray[np.bool_], least: int, *, repeated: bool
) -> str:
    """Return why sums over ``used`` rows (n,) may not leave; empty, once they are remembered.

    Args:
        repeated: the sums are of the same numbers of each row in every answer, as in a regression,
            so that answers can be combined. Derivatives of trees change with each tree.
    """
    if "marks" not in rows.kept:
        rows.kept["marks"] = marks_of_columns([*rows.inputs, *rows.targets], rows.persons)
    marks = rows.kept["marks"][used]
    # What the stricter one refuses, the other does not remember.
    if repeated and (
        why := answered_of(session, "regressions").objection(marks, least, combined=True)
    ):
        return why
    return answered_of(session, "sums").objection(marks, least)
