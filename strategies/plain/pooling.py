"""Partial pooling: how strongly silos' own models are shrunk to their group's model.

A silo's own model is its group's, trained on with a penalty λ/2·|w − w_group|² beside the sum of
its samples' losses; the last bias has no penalty (``coterie.features.personal``). λ is the same for
all silos of a partition. Every silo trains at each λ of a grid and measures the result on held-out
samples; the sum of the losses over silos decides. Of boosted trees the silo's own are the leaf
values and a few trees (``coterie.features.sums.trees.own``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from coterie import wire
from coterie.strategies.rounds.algorithm import Exchanges, Order, Update
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.options import Config, Scalar
from coterie.strategies.rounds.roster import Silo

HOLDOUT, FEWEST = 0.2, 5
"""Share of a silo's samples that choose λ, and the fewest samples of a silo that holds some out."""
OWN_INTERCEPT = 1e6
"""λ that leaves a silo only its last bias."""
GRID = (3.0, 30.0, 300.0, OWN_INTERCEPT)
"""λ that are tried, beside none: the group's model as it is."""
TRIED = (0.0, *GRID)
"""The same; 0 stands for the group's model as it is."""
TRIED_LEAVES = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)
"""The same, of the leaf values and own trees beside boosted trees."""

Tried = TypeVar("Tried", bound=Hashable)


def with_penalty(penalty: float, silo: Silo) -> dict[str, Scalar]:
    """Return the entries of a question about own models at one λ."""
    return {wire.OWN_PENALTY: penalty}


def ask(
    wanted: Sequence[tuple[Silo, Model]],
    *,
    holdout: float,
    tried: Sequence[Tried],
    entries: Callable[[Tried, Silo], Config],
) -> Exchanges[dict[Tried, dict[str, Update]]]:
    """Let silos make their own models of those they receive, and measure them, in one exchange.

    Return value → silo → its measurements on held-out samples, for every value that is ``tried``;
    ``entries`` has the entries of a silo's message about one.
    """
    purposes = {f"own-{number}": value for number, value in enumerate(tried)}
    orders = []
    for silo, model in wanted:
        for purpose, value in purposes.items():
            config = {wire.HOLDOUT: holdout, **entries(value, silo)}
            orders.append(
                Order(silo, model, purpose=purpose, kind=wire.EVALUATE_OWN, config=config)
            )
    found: dict[Tried, dict[str, Update]] = {value: {} for value in tried}
    if orders:
        answers = yield orders
        for update in answers:
            found[purposes[update.purpose]][update.silo.name] = update
    return found


def holds_out(silo: Silo) -> bool:
    """Return whether a silo has enough samples to hold some out."""
    return silo.described and silo.num_examples >= FEWEST


def losses_of(
    found: Mapping[Tried, Mapping[str, Update]],
) -> dict[Tried, dict[str, tuple[float, float]]]:
    """Return value → silo → its loss on held-out samples and their number, where it sent them."""
    return {
        value: {
            name: (u.metrics[wire.HOLDOUT_LOSS], u.held_out(HOLDOUT))
            for name, u in own.items()
            if wire.HOLDOUT_LOSS in u.metrics
        }
        for value, own in found.items()
    }


def mean_losses(
    losses: Mapping[Tried, Mapping[str, tuple[float, float]]], name: Callable[[Tried], str]
) -> dict[str, float]:
    """Return value → mean loss over all silos' samples, for the record."""
    found = {}
    for value, own in losses.items():
        count = sum(n for _, n in own.values())
        if count:
            found[name(value)] = round(sum(loss * n for loss, n in own.values()) / count, 6)
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
