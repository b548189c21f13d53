"""A silo's rows as the design matrix of a regression, and the sums over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.features.sums.contract import Array, FitError, TooFarError
from coterie.features.sums.regression.cox import partial
from coterie.features.sums.regression.newton import (
    BETA,
    CENTRES,
    COUNT,
    COX,
    EQUALS,
    GRADIENT,
    HESSIAN,
    INTERCEPT,
    LOSS,
    SQUARES,
    SUMS,
    WIDTHS,
    intercepts,
    packed,
)
from coterie.features.sums.rows import Rows
from coterie.features.sums.spells import Spells, spells_of
from coterie.tasks.base import Column, Persons

ROWS_PER_COEFFICIENT: Final = 2
"""Fewest rows for each coefficient: the sums of fewer would determine the rows."""
TARGET: Final = "the target"
HIGHEST: Final = 100.0
"""Largest exponent of a Poisson mean; a step that leads beyond it is halved."""


@dataclass(frozen=True)
class Design:
    """The rows with a value in all columns of a regression.

    Attributes:
        words: names of the coefficients, any intercept first, and of the target.
        x: (n, columns) without the intercept. y: (n,).
        used: (all rows,) which rows these are.
        persons: (n,) person of each row; None: each is of another.
        spells: the rows under observation at each time, in a Cox regression.
    """

    words: tuple[str, ...]
    x: Array
    y: Array
    used: NDArray[np.bool_]
    persons: Persons | None
    spells: Spells | None = None


def design_of(rows: Rows, settings: Mapping[str, Any], least: int) -> Design:
    """Return the design of a regression.

    Raises:
        FitError: a column is missing or unfit, or fewer than ``least`` rows (persons, if they have
            several) would be recognisable in sums.
    """
    target = _target(rows.targets, settings)
    inputs = _chosen(rows.inputs, settings["columns"], "column")
    used = np.all([one.present for one in (*inputs, *target)], axis=0)
    y = _outcome(target[-1], settings["model"], used)
    labels, blocks = [INTERCEPT] * intercepts(settings), list[Array]()
    first: dict[str, Array] = {}
    for column in inputs:
        values, label = column.values[used], _word(column.name)
        if column.categories:  # its sums follow from those of the others
            first[_word(f"{label}{EQUALS}{column.categories[0]}")] = values == 0
        if not column.categories:
            labels.append(label)
            blocks.append(values[:, None])
        for number, category in list(enumerate(column.categories))[1:]:
            labels.append(_word(f"{label}{EQUALS}{category}"))
            blocks.append((values == number)[:, None].astype(np.float64))
    x = np.concatenate(blocks, axis=1, dtype=np.float64)
    persons = None if rows.persons is None else rows.persons[used]
    _require_enough(x, y, labels, persons, least, first)
    label = _word(target[0].name)
    spells = None
    if settings["model"] == COX:
        label = "time to event"
        spells = spells_of(target[0].values[used], y, persons, least)
        whose = None if persons is None else persons[spells.order]
        if y.any() and count_of(spells.event > 0, whose) < least:
            raise FitError(
                "too few events have enough rows under observation at their time (statistics_from)"
            )
    if settings["model"] == "logistic" and target[0].categories:
        label = _word(f"{label}{EQUALS}{target[0].categories[1]}")
    return Design((*labels, label), x, y, used, persons, spells)


def _word(text: str) -> str:
    """Return a name of at most ``MAX_WORD`` characters; a digest keeps long ones distinct."""
    if len(text) <= wire.MAX_WORD:
        return wire.plain_text(text, wire.MAX_WORD)
    digest = blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{wire.plain_text(text[: wire.MAX_WORD - 9], wire.MAX_WORD - 9)}…{digest}"


def _target(targets: Sequence[Column], settings: Mapping[str, Any]) -> Sequence[Column]:
    """Return the column of the target; of a Cox regression, those of time and event."""
    name = settings["target"]
    if settings["model"] == COX:
        return times_and_events(targets)
    if settings["model"] != COX and _is_survival(targets) and name != targets[1].name:
        raise FitError(
            "the task's times are censored: fit cox, or survival. A logistic regression can fit "
            f"whether {targets[1].name} happens at all"
        )
    found = _chosen(targets, [name] if name else [], "target")
    if len(found) != 1:
        names = ", ".join(one.name for one in found)
        raise FitError(f"the task has several targets: name one of {names}")
    return found


def times_and_events(targets: Sequence[Column]) -> Sequence[Column]:
    """Return both columns of a survival task; raise ``FitError`` if the task is another."""
    if not _is_survival(targets):
        raise FitError("it needs a task whose target has kind survival")
    return targets


def _is_survival(targets: Sequence[Column]) -> bool:
    return [len(one.categories) for one in targets] == [0, 2]


def _chosen(columns: Sequence[Column], names: Sequence[str], what: str) -> list[Column]:
    by_name = {column.name: column for column in columns}
    if unknown := [name for name in names if name not in by_name]:
        raise FitError(f"there is no {what} {unknown[0]!r}: there are {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(columns)


def _outcome(target: Column, model: str, used: NDArray[np.bool_]) -> Array:
    """Return the outcome (n,) of the used rows; raise ``FitError`` if the model has another."""
    y = np.asarray(target.values[used], np.float64)
    kinds = len(target.categories)
    if model == COX:
        return y
    if model == "logistic":
        if kinds != 2 and (kinds or not np.isin(y, (0, 1)).all()):
            raise FitError(f"a logistic regression needs two classes, unlike {target.name}")
    elif kinds:
        kind = "Poisson" if model == "poisson" else model
        raise FitError(f"a {kind} regression needs numbers: {target.name} has classes")
    elif model == "poisson" and not ((y >= 0) & (y == np.rint(y))).all():
        raise FitError(f"a Poisson regression needs counts: {target.name} has other numbers")
    return y


def _require_enough(
    x: Array,
    y: Array,
    names: Sequence[str],
    persons: Persons | None,
    least: int,
    first: Mapping[str, Array],
) -> None:
    """Raise ``FitError`` where few rows would be recognisable in sums over all of them.

    ``first`` (n,) marks the rows of each first category, which has no column in ``x`` (n, p).
    """
    everyone = count_of(np.ones(len(y), np.bool_), persons)
    needed = max(least, ROWS_PER_COEFFICIENT * len(names))
    if everyone < needed:
        raise FitError(
            f"too few rows have a value in all columns: {needed} are needed for {len(names)} "
            "coefficients (statistics_from, or two for each). Name fewer columns"
        )
    columns = (*names[len(names) - x.shape[1] :], TARGET, *first)
    for name, values in zip(columns, (*x.T, y, *first.values()), strict=True):
        kinds, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        others = places != int(np.argmax(counts))
        if len(kinds) > 1 and count_of(others, persons) < least:
            raise FitError(
                f"nearly all rows have the same value of {name}: sums would reveal the few others "
                "(statistics_from)" + ". Name the columns without it" * (name != TARGET)
            )


def count_of(rows: NDArray[np.bool_], persons: Persons | None) -> int:
    """Return how many rows (n,) are marked, or persons, if they have several rows."""
    return int(rows.sum()) if persons is None else len(np.unique(persons[rows]))


def sums_of(design: Design, model: str, asked: Mapping[str, Array], least: int) -> dict[str, Array]:
    """Return the sums that a question asks for.

    Raises:
        TooFarError: the coefficients give nearly all weight to fewer than ``least`` rows (persons,
            if they have several), so that the sums would show these.
    """
    count = {COUNT: np.array([float(len(design.y))])}
    if not asked:
        return {**count, SUMS: np.append(design.x.sum(axis=0), design.y.sum())}
    centred = design.x - asked[CENTRES]
    if WIDTHS not in asked:
        return {**count, SQUARES: (centred**2).sum(axis=0)}
    widths = asked[WIDTHS]
    z = np.divide(centred, widths, out=np.zeros_like(centred), where=widths > 0)
    if design.spells is not None:
        loss, gradient, hessian, *weights = partial(design.spells, z, asked[BETA])
        whose = None if design.persons is None else design.persons[design.spells.order]
        _refuse_few(weights if design.spells.event.any() else [], whose, least)
        return {**count, LOSS: loss, GRADIENT: gradient, HESSIAN: packed(hessian)}
    z = np.concatenate([np.ones((len(z), 1)), z], axis=1)
    loss, slope, curve = _by_row(model, z @ asked[BETA], design.y)
    _refuse_few([] if model == "linear" else [slope, curve], design.persons, least)
    found = {LOSS: np.array([loss.sum()]), GRADIENT: z.T @ slope}
    return {**count, **found, HESSIAN: packed(z.T @ (z * curve[:, None]))}


def _refuse_few(weights: Sequence[Array], persons: Persons | None, least: int) -> None:
    """Raise ``TooFarError`` if any weights (n,) are nearly all of fewer than ``least`` rows."""
    if any(not _effective(one, persons) >= least for one in weights):
        raise TooFarError(
            "with these coefficients few rows would outweigh all others in the sums, and be shown "
            "by them (statistics_from)"
        )


def _by_row(model: str, eta: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return each row's loss and its first and second derivatives by the linear predictor (n,)."""
    if model == "linear":
        return (y - eta) ** 2 / 2, eta - y, np.ones_like(y)
    if model == "poisson":
        mean = np.exp(np.minimum(eta, HIGHEST))
        return mean - y * eta, mean - y, mean
    chance = np.exp(-np.logaddexp(0.0, -eta))
    return np.logaddexp(0.0, eta) - y * eta, chance - y, chance * np.exp(-np.logaddexp(0.0, eta))


def _effective(weights: Array, persons: Persons | None) -> float:
    """Return how many equal weights have the same spread (Kish: "Survey Sampling", 1965, 11.7).

    Weights of one person count as their sum.
    """
    shares = np.abs(weights)
    if persons is not None:
        shares = np.bincount(np.unique(persons, return_inverse=True)[1], shares)
    largest = shares.max()
    shares = shares / largest if largest > 0 else shares
    return float(shares.sum() ** 2 / max((shares**2).sum(), 1e-300))
