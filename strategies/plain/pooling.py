"""Partial pooling: how strongly silos' own models are shrunk to their group's model.

A silo's own model is its group's, trained on with a penalty λ/2·|w − w_group|² beside the sum of
its samples' losses; the last bias has no penalty (``coterie.features.personal``). λ is the same for
all silos of a partition. Every silo trains at each λ of a grid and measures the result on held-out
samples; the sum of the losses over silos decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coterie import wire
from coterie.strategies.rounds.algorithm import Exchanges, Order, Update
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.options import Scalar
from coterie.strategies.rounds.roster import Silo

OWN_INTERCEPT = 1e6
"""λ that leaves a silo only its last bias."""
GRID = (3.0, 30.0, 300.0, OWN_INTERCEPT)
"""λ that are tried, beside none: the group's model as it is."""
TRIED = (0.0, *GRID)
"""The same; 0 stands for the group's model as it is."""


def ask(
    wanted: Sequence[tuple[Silo, Model]], *, holdout: float, penalties: Sequence[float] = TRIED
) -> Exchanges[dict[float, dict[str, Update]]]:
    """Let silos make their own models of those they receive, and measure them, in one exchange.

    Return λ → silo → its measurements on held-out samples, for every λ of ``penalties``.
    """
    purposes = {f"own-{number}": penalty for number, penalty in enumerate(penalties)}
    orders = []
    for silo, model in wanted:
        for purpose, penalty in purposes.items():
            config: dict[str, Scalar] = {wire.HOLDOUT: holdout, wire.OWN_PENALTY: penalty}
            orders.append(
                Order(silo, model, purpose=purpose, kind=wire.EVALUATE_OWN, config=config)
            )
    found: dict[float, dict[str, Update]] = {penalty: {} for penalty in penalties}
    if orders:
        answers = yield orders
        for update in answers:
            found[purposes[update.purpose]][update.silo.name] = update
    return found


def best_penalty(
    losses: Mapping[float, Mapping[str, tuple[float, float]]], before: Mapping[str, float]
) -> float:
    """Return the λ with the smallest sum of losses; the strongest of equal ones, 0 counting most.

    A group's model that still learns would gain by training of any kind. So it is credited with the
    loss that its last round of training took away, on average over silos.

    Args:
        losses: λ → silo → mean loss, and the number of samples behind it. Silos count that measured
            every λ; without any it is 0.
        before: silo → its loss of the group's model one round earlier.
    """
    as_it_is = {name: loss for name, (loss, _) in losses.get(0.0, {}).items()}
    lost = [before[name] - as_it_is[name] for name in sorted(before.keys() & as_it_is.keys())]
    credit = max(float(np.mean(lost)), 0.0) if lost and np.isfinite(lost).all() else 0.0
    credited = {n: (loss - credit, count) for n, (loss, count) in losses.get(0.0, {}).items()}
    losses = {**losses, 0.0: credited}
    judges = sorted(frozenset.intersection(*(frozenset(own) for own in losses.values())))
    totals = {
        penalty: float(np.sum([own[name][0] * own[name][1] for name in judges]))
        for penalty, own in losses.items()
    }
    known = {penalty: total for penalty, total in totals.items() if np.isfinite(total)}
    if not judges or not known:
        return 0.0
    return min(known, key=lambda penalty: (known[penalty], -penalty if penalty else -np.inf))
