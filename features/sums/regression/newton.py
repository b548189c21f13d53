"""Linear, logistic, Poisson and Cox regression by Newton steps on sums over silos.

The loss is the negative log-likelihood of the canonical model, up to a constant (of a linear one,
half the sum of squared residuals); its gradient and Hessian are sums over rows (McCullagh, Nelder:
"Generalized Linear Models", 1989, section 2.5), so the sums of all silos give the same steps as all
rows together. Cox's model has no intercept: each silo has its own baseline hazard, so that the
partial likelihood is a sum over silos. The first two exchanges ask for means and deviations of the
columns; steps are then taken in columns scaled by them, so that units change nothing. A step that
raises the loss, or goes too far for a silo, is halved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.contract import Array, Arrays, FitError, Layout, Question, State

COX: Final = "cox"
MODELS: Final = ("linear", "logistic", "poisson", COX)
CONVERGED: Final = 1e-7
"""Length of the last step, in standard errors; the error after it is about its square."""
MOST_STEPS: Final = 25
"""Where a coefficient has no finite value, a step shortens by a factor of e^½ only: after so many
steps it is still longer than ``CONVERGED``."""
CONSTANT: Final = 1e-9
"""Ratio of a column's deviation to its mean below which it counts as constant."""
SINGULAR: Final = 1e-10
"""Smallest eigenvalue of the scaled Hessian; below, columns depend on each other."""
FLAT: Final = 1e-4
"""Share of its first curvature that the loss has along a coefficient without finite value."""
SLACK: Final = 1e-8
"""Rounding that an answer may have, as a share of the numbers that it is made of."""
INTERCEPT: Final = "(intercept)"
EQUALS: Final = " = "
"""Between a column and its category in the name of a coefficient."""

SUMS, SQUARES, CENTRES, WIDTHS, BETA = "sums", "squares", "centres", "widths", "beta"
FIRST: Final = "first hessian"
COUNT, LOSS, GRADIENT, HESSIAN = "count", "loss", "gradient", "hessian"
EVENTS, REFERENCE = "events", "reference"


def intercepts(settings: Mapping[str, Any]) -> int:
    """Return the number of intercepts of a model, 0 or 1."""
    return int(settings.get("model") != COX)


def num_coefficients(settings: Mapping[str, Any], words: Sequence[str]) -> int:
    """Return the number of coefficients: ``words`` are their names, and the target's at the end."""
    if len(words) < 2 or (intercepts(settings) and words[0] != INTERCEPT):
        raise ValueError("it must name the intercept, the coefficients and the target")
    return len(words) - 1


def packed(hessian: Array) -> Array:
    """Return the p(p + 1)/2 numbers on and above the diagonal of a matrix (p, p)."""
    return np.asarray(hessian[np.triu_indices(len(hessian))])


def unpacked(numbers: Array, size: int) -> Array:
    """Return the symmetric matrix (p, p) of ``packed`` numbers."""
    found = np.zeros((size, size))
    found[np.triu_indices(size)] = numbers
    return found + np.triu(found, 1).T


def _impossible(model: str, count: float, arrays: Arrays) -> str:
    """Return why no rows have this loss, gradient and Hessian; empty if some may have.

    The square of a row's linear slope is twice its loss. A logistic slope is ±a, and the curvature
    a(1 − a), where a ≤ loss. A Poisson curvature minus its slope is the row's count.
    """
    loss, gradient = float(arrays[LOSS][0]), np.asarray(arrays[GRADIENT])
    hessian = unpacked(arrays[HESSIAN], len(gradient))
    curve, slope = float(hessian[0, 0]), float(gradient[0])  # those of any intercept
    least, *_ = np.linalg.eigvalsh(hessian)
    if least < -SLACK * np.trace(hessian):
        return "its Hessian is not positive semidefinite"
    if model != "poisson" and loss < -SLACK * count:
        return f"its loss is negative: {loss:g}"
    if model == "linear":
        if abs(curve - count) > SLACK * count:
            return f"its Hessian must begin with its number of rows, {count:g}. Got {curve:g}"
        if (gradient**2 > 2 * (1 + SLACK) * loss * np.diag(hessian)).any():
            return "its gradient is too large for its loss"
    if model == "logistic":
        if curve > (0.25 + SLACK) * count:
            return f"its Hessian begins with more than a quarter of its rows: {curve:g}"
        if abs(slope) > min(count, loss) + SLACK * count:
            return "its gradient is too large for its rows and its loss"
    if model == "poisson":
        total, slack = curve - slope, SLACK * (1 + curve + abs(slope))
        if total < -slack or abs(total - np.rint(total)) > slack:
            return f"its counts cannot add up to {total:g}"
    return ""


class Regression:
    """The family of regressions. Settings: ``model``, ``columns`` and ``target``."""

    name: ClassVar[str] = "regression"

    def layout(self, question: Question, words: Sequence[str]) -> Layout:
        """Return the shapes of an answer about the question's columns."""
        size = num_coefficients(question.settings, words)
        columns = size - intercepts(question.settings)
        asked = question.arrays
        if not asked:
            return {COUNT: (1,), SUMS: (columns + 1,)}
        if {name: array.shape for name, array in asked.items()} == {CENTRES: (columns,)}:
            return {COUNT: (1,), SQUARES: (columns,)}
        shapes = {CENTRES: (columns,), WIDTHS: (columns,), BETA: (size,)}
        if {name: array.shape for name, array in asked.items()} != shapes:
            raise ValueError("a regression asks for other arrays, of as many columns")
        half = size * (size + 1) // 2
        return {COUNT: (1,), LOSS: (1,), GRADIENT: (size,), HESSIAN: (half,)}

    def objection(self, question: Question, arrays: Arrays, samples: int) -> str:
        """Return why these sums belong to no rows."""
        count = float(arrays[COUNT][0])
        if not (1 <= count <= max(samples, 1) and count == int(count)):
            return f"its number of rows must be from 1 to {samples}. Got {count:g}"
        model = question.settings["model"]
        if SUMS in arrays and model != "linear":
            total = float(arrays[SUMS][-1])
            if model == "poisson" and not (total >= 0 and total == int(total)):
                return f"its counts cannot add up to {total:g}"
            if model != "poisson" and not (0 <= total <= count and total == int(total)):
                return f"{total:g} of its {count:g} rows cannot have the outcome"
        if SQUARES in arrays and (arrays[SQUARES] < 0).any():
            return "a sum of squares is negative"
        return _impossible(model, count, arrays) if HESSIAN in arrays else ""

    def asked(self, settings: Mapping[str, Any], state: State) -> Arrays:
        """Return centres, then widths and coefficients of the scaled columns."""
        return {n: state.arrays[n] for n in (CENTRES, WIDTHS, BETA) if n in state.arrays}

    def halved(self, settings: Mapping[str, Any], state: State) -> State | None:
        """Return the state with half the last Newton step; None before the first.

        Raises:
            FitError: this was ``MOST_STEPS`` times not enough.
        """
        if "before" not in state.arrays:
            return None
        times = int(state.arrays.get("refused", np.zeros(1))[0])
        if times >= MOST_STEPS:
            step = state.arrays[BETA] - state.arrays["before"]
            raise FitError(
                f"{times} halved steps still went too far, mostly for "
                f"{_longest(settings, state.words, step)}: its values may be very skewed, or "
                f"determine {state.words[-1]}, fully or nearly (separation). Name the columns "
                "without it"
            )
        return replace(state, arrays={**_halved(state), "refused": np.array([times + 1])})

    def without(self, settings: Mapping[str, Any], state: State) -> State:
        """Return the beginning: the scale, and which categories occur, are of the silos left."""
        return State(words=state.words, step=state.step)

    def next(self, settings: Mapping[str, Any], state: State, total: Arrays) -> State:
        """Return the state after the means, the deviations, or one more Newton step."""
        count = float(total[COUNT][0])
        names = state.words[:-1]
        if count <= len(names):
            raise FitError(
                f"{count:.0f} rows are too few for {len(names)} coefficients: name fewer columns"
            )
        if SUMS in total:
            return replace(state, arrays=_started(settings, state.words, total))
        if SQUARES in total:
            return replace(state, arrays=_scaled(settings, state, total))
        return _stepped(settings, state, total)


def _started(
    settings: Mapping[str, Any], words: Sequence[str], total: Arrays
) -> dict[str, NDArray[Any]]:
    """Return the means, and the intercept of a model without columns, or the number of events."""
    count, sums = float(total[COUNT][0]), total[SUMS]
    mean = float(sums[-1]) / count
    model, target = settings["model"], words[-1]
    found: dict[str, NDArray[Any]] = {CENTRES: sums[:-1] / count}
    found[REFERENCE] = _references(words[intercepts(settings) : -1], sums, count)
    if model == COX:
        if not mean > 0:
            raise FitError("no row has an event: there is nothing to explain")
        return {**found, EVENTS: sums[-1:]}
    if model == "logistic" and not 0 < mean < 1:
        raise FitError(f"all rows have the same {column_of(target)}: there is nothing to explain")
    if model == "poisson" and not mean > 0:
        raise FitError(f"all counts of {target} are 0: there is nothing to explain")
    links = {"logistic": lambda: math.log(mean / (1 - mean)), "poisson": lambda: math.log(mean)}
    return {**found, "first": np.array([links.get(model, lambda: mean)()])}


def _references(names: Sequence[str], sums: Array, count: float) -> NDArray[np.bool_]:
    """Return which columns (p,) are the categories that others of their column are compared with.

    None where rows have the first category, which has no column, or all rows the same.
    """
    found, columns = np.zeros(len(names), np.bool_), dict[str, list[int]]()
    for i, name in enumerate(names):
        if EQUALS in name and sums[i] > 0:
            columns.setdefault(column_of(name), []).append(i)
    for own in columns.values():
        found[own[0]] = len(own) > 1 and sums[own].sum() == count
    return found


def column_of(name: str) -> str:
    """Return the column that a coefficient belongs to."""
    return name.partition(EQUALS)[0]


def references_of(state: State) -> list[str]:
    """Return the categories that others of their column are compared with, but for the first."""
    names, marks = state.words[:-1], state.arrays[REFERENCE]
    return [name for name, mark in zip(names[-len(marks) :], marks, strict=True) if mark]


def in_intercept(state: State) -> set[str]:
    """Return the columns without a coefficient here whose effect the intercept contains.

    They are the categories compared with, and columns with one value in all rows, other than 0.
    """
    names, arrays = state.words[:-1], state.arrays
    without = ~arrays["used"][-len(arrays[CENTRES]) :] & (arrays[CENTRES] != 0)
    return {name for name, one in zip(names[-len(without) :], without, strict=True) if one}


def _scaled(settings: Mapping[str, Any], state: State, total: Arrays) -> dict[str, NDArray[Any]]:
    """Return the deviations; 0 for a column with one value in all rows, or compared with."""
    centres = state.arrays[CENTRES]
    widths = np.sqrt(np.asarray(total[SQUARES]) / float(total[COUNT][0]))
    constant = widths <= CONSTANT * np.abs(centres)
    if constant.all() and not intercepts(settings):
        raise FitError("all columns are constant: name others")
    widths[constant | state.arrays[REFERENCE]] = 0.0
    scale = {CENTRES: centres, WIDTHS: widths, REFERENCE: state.arrays[REFERENCE]}
    if settings["model"] == COX:
        return {**scale, BETA: np.zeros(len(widths)), EVENTS: state.arrays[EVENTS]}
    return {**scale, BETA: np.append(state.arrays["first"], np.zeros(len(widths)))}


def _stepped(settings: Mapping[str, Any], state: State, total: Arrays) -> State:
    """Return the state with one more step, a halved one, or the result."""
    arrays = dict(state.arrays)
    loss, beta = float(total[LOSS][0]), arrays[BETA]
    steps = int(arrays.get("steps", np.zeros(1))[0])
    if "before" in arrays:
        last, was = float(arrays["lowest"][0]), arrays["before"]
        if loss > last + 1e-10 * abs(last):
            if steps >= MOST_STEPS:
                flat = bool(arrays["flat"][0])
                raise FitError(_endless(settings, state.words, steps, beta - was, flat=flat))
            return replace(state, arrays={**_halved(state), "steps": np.array([steps + 1])})
    used = np.append([True] * intercepts(settings), arrays[WIDTHS] > 0).astype(np.bool_)
    size = len(beta)
    hessian = unpacked(total[HESSIAN], size)[np.ix_(used, used)]
    first = arrays.setdefault(FIRST, hessian)
    words = [*(state.words[i] for i in np.flatnonzero(used).tolist()), state.words[-1]]
    inverse = _inverse(settings, words, steps, hessian, first)
    step = np.zeros(size)
    step[used] = -inverse @ np.asarray(total[GRADIENT])[used]
    gain = float(-step @ total[GRADIENT])  # twice what a quadratic loss would fall
    count = float(total[COUNT][0])
    dispersion = 1.0
    if settings["model"] == "linear":
        dispersion = max(2 * loss - gain, 0.0) / (count - used.sum())
        if dispersion <= 1e-18 * max(2 * loss, abs(beta[0]) ** 2):
            raise FitError(f"the columns determine {state.words[-1]} exactly: there is no error")
    if gain > dispersion * CONVERGED**2:
        flat = _is_flat(step[used], hessian, first)
        if steps >= MOST_STEPS:
            raise FitError(_endless(settings, words, steps, step[used], flat=flat))
        more = {BETA: beta + step, "before": beta, "lowest": np.array([loss])}
        more["flat"] = np.array([flat])
        return replace(state, arrays={**arrays, **more, "steps": np.array([steps + 1])})
    result = _in_units(arrays, beta + step, inverse * dispersion, used)
    own = {"count": total[COUNT], "loss": np.array([loss - gain / 2]), "used": used}
    own |= {name: arrays[name] for name in (CENTRES, EVENTS, REFERENCE) if name in arrays}
    return replace(state, arrays={**result, **own}, done=True)


def _halved(state: State) -> dict[str, NDArray[Any]]:
    was = state.arrays["before"]
    return {**state.arrays, BETA: was + (state.arrays[BETA] - was) / 2}


def _inverse(
    settings: Mapping[str, Any], words: Sequence[str], steps: int, hessian: Array, first: Array
) -> Array:
    """Return the inverse of a Hessian; raise ``FitError``, naming columns, if there is none."""
    diagonal = np.sqrt(np.diag(hessian))
    if not (diagonal > CONSTANT * diagonal.max()).all():
        least = int(np.argmin(diagonal))
        if steps == 0 and settings["model"] == COX:
            raise FitError(
                f"{words[least]} has one value in each silo while events happen, and rows of "
                "different silos are not compared: name the columns without it"
            )
        along = np.eye(len(diagonal))[least]
        flat = _is_flat(along, hessian, first)
        raise FitError(_endless(settings, words, steps, along, flat=flat))
    scaled = hessian / np.outer(diagonal, diagonal)
    values, vectors = np.linalg.eigh(scaled)
    if values[0] < SINGULAR:
        if steps:
            along = vectors[:, 0] / diagonal
            flat = _is_flat(along, hessian, first)
            raise FitError(_endless(settings, words, steps, along, flat=flat))
        which = [words[i] for i in np.flatnonzero(np.abs(vectors[:, 0]) > 0.1).tolist()]
        raise FitError(
            f"{', '.join(which)} depend on each other, so that their coefficients cannot be "
            "separated: name the columns without one of them"
        )
    inverse = (vectors / values) @ vectors.T
    return np.asarray(inverse / np.outer(diagonal, diagonal))


def _is_flat(along: Array, hessian: Array, first: Array) -> bool:
    """Return whether hardly anything of the first curvature is left along a direction (p,)."""
    return bool(along @ hessian @ along < FLAT * (along @ first @ along))


def _longest(settings: Mapping[str, Any], words: Sequence[str], along: Array) -> str:
    """Return the column along which a step (p,) in scaled columns is longest."""
    columns = intercepts(settings)
    return words[columns + int(np.argmax(np.abs(along[columns:])))]


def _endless(
    settings: Mapping[str, Any], words: Sequence[str], steps: int, along: Array, *, flat: bool
) -> str:
    """Return why steps along a direction (p,) do not end: separation where the loss is flat."""
    name = _longest(settings, words, along)
    if not flat:
        return (
            f"the fit did not converge in {steps} steps, mostly for {name}: its values may be very "
            "skewed, or a silo's sums wrong. Name the columns without it, or see with --each-alone "
            "whether a silo differs"
        )
    why = f"{words[-1]} is the same in all rows (separation)"
    if settings["model"] == COX:
        why = "the events come in order (monotone likelihood)"
    return (
        f"the coefficients of {name} have no finite value: along it, {why}. "
        "Name the columns without it"
    )


def _in_units(
    arrays: Mapping[str, NDArray[Any]], beta: Array, covariance: Array, used: NDArray[np.bool_]
) -> dict[str, NDArray[Any]]:
    """Return coefficients (p,) and covariance (p, p) in the units of the columns; 0 if unused."""
    widths = np.where(arrays[WIDTHS] > 0, arrays[WIDTHS], 1.0)
    constant = len(beta) - len(widths)
    change = np.diag(np.append(np.ones(constant), 1 / widths))
    change[:constant, constant:] = -arrays[CENTRES] / widths
    whole = np.zeros((len(beta), len(beta)))
    whole[np.ix_(used, used)] = covariance
    change[:constant, ~used] = 0.0
    return {"coefficients": change @ beta, "covariance": change @ whole @ change.T}
