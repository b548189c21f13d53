"""The best partition that can be had in reasonable time, whatever the number of silos."""

from __future__ import annotations

import numpy as np

from coterie.strategies.partition.coalition import (
    MAX_OPTIMAL_SILOS,
    Objective,
    Partition,
    agglomerative,
    optimal,
    relocation,
)

EXACT_SILOS = MAX_OPTIMAL_SILOS
"""Up to so many silos the optimum is found exactly, in a tenth of a second."""


def best_partition(
    objective: Objective,
    *,
    rng: np.random.Generator,
    num_restarts: int = 20,
    exact: int = EXACT_SILOS,
) -> Partition:
    """The exact optimum for few silos; else the better of two searches.

    Args:
        objective: HCCT utility or FedCollab bound of N silos.
        rng: for the searches; unused where the answer is exact.
        num_restarts: of ``relocation`` from singletons.
        exact: up to so many silos, at most ``EXACT_SILOS``, the answer is the optimum.

    Greedy merging alone commits early: two small silos that have nothing in common but their
    hunger for data are joined before either meets a larger silo of its own kind, and are never
    parted again. Here its answer is improved by moving single silos, and compared with
    relocation from singletons; ties go to the first.
    """
    if objective.single.shape[1] <= min(exact, EXACT_SILOS):
        return optimal(objective)
    polished = relocation(objective, rng=rng, num_restarts=1, start=agglomerative(objective).groups)
    searched = relocation(objective, rng=rng, num_restarts=num_restarts)
    gains = [found.objective * objective.sign for found in (polished, searched)]
    return polished if gains[0] >= gains[1] else searched
