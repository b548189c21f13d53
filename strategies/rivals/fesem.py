"""FeSEM: K centres, of which every silo trains the one nearest to its last local model.

Long, Xie, Shen, Zhou, Wang, Jiang: "Multi-center federated learning: clients clustering for better
personalization", World Wide Web 2022, https://arxiv.org/abs/2108.08647 (first
https://arxiv.org/abs/2005.01026); stochastic expectation maximisation of ``Σ_i |W_i − W̃^(k_i)|²``:
after each round the E-step assigns every local model to its nearest centre (ℓ₂), the M-step makes
each centre the mean of its local models, and silos train from their centre.

Differs from the paper in:

- *Seeding.* Round 1 starts from w⁰; k-means++ then picks the centres from its local models. Random
  centres would all be farther away than any two silos are from each other.
- Centres are size-weighted means, as in the second version.
- *Newcomers*, which the paper does not have, train once from the mean of the centres; then the
  E-step places them. A silo that did not answer keeps its centre, an empty centre its weights.
- Distances are of parameters; BatchNorm's running statistics are averaged with them.

It uses FedAvg's messages, at FedAvg's cost for the silos, and works with any ClientApp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field

from coterie.strategies.partition.clustering import seed_centres
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Order,
    Round,
    Update,
    Updates,
    orders_from,
)
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members, give_out
from coterie.strategies.rounds.minimum_sizes import average
from coterie.strategies.rounds.models import comparable, difference, plain_mean
from coterie.strategies.rounds.options import Count, Sample, Seed
from coterie.strategies.rounds.sampling import drawn_silos


@dataclass(frozen=True)
class FeSEMState:
    """FeSEM's state between rounds.

    Attributes:
        members: groups are silos with the same centre now.
        centres: W̃^(k); empty before the first local models exist.
        centre_of: silo → index of its centre.
    """

    members: Members
    centres: tuple[Model, ...] = ()
    centre_of: Mapping[str, int] = field(default_factory=dict)


class FeSEM(Algorithm[FeSEMState]):
    """Groups by the Euclidean distance of local models to K centres, redone every round."""

    num_groups: Count = Field(
        3, description="K, number of centres; at most the number of different local models."
    )
    sample: Sample = 0
    seed: Seed = 0
    remembers = FeSEMState
    hands_on = True  # others may come to a silo's centre

    @property
    def crosses(self) -> bool:
        """Whether models averaged together began apart: True, as silos change centres."""
        return True

    def orders(self, state: FeSEMState, now: Round) -> tuple[FeSEMState, list[Order]]:
        """Order training from each silo's centre; newcomers start from the centres' mean."""
        middle = plain_mean(state.centres) if state.centres else state.members.initial
        new = dict.fromkeys((n for n in now.names if n not in state.centre_of), middle)
        members = state.members.holding(new).grouped((n,) for n in now.names)
        state = _handed_out(replace(state, members=members))
        turn = drawn_silos(now, self.sample, seed=self.seed)
        return state, orders_from(state.members.models, turn)

    def absorb(self, state: FeSEMState, updates: Updates, now: Round) -> FeSEMState:
        """Seed the centres if there are none; then run one E-step and one M-step."""
        if not updates:
            return state
        if not state.centres:
            rng = np.random.default_rng([self.seed, now.number])
            matrix = gram([list(_moved(u.model, state, u).values()) for u in updates])
            rows = seed_centres(matrix, num_groups=self.num_groups, rng=rng)
            seeds = replace(state, centres=tuple(updates[row].model for row in rows))
            nearest = {u.silo.name: _nearest(u, seeds) for u in updates}
            # Where no member lets its update count, nobody's local model is to be a centre.
            start = (updates[0].start,) * len(seeds.centres)
            return _averaged(replace(state, centres=start, centre_of=nearest), updates)
        nearest = {u.silo.name: _nearest(u, state) for u in updates}
        return _averaged(replace(state, centre_of={**state.centre_of, **nearest}), updates)

    def details(self, state: FeSEMState) -> Mapping[str, Any]:
        here = sorted(state.members.here)
        return {"centre": {n: state.centre_of[n] for n in here if n in state.centre_of}}


def _averaged(state: FeSEMState, updates: Updates) -> FeSEMState:
    by_centre: dict[int, list[Update]] = {}
    for update in updates:
        by_centre.setdefault(state.centre_of[update.silo.name], []).append(update)
    centres = list(state.centres)
    for number, own in by_centre.items():
        mean = average(own)
        if mean is not None:
            centres[number] = mean
    return _handed_out(replace(state, centres=tuple(centres)))


def _moved(model: Model, state: FeSEMState, update: Update) -> Arrays:
    """Return the compared arrays relative to w⁰, which keeps distances and the numbers small."""
    delta = difference(model, state.members.initial)
    return comparable(delta, similarity="parameters", buffers=update.silo.buffers)


def _nearest(update: Update, state: FeSEMState) -> int:
    """Return the index of the nearest centre (E-step of one silo); ties go to the first."""
    own = _moved(update.model, state, update)
    squares = [_square(own, _moved(centre, state, update)) for centre in state.centres]
    return int(np.argmin(squares))


def _square(one: Arrays, other: Arrays) -> float:
    gaps = (one[name].astype(np.float64) - other[name].astype(np.float64) for name in one)
    return float(sum(np.vdot(gap, gap) for gap in gaps))


def _handed_out(state: FeSEMState) -> FeSEMState:
    """Give present silos their centre and group by it; silos that never answered are alone."""
    members = state.members
    members = give_out(members, members.here, state.centre_of, state.centres)
    return replace(state, members=members)
