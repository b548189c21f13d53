"""FeSEM: K centres, and every silo trains the centre nearest to its last local model.

Long, Xie, Shen, Zhou, Wang, Jiang: "Multi-center federated learning: clients clustering for
better personalization", World Wide Web 2022, https://arxiv.org/abs/2108.08647 (first
https://arxiv.org/abs/2005.01026); stochastic expectation maximisation of ``Σ_i |W_i − W̃^(k_i)|²``:
after each round the E-step assigns every local model to its nearest centre (ℓ₂), the M-step makes
each centre the mean of its local models, and silos train from their centre.

Differs from the paper in:

- *Seeding.* Round 1 starts from w⁰; k-means++ seeding picks its centres from the local models
  after it. Random centres would all be farther away than any two silos are from each other.
- Centres are size-weighted means, as in the second version.
- *Newcomers*, which the paper does not have, train once from the mean of the centres; then the
  E-step places them. Who did not answer keeps its centre. An empty centre keeps its weights.
- Distances are of parameters; BatchNorm's running statistics go with them.

FedAvg's messages and cost at the silos: it works with any ClientApp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from coterie.strategies.errors import require
from coterie.strategies.partition.clustering import seed_centres
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.grouping import Members, counted, drawn_silos, enrol, orders_from
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.models import comparable, difference, weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


@dataclass(frozen=True)
class FeSEMState:
    """What FeSEM knows between two rounds.

    Attributes:
        members: every silo's model and size; ``groups`` are who has the same centre now.
        centres: W̃^(k); empty before the first local models are there.
        centre_of: silo → number of its centre.
    """

    members: Members
    centres: tuple[Model, ...] = ()
    centre_of: Mapping[str, int] = field(default_factory=dict)


class FeSEM(GroupStrategy[FeSEMState]):
    """Groups by the Euclidean distance of local models to K centres, anew in every round.

    Args:
        num_groups: K, at least 1; at most as many centres as different local models are formed.
        sample: silos a round, drawn by seed; 0 takes all.
        seed: of the seeding and of the draws.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        num_groups: int = 3,
        sample: int = 0,
        seed: int = 0,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        require(num_groups >= 1, f"num_groups must be at least 1. Got {num_groups}.")
        require(sample >= 0, f"sample must be at least 0. Got {sample}.")
        self.num_groups, self.sample, self.seed = int(num_groups), int(sample), int(seed)

    def first(self, initial: Model) -> FeSEMState:
        """Nobody yet."""
        return FeSEMState(Members(initial))

    def admit(self, state: FeSEMState, silos: Sequence[Silo], *, round: int) -> FeSEMState:
        """A newcomer has no centre yet."""
        return replace(state, members=enrol(state.members, silos, state.members.initial))

    def orders(
        self, state: FeSEMState, silos: Sequence[Silo], *, round: int
    ) -> tuple[FeSEMState, list[Order]]:
        """Train from your centre; who comes back finds today's, who is new the centres' mean."""
        here = tuple(silo.name for silo in silos)
        new = dict.fromkeys((n for n in here if n not in state.centre_of), _middle(state))
        models = {**state.members.models, **new}
        members = replace(state.members, models=models, groups=tuple((n,) for n in here))
        state = _handed_out(replace(state, members=members))
        turn = drawn_silos(silos, self.sample, seed=self.seed, round=round)
        return state, orders_from(state.members.models, turn)

    def absorb(self, state: FeSEMState, updates: Sequence[Update], *, round: int) -> FeSEMState:
        """Seed the centres if there are none; then one E-step and one M-step."""
        if not updates:
            return state
        if not state.centres:
            rng = np.random.default_rng([self.seed, round])
            matrix = gram([list(_moved(u.model, state, u).values()) for u in updates])
            rows = seed_centres(matrix, num_groups=self.num_groups, rng=rng)
            seeds = tuple(updates[row].model for row in rows)
            nearest = {u.silo.name: _nearest(u, replace(state, centres=seeds)) for u in updates}
            # Where no member lets its update count, nobody's local model is to be a centre.
            state = replace(state, centres=(updates[0].start,) * len(seeds), centre_of=nearest)
            return self._averaged(state, updates)
        nearest = {u.silo.name: _nearest(u, state) for u in updates}
        state = replace(state, centre_of={**state.centre_of, **nearest})
        return self._averaged(state, updates)

    def _averaged(self, state: FeSEMState, updates: Sequence[Update]) -> FeSEMState:
        """M-step: each centre is the mean of the local models that came back to it."""
        by_centre: dict[int, list[Update]] = {}
        for update in updates:
            by_centre.setdefault(state.centre_of[update.silo.name], []).append(update)
        centres = list(state.centres)
        for number, own in by_centre.items():
            kept = counted(own)
            if kept:
                sizes = [u.num_examples for u in kept]
                centres[number] = weighted_mean([u.model for u in kept], sizes)
        sizes_now = {**state.members.sizes, **{u.silo.name: u.num_examples for u in updates}}
        members = replace(state.members, sizes=sizes_now)
        return _handed_out(replace(state, members=members, centres=tuple(centres)))

    def models(self, state: FeSEMState) -> Mapping[str, Model]:
        """Silo → its centre."""
        return state.members.models

    def groups(self, state: FeSEMState) -> Sequence[Group]:
        """Who has the same centre."""
        return state.members.groups

    def sharing(self, state: FeSEMState) -> Sequence[Group]:
        """Those of one silo too: others may come to its centre."""
        return self.groups(state)

    def sizes(self, state: FeSEMState) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.members.sizes

    def details(self, state: FeSEMState) -> Mapping[str, Any]:
        """Every silo's centre, by number."""
        here = sorted(name for group in state.members.groups for name in group)
        return {"centre": {n: state.centre_of[n] for n in here if n in state.centre_of}}


def _middle(state: FeSEMState) -> Model:
    """The plain mean of the centres; w⁰ before there are any."""
    if not state.centres:
        return state.members.initial
    return weighted_mean(state.centres, [1.0] * len(state.centres))


def _moved(model: Model, state: FeSEMState, update: Update) -> Model:
    """The compared arrays, relative to w⁰: distances stay, and numbers are small."""
    delta = difference(model, state.members.initial)
    return comparable(delta, similarity="parameters", buffers=update.silo.buffers)


def _nearest(update: Update, state: FeSEMState) -> int:
    """E-step of one silo; the first of equals."""
    own = _moved(update.model, state, update)
    squares = [_square(own, _moved(centre, state, update)) for centre in state.centres]
    return int(np.argmin(squares))


def _square(one: Model, other: Model) -> float:
    gaps = (one[name].astype(np.float64) - other[name].astype(np.float64) for name in one)
    return float(sum(np.vdot(gap, gap) for gap in gaps))


def _by_centre(state: FeSEMState) -> tuple[Group, ...]:
    """Who is here by centre; silos that never answered are alone."""
    here = [name for group in state.members.groups for name in group]
    found: dict[Any, list[str]] = {}
    for name in sorted(here):
        found.setdefault(state.centre_of.get(name, name), []).append(name)
    return tuple(sorted(tuple(names) for names in found.values()))


def _handed_out(state: FeSEMState) -> FeSEMState:
    """Everybody here holds its centre and is grouped by it."""
    groups = _by_centre(state)
    own = {
        name: state.centres[state.centre_of[name]]
        for group in groups
        for name in group
        if name in state.centre_of
    }
    members = replace(state.members, models={**state.members.models, **own}, groups=groups)
    return replace(state, members=members)
