"""Survival curves by sums: events, and rows no longer under observation, until agreed times.

The estimate is that of Kaplan and Meier ("Nonparametric estimation from incomplete observations",
J. Am. Stat. Assoc. 53, 1958) on times rounded up to the agreed ones, with Greenwood's variance; the
test between groups is the log-rank test (Mantel: "Evaluation of survival data", Cancer Chemotherapy
Reports 50, 1966).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.contract import Arrays, Family, Layout, Question, State
from coterie.features.sums.regression.newton import COUNT, Regression
from coterie.features.sums.regression.numbers import LEVEL

SURVIVAL: Final = "survival"
WORDS: Final = ("time to event",)
MOST_TIMES: Final = 20
EVENTS, ENDED = "events", "ended"


def times_of(settings: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the agreed times.

    Raises:
        ValueError: they are not rising, or too many.
    """
    times = settings.get("at")
    if not isinstance(times, list) or not all(type(one) in (int, float) for one in times):
        times = []
    if not 1 <= len(times) <= MOST_TIMES:
        raise ValueError(f"a survival curve needs 1 to {MOST_TIMES} times")
    found = [0.0, *map(float, times)]
    if not all(a < b < math.inf for a, b in pairwise(found)):
        raise ValueError("the times of a survival curve must be positive, and rise")
    return tuple(found[1:])


class Survival:
    """The family of survival curves. Settings: ``model`` and ``at``."""

    name: ClassVar[str] = "regression"

    def layout(self, question: Question, words: Sequence[str]) -> Layout:
        if question.arrays or tuple(words) != WORDS:
            raise ValueError("a survival curve asks once, and for time and event")
        size = (len(times_of(question.settings)),)
        return {COUNT: (1,), EVENTS: size, ENDED: size}

    def objection(self, question: Question, arrays: Arrays, samples: int) -> str:
        """Return why these counts belong to no rows."""
        count, events, ended = float(arrays[COUNT][0]), arrays[EVENTS], arrays[ENDED]
        if not (1 <= count <= max(samples, 1) and count == int(count)):
            return f"its number of rows must be from 1 to {samples}. Got {count:g}"
        whole = (events == np.rint(events)).all() and (ended == np.rint(ended)).all()
        if not whole or (np.diff([events, ended - events], axis=1, prepend=0) < 0).any():
            return "its counts must be whole numbers, and rise"
        return "" if ended[-1] <= count else "more observations ended than it has rows"

    def asked(self, settings: Mapping[str, Any], state: State) -> Arrays:
        """Return nothing: there is one exchange."""
        return {}

    def halved(self, settings: Mapping[str, Any], state: State) -> None:
        """Return nothing: there are no steps."""

    def without(self, settings: Mapping[str, Any], state: State) -> State:
        """Return the beginning."""
        return State(words=state.words, step=state.step)

    def next(self, settings: Mapping[str, Any], state: State, total: Arrays) -> State:
        return replace(state, arrays=dict(total), done=True)


def family_of(settings: Mapping[str, Any]) -> Family:
    """Return the coordinator's side of a fit with these settings."""
    return Survival() if settings.get("model") == SURVIVAL else Regression()


@dataclass(frozen=True)
class Step:
    """Survival until a time, with its interval of 95%; ``at_risk`` and ``events`` before it."""

    time: float
    at_risk: int
    events: int
    survival: float
    low: float
    high: float


def curve(settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Step]:
    """Return the curve of a finished fit.

    The interval is symmetric in log(−log survival) (Kalbfleisch, Prentice: "The Statistical
    Analysis of Failure Time Data", 2002, section 1.4).
    """
    from scipy.special import ndtri

    steps, survival, variance = [], 1.0, 0.0
    for end, at_risk, events in zip(times_of(settings), *_counts(arrays), strict=True):
        if at_risk:
            survival *= 1 - events / at_risk
            variance += events / (at_risk * (at_risk - events)) if events < at_risk else math.inf
        low = high = survival
        if 0 < survival < 1:
            half = float(ndtri(1 - (1 - LEVEL) / 2)) * math.sqrt(variance) / -math.log(survival)
            low, high = (survival ** math.exp(sign * half) for sign in (1, -1))
        steps.append(Step(end, int(at_risk), int(events), survival, low, high))
    return steps


def _counts(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[float], list[float]]:
    """Return rows at risk, and events, at each time."""
    at_risk = arrays[COUNT][0] - np.append(0.0, arrays[ENDED][:-1])
    return at_risk.tolist(), np.diff(arrays[EVENTS], prepend=0.0).tolist()


def log_rank(groups: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[float, float] | None:
    """Return the statistic and p of the hypothesis that all groups have the same survival.

    None of fewer than two groups, or without events.
    """
    from scipy.special import gammaincc

    if len(groups) < 2:
        return None
    difference, covariance = np.zeros(len(groups)), np.zeros((len(groups), len(groups)))
    counts = np.array([_counts(one) for one in groups])
    for at_risk, events in counts.transpose(2, 1, 0):
        n, d = at_risk.sum(), events.sum()
        if n > 1:
            shares = at_risk / n
            difference += events - shares * d
            covariance += d * (n - d) / (n - 1) * (np.diag(shares) - np.outer(shares, shares))
    inner = covariance[1:, 1:]
    if np.linalg.matrix_rank(inner) < len(inner):
        return None
    statistic = float(difference[1:] @ np.linalg.solve(inner, difference[1:]))
    return statistic, float(gammaincc((len(groups) - 1) / 2, statistic / 2))
