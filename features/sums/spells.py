"""The rows under observation at each time: the risk sets of Cox's partial likelihood.

Cox: "Regression models and life-tables", J. R. Stat. Soc. B 34, 1972. Rows are compared with those
of the same silo only, so that neither times nor risk sets leave it. Tied events are treated as in
Efron: "The efficiency of Cox's likelihood function for censored data", J. Am. Stat. Assoc. 72,
1977; or as in Breslow: "Covariance analysis of censored survival data", Biometrics 30, 1974.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Order = NDArray[np.int64]


@dataclass(frozen=True)
class Spells:
    """The rows under observation at each time. All arrays but ``order`` have rows by falling time.

    Attributes:
        order: (n,) the rows by falling time.
        starts: (times,) first row of each time.
        ties: (n,) number of each row's time.
        event: (n,) 1 where an event counts, else 0.
        share: (n,) l/d at the event number l, from 0, of d at the same time; else, and by Breslow,
            0.
    """

    order: Order
    starts: Order
    ties: Order
    event: Array
    share: Array

    def to_time(self, values: Array) -> Array:
        """Return the sum (events, …) over each event's risk set of values (n, …)."""
        at = self.event > 0
        whole = np.cumsum(values, axis=0)[np.append(self.starts[1:], len(values)) - 1]
        tied = np.add.reduceat((values.T * self.event).T, self.starts, axis=0)
        which = self.ties[at]
        return np.asarray(whole[which] - (tied[which].T * self.share[at]).T)

    def until(self, values: Array) -> Array:
        """Return the sum (n,) of values (events,) over the events in whose risk sets a row is."""
        at = np.zeros(len(self.event))
        at[self.event > 0] = values
        until = np.cumsum(at[::-1])[::-1][self.starts]
        own = np.add.reduceat(self.share * at, self.starts)
        return np.asarray(until[self.ties] - self.event * own[self.ties])


def spells_of(
    time: Array, event: Array, persons: NDArray[Any] | None, least: int, *, efron: bool = True
) -> Spells:
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
    share = np.zeros(len(order))
    if efron:
        before = np.cumsum(event) - event
        number = before - before[starts][ties]
        together = np.add.reduceat(event, starts)[ties]
        np.divide(number, together, out=share, where=counts)
    return Spells(order, starts, ties, event, share)
