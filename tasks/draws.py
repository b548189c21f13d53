"""Draws rows of a silo's data: to test on, to validate on, and whatever else is held out.

Several rows may belong to one person, or one machine. Then persons are drawn: all rows of a person
lie on one side of every split, or a model would be tested on whom it was trained on. A person is a
number here; the key by which the silo knows them stays where it was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import Persons, TaskError

Rows = NDArray[np.intp]


def split_by_class(
    y: NDArray[np.int64], share: float, *, seed: int, persons: Persons | None = None
) -> tuple[Rows, Rows]:
    """Rows for training and for testing: of every class the same share, at random.

    A class of one sample goes to training, and so does one of a single person. Rows stay in their
    order.

    Args:
        y: (n,) classes.
        share: of testing, in (0, 1).
        seed: of the choice.
        persons: whose the rows are: shares are then as near as whole persons allow. Of a single
            person, nothing is for testing.
    """
    rng = np.random.default_rng([seed, len(y)])
    if persons is not None:
        return _sides(_deal(y, persons, [1 - share, share], rng, testing=True) == 1)
    test = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        count = min(max(1, round(share * len(rows))), len(rows) - 1)
        test[rng.permutation(rows)[:count]] = True
    return _sides(test)


def split_by_fold(
    y: NDArray[np.int64], number: int, count: int, *, seed: int, persons: Persons | None = None
) -> tuple[Rows, Rows]:
    """Rows for training and for testing: the parts ``number`` of 1 to ``count`` share no row, hold
    all of them together, and differ by one row at most, in all and of every class.

    With ``persons`` they share no person, and are as like each other as whole persons allow. Rows
    stay in their order.

    Raises:
        TaskError: there are fewer rows, or persons, than parts.
    """
    units, what = (len(y), "samples") if persons is None else (num_persons(persons), "persons")
    if units < count:
        raise TaskError(f"{count} folds need at least {count} {what}. There are {units}.")
    rng = np.random.default_rng([seed, len(y), count])
    if persons is not None:
        return _sides(_deal(y, persons, [1 / count] * count, rng) == number - 1)
    dealt = np.concatenate([rng.permutation(np.flatnonzero(y == own)) for own in np.unique(y)])
    test = np.zeros(len(y), dtype=bool)
    test[dealt[number - 1 :: count]] = True
    return _sides(test)


def _sides(test: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    return np.flatnonzero(~test), np.flatnonzero(test)


def _deal(
    y: NDArray[np.int64],
    persons: Persons,
    shares: Sequence[float],
    rng: np.random.Generator,
    *,
    testing: bool = False,
) -> NDArray[np.intp]:
    """(n,) The part that each row's person goes to: each part gets its share of all rows and of
    every class, as near as whole persons allow.

    Who has a class alone comes first, then who has many rows, and those of about as many in random
    order. Each goes to the part that would then be the least filled, of what they bring
    (Sainte-Laguë's rule for seats).
    With ``testing`` the second of two parts is for testing.
    """
    _, whose = np.unique(persons, return_inverse=True)
    _, kind = np.unique(y, return_inverse=True)
    held = np.zeros((whose.max() + 1, kind.max() + 2))  # the last column counts all rows
    np.add.at(held, (whose, kind), 1)
    held[:, -1] = held.sum(axis=1)
    total = held.sum(axis=0)
    wanted = _for_testing(held, shares[1]) if testing else np.outer(shares, total)
    order = rng.permutation(len(held))
    has_a_class_alone, many = (held == total).any(axis=1), np.floor(np.log2(held[:, -1]))
    order = order[np.lexsort((-many[order], ~has_a_class_alone[order]))]
    weight, given = held / total, np.zeros_like(wanted)
    part = np.empty(len(held), np.intp)
    for person in order:
        has = held[person] > 0
        filled = (given[:, has] + held[person, has] / 2) / wanted[:, has]
        part[person] = np.argmin(filled @ weight[person, has])
        given[part[person]] += held[person]
    return part[whose]


def _for_testing(held: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """(2, classes) Rows to train on and to test on: of every class somebody for both, but of one
    that a single person has nobody to test on."""
    total, least = held.sum(axis=0), np.where(held > 0, held, np.inf).min(axis=0)
    test = np.minimum(np.maximum(share * total, least), total - least)
    test[-1] = test[:-1].sum()
    wanted: NDArray[np.float64] = np.maximum(np.stack([total - test, test]), 1e-9)
    return wanted


def number_persons(*keys: Sequence[str]) -> list[Persons]:
    """Numbers from 0 on in the place of keys; the same key has the same number in every list."""
    known: dict[str, int] = {}
    return [np.array([known.setdefault(k, len(known)) for k in own], np.int64) for own in keys]


def num_persons(persons: Persons) -> int:
    """How many different ones there are."""
    return len(np.unique(persons))


def most_of_one(persons: Persons) -> int:
    """Rows of the person who has the most."""
    return int(np.unique(persons, return_counts=True)[1].max(initial=0))


def fewest_persons(persons: Persons, rows: int) -> int:
    """The fewest persons that so many of the rows can belong to."""
    sizes = np.sort(np.unique(persons, return_counts=True)[1])[::-1]
    return int(np.searchsorted(np.cumsum(sizes), min(rows, len(persons)))) + 1 if rows > 0 else 0
