"""Draw rows of a silo's data to hold out: for testing, for validation, or otherwise.

If several rows belong to one person or machine, persons are drawn: all rows of a person stay on one
side of every split, so that a model is not tested on persons it was trained on. Here a person is a
number; the silo's key for the person stays where it was read. Blocks of rows are drawn likewise.
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
    """Return rows for training and testing: a random test share of every class.

    A class with one sample or one person goes to training. Rows stay in their order. With
    ``persons``, shares are as near as whole persons allow; with a single person, nothing is for
    testing. ``y`` is (n,), ``share`` in (0, 1).
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
    """Return rows for training and testing, with part ``number`` (from 1) of ``count`` for testing.

    The parts are disjoint and cover all rows; their sizes differ by at most one row, in total and
    per class. With ``persons`` they share no person and are as alike as whole persons allow. Rows
    stay in their order. Raises ``TaskError`` if there are fewer rows, or persons, than parts.
    """
    units, what = (len(y), "samples")
    if persons is not None:
        units, what = num_persons(persons), "persons or blocks"
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
    """Return (n,) the part of each row's person, with given shares in total and per class.

    Persons who alone have a class come first, then those with many rows; similar numbers are in
    random order. Each goes to the part that would then be least filled, by Sainte-Laguë's rule for
    seats. Shares are met as near as whole persons allow. With ``testing`` the second of two parts
    is for testing.
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
    if testing and not part.any() and not has_a_class_alone.all():  # all have many rows
        part[np.argmin(np.where(has_a_class_alone, np.inf, held[:, -1]))] = 1
    return part[whose]


def _for_testing(held: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return (2, classes + 1) rows to train and to test on; the last column is for all classes.

    Every class has persons on both sides, but a class of a single person has none to test on.
    """
    total, least = held.sum(axis=0), np.where(held > 0, held, np.inf).min(axis=0)
    test = np.minimum(np.maximum(share * total, least), total - least)
    test[-1] = test[:-1].sum()
    wanted: NDArray[np.float64] = np.maximum(np.stack([total - test, test]), 1e-9)
    return wanted


def number_persons(*keys: Sequence[str]) -> list[Persons]:
    """Replace keys by numbers from 0; the same key has the same number in every list."""
    known: dict[str, int] = {}
    return [np.array([known.setdefault(k, len(known)) for k in own], np.int64) for own in keys]


def num_persons(persons: Persons) -> int:
    """Return the number of distinct persons."""
    return len(np.unique(persons))


def most_of_one(persons: Persons) -> int:
    """Return the number of rows of the person with the most rows."""
    return int(np.unique(persons, return_counts=True)[1].max(initial=0))


def fewest_persons(persons: Persons, rows: int) -> int:
    """Return the fewest persons that this number of rows can belong to."""
    sizes = np.sort(np.unique(persons, return_counts=True)[1])[::-1]
    return int(np.searchsorted(np.cumsum(sizes), min(rows, len(persons)))) + 1 if rows > 0 else 0
