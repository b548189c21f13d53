"""What a run's end says if α alone decided that no silo, or every silo, trains with others."""

from __future__ import annotations

from typing import Literal

import numpy as np

from coterie.strategies.hcct.choosing_alpha import PATH_SEARCH
from coterie.strategies.hcct.state import HCCTState
from coterie.strategies.partition.hcct import alpha_path
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.strategies.partition.solvers import best_partition
from coterie.strategies.rounds.members import present_groups

BORDER = 0.01
"""Relative precision of the α that is named."""


def by_choice(state: HCCTState, solver: Literal["best", "agglomerative"]) -> str:
    """Return which α would have made a difference, if all silos are alone or all together.

    Empty if there are groups between, if a silo states its own α, or if something other than α
    keeps the silos apart.
    """
    names = state.compared
    groups = present_groups(state.planned, names)
    if len(names) < 2 or len(groups) not in (1, len(names)) or set(names) & state.alphas.keys():
        return ""
    gram = np.array(state.similarity) * np.outer(state.norms, state.norms)
    search = _best if solver == "best" else solver
    path = alpha_path(gram, state.sizes_used, solver=search, rtol=BORDER)
    alpha, last = state.alphas_used[0], "With their last updates, some would"
    if len(groups) == 1:
        low = path[-1].alpha_low
        text = f"all silos train together at alpha = {alpha:.3g}. {last} part below alpha = "
        return f"{text}{low:.3g}" if 0 < low <= alpha else ""
    high = path[0].alpha_high
    if len(path[0].groups) < len(names) or alpha > high:
        return ""
    text = f"every silo trains alone at alpha = {alpha:.3g}. {last} train together from alpha = "
    return f"{text}{high:.3g}"


def _best(utility: HCCTUtility) -> list[list[int]]:
    return best_partition(utility, rng=np.random.default_rng(0), **PATH_SEARCH).groups
