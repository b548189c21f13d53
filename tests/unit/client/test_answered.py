"""What a silo remembers of the rows that it has answered about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from coterie.client.home.settings import SiloSettings
from coterie.client.work import answered
from coterie.client.work.answered import (
    Answered,
    Marks,
    answered_of,
    difference,
    marks_of_columns,
    shows_few,
)
from coterie.client.work.request import RefusedError
from coterie.client.work.session import open_session
from coterie.tasks.base import Column
from tests.kit import digits, restart_silos


def marks(*values: float, persons: list[int] | None = None) -> Marks:
    column = Column("x", np.array(values))
    return marks_of_columns([column], None if persons is None else np.array(persons))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (marks(1, 2, 3), marks(3, 1, 2), 0),
        (marks(1, 2, 3), marks(1, 2), 1),
        (marks(1, 2), marks(1, 5, 6, 7), 3),
        (marks(1, 1, 1), marks(1), 2),
        (marks(), marks(1, 2), 2),
        (marks(1, 2, 3, 4, persons=[0, 0, 1, 1]), marks(9, persons=[0]), 2),
        (marks(1, 2, 3, 4, persons=[0, 0, 0, 1]), marks(4, persons=[5]), 1),
        (marks(np.nan, 1), marks(np.nan, 1), 0),
    ],
)
def test_sets_differ_by_the_rows_or_persons_that_only_one_has(
    one: Marks, other: Marks, expected: int
) -> None:
    assert difference(one, other) == difference(other, one) == expected


def missing(*without: range, persons: int = 200) -> Marks:
    """All of 200 rows, less some, of so many persons."""
    rows = [n for n in range(200) if not any(n in few for few in without)]
    return marks(*map(float, rows), persons=[n % persons for n in rows])


def of_two(which: int) -> Marks:
    """One or both of two sets of forty persons, each alone with rows of six further persons."""
    rows = {1: [*range(40), *range(200, 206)], 2: [*range(40, 80), *range(206, 212)]}
    own = rows.get(which, range(80))
    return marks(*map(float, own), persons=[n if n < 200 else (n - 200) % 6 + 1000 for n in own])


FEW, MANY = range(16), range(14, 33)
"""Rows without a value of one column and of another: two lack both."""


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([missing()], False),
        ([missing(), missing(FEW), missing(MANY)], False),
        ([missing(), missing(FEW), missing(MANY), missing(FEW, MANY)], True),  # 1 − 2 − 3 + 4
        ([missing(), missing(range(10))], False),
        ([missing(), missing(range(9))], True),
        ([missing(persons=20), missing(range(16), persons=20)], False),
        ([missing(persons=20), missing(range(9), persons=20)], True),
        ([of_two(1), of_two(2), of_two(3)], True),  # 1 + 2 − 3: the rows of six persons
    ],
)
def test_combinations_of_answers_may_not_be_about_few_rows_or_persons(
    sets: list[Marks], expected: bool
) -> None:
    assert shows_few(sets, 10) is expected
    known = Answered(None)
    found = [known.objection(one, 10, combined=True) for one in sets]
    assert bool(found[-1]) is expected and not any(found[:-1])


def test_many_sets_that_differ_at_random_show_nobody() -> None:
    """Their cells are of single rows, but each combination is about many."""
    draw = np.random.default_rng(0)
    sets = [marks(*draw.choice(1000, 900, replace=False).astype(float)) for _ in range(30)]
    assert not shows_few(sets, 10) and shows_few(sets, 20)


def test_a_value_that_is_not_allowed_is_another_row() -> None:
    plain, odd = (
        marks_of_columns([Column("x", np.array([1.0, 2.0]), odd=np.array([False, bad]))], None)
        for bad in (False, True)
    )
    assert difference(plain, odd) == 1


def test_what_was_answered_survives_the_process_and_old_answers_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answered, "MOST_REPLIES", 2)
    (node,) = digits("a", tmp_path, **{"data.train": 8, "data.test": 8})
    session = open_session(SiloSettings.from_node_config(dict(node), node_id=1))

    def known() -> Answered:
        restart_silos()
        return answered_of(session, "query.statistics")

    def reply(number: int) -> RecordDict:
        numbers = MetricRecord({"each": [0.1 + number, 1e-300]})
        return RecordDict({"config": ConfigRecord({"number": number}), "metrics": numbers})

    rows, few = marks(*range(20)), marks(*range(15))
    for number in range(3):
        assert not known().objection(rows, 10)
        known().keep(str(number), rows, reply(number))
    assert known().repeated("0", few, 10) is None, "forgotten"
    found = [known().repeated(str(number), few, 10) for number in (1, 2)]
    assert found == [reply(1), reply(2)]
    assert known().repeated("1", rows, 10) is None, "it is computed again"
    assert "fewer than 10" in known().objection(few, 10) and not known().objection(few, 5)
    assert "fewer than 6" in known().objection(few, 6), "the count has become stricter"
    monkeypatch.setattr(answered, "MOST_SETS", 2)
    assert "2 different sets" in known().objection(marks(*range(50, 90)), 10)
    (damaged,) = tmp_path.glob("**/0000.npy")
    damaged.write_bytes(b"")
    restart_silos()
    for _ in range(2):  # nor does it begin anew
        with pytest.raises(RefusedError, match="Restore that folder"):
            answered_of(session, "query.statistics")
