"""Cox's partial likelihood of a silo's rows, by each row's own answer, with Breslow's ties.

It is the loss of networks for survival (``coterie.tasks.problems.Survival``), summed. Risk sets are
formed inside the silo: the sums of all silos are those of one trainer that stratifies by silo.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from coterie.features.sums.spells import Array, Spells, spells_of

SMALLEST: Final = -300.0
"""Smallest log of a weight beside the largest: also the inverse of its square is finite."""


def of_survival(answers: Array, targets: Array) -> tuple[Array, Array]:
    """Return the derivatives (n, 1) of the loss by answers (n, 1); targets are time and event.

    The second ones are those by a row's own answer, as for XGBoost's ``survival:cox``: rows whose
    answers change together change the loss less.
    """
    spells, eta = _at(answers, targets)
    weights = np.exp(eta)
    risk = spells.to_time(weights)
    first, second = spells.until(1 / risk), spells.until(1 / risk**2)
    found = np.empty((2, len(eta)))
    found[0, spells.order] = weights * first - spells.event
    found[1, spells.order] = np.maximum(weights * first - weights**2 * second, 0)
    return found[0, :, None], found[1, :, None]


def losses_of_survival(answers: Array, targets: Array) -> Array:
    """Return each row's part (n,) of the loss: 0 of rows without an event."""
    spells, eta = _at(answers, targets)
    at, found = spells.event > 0, np.zeros(len(eta))
    apart = np.log(spells.to_time(np.exp(eta))) - eta[at]
    found[spells.order[at]] = np.maximum(apart, 0)  # a risk set of one may give -1e-17
    return found


def _at(answers: Array, targets: Array) -> tuple[Spells, Array]:
    """Return who is under observation when, and the logs of the weights (n,) by falling time."""
    spells = spells_of(targets[:, 0], targets[:, 1], None, 0, efron=False)
    eta = answers[spells.order, 0]
    return spells, np.maximum(eta - eta.max(), SMALLEST)
