"""Cox's partial likelihood of a silo's rows, with Efron's method for ties.

Cox: "Regression models and life-tables", J. R. Stat. Soc. B 34, 1972; Efron: "The efficiency of
Cox's likelihood function for censored data", J. Am. Stat. Assoc. 72, 1977. Rows are compared with
those of the same silo only, so that neither times nor risk sets leave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.contract import Array
from coterie.tasks.base import Persons

SMALLEST: Final = -600.0
"""Smallest log of a weight beside the largest: exp of it is not 0."""
Order = NDArray[np.int64]


@dataclass(frozen=True)
class Spells:
    """The rows under observation at each time. All arrays but ``order`` have rows by falling time.

    Attributes:
        order: (n,) the rows by falling time.
        starts: (times,) first row of each time.
        ties: (n,) number of each row's time.
        event: (n,) 1 where an event counts, else 0.
        share: (n,) l/d at the event number l, from 0, of d at the same time; else 0.
    """

    order: Order
    starts: Order
    ties: Order
    event: Array
    share: Array

    def to_time(self, values: Array) -> Array:
        """Return the sum (events, …) over each event's risk set, by Efron, of values (n, …)."""
        at = self.event > 0
        whole = np.cumsum(values, axis=0)[np.append(self.starts[1:], len(values)) - 1]
        tied = np.add.reduceat((values.T * self.event).T, self.starts, axis=0)
        which = self.ties[at]
        return np.asarray(whole[which] - (tied[which].T * self.share[at]).T)


def spells_of(time: Array, event: Array, persons: Persons | None, least: int) -> Spells:
    """Return the rows under observation at each time.

    An event does not count if fewer than ``least`` rows (persons, if they have several) are under
    observation at its time: their mean would describe few.
    """
    order = np.argsort(-time, kind="stable")
    falling = time[order]
    _, starts, ties = np.unique(-falling, return_index=True, return_inverse=True)
    whose: NDArray[Any] = order if persons is None else persons[order]
    new = np.zeros(len(order))
    new[np.unique(whose, return_index=True)[1]] = 1.0
    ends = np.append(starts[1:], len(order)) - 1
    counts = (event[order] > 0) & (np.cumsum(new)[ends][ties] >= least)
    event = counts.astype(np.float64)
    before = np.cumsum(event) - event
    number = before - before[starts][ties]
    together = np.add.reduceat(event, starts)[ties]
    share = np.divide(number, together, out=np.zeros(len(order)), where=counts)
    return Spells(order, starts, ties, event, share)


def partial(spells: Spells, z: Array, beta: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return the negative log partial likelihood of coefficients (p,) for columns (n, p).

    Returns:
        It (1,), its gradient (p,) and Hessian (p, p), and the weights (n,) of rows in these.
    """
    z, event, at = z[spells.order], spells.event, spells.event > 0
    z = z - z.mean(axis=0)  # changes nothing, but for rounding
    eta = z @ beta
    eta -= eta.max()
    weights = np.exp(np.maximum(eta, SMALLEST))
    risk = spells.to_time(weights)
    means = spells.to_time(weights[:, None] * z) / risk[:, None]
    inverse = np.zeros(len(eta))
    inverse[at] = 1 / risk
    until = np.cumsum(inverse[::-1])[::-1][spells.starts]
    own = np.add.reduceat(spells.share * inverse, spells.starts)
    hazards = weights * (until[spells.ties] - event * own[spells.ties])
    return (
        np.array([np.log(risk).sum() - eta[at].sum()]),
        z.T @ (hazards - event),
        z.T @ (z * hazards[:, None]) - means.T @ means,
        hazards - event,
        hazards,
    )
