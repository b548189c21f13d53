"""MAXFL: a silo takes part in the global model only while that serves it better than its own.

Cho, Jhunjhunwala, Li, Smith, Joshi: "Maximizing Global Model Appeal in Federated Learning", TMLR
2024, https://arxiv.org/abs/2205.14840; as Sun, Kountouris, Zhang compare it (HCCT, section 7.1):
who finds the global model's training loss below its own requirement takes part, who does not
trains alone.

Round 1: everybody trains from w⁰; what comes out is its own model, and the mean of all is the
first global one. The loss of its own model on its own training data is a silo's requirement;
``own_rounds`` above 1 trains that model for so many rounds beside the global one. During the
warm-up everybody trains the global model, which is of little use to anybody at first. From then on
every silo is asked for its loss of both before each round: it takes part if

    loss(global) ≤ loss(own) − threshold,

and otherwise goes on with its own model. Nobody is lost: every silo is asked in every round, and
may come back. A threshold that nobody meets leaves all alone, and the global model as it was.

Differs from the paper in:

- *Yes or no.* The paper weighs updates by σ'(F_i(w) − ρ_i), near 0 for silos far from their
  requirement; here, as in HCCT's comparison, silos take part or do not, and count by their samples.
- The requirement follows the silo's own model, where that goes on being trained.
- *Newcomers* train their own model from w⁰ first, and are asked from the next round on. Who does
  not answer keeps its last decision.

Two models more and two passes over the training data a round and silo, after the warm-up; one more
training in rounds 2 to ``own_rounds``.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from coterie.strategies.baselines.probes import loss_of, probe
from coterie.strategies.errors import require
from coterie.strategies.rounds.grouping import Members, average_groups, counted, enrol
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model

GLOBAL, OWN = "loss-of-global", "loss-of-own"
OWN_MODEL = "own-model"
"""Purpose of a silo's training of its own model beside the global one."""


@dataclass(frozen=True)
class MAXFLState:
    """What MAXFL knows between two rounds.

    Attributes:
        members: the model that every silo holds (the global or its own), sizes, groups.
        shared: the global model.
        own: silo → its own model; who is not in it has not trained one yet.
        inside: silos that take part.
        losses: silo → its loss of the global and of its own model, of this round.
    """

    members: Members
    shared: Model
    own: Mapping[str, Model] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class MAXFL(GroupStrategy[MAXFLState]):
    """A global model for those who gain by it; the others alone.

    Args:
        threshold: by how much the global model's training loss must be lower; below 0 it may be
            higher by as much.
        warm_up: rounds after the first in which everybody takes part; at least 0.
        own_rounds: rounds of training alone behind the requirement of who takes part; at least 1.
            Many make it hard to meet: on its own training data a small silo's own model has next
            to no loss after a while.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        threshold: float = 0.0,
        warm_up: int = 5,
        own_rounds: int = 1,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        require(bool(np.isfinite(threshold)), f"threshold must be finite. Got {threshold}.")
        require(warm_up >= 0, f"warm_up must be at least 0. Got {warm_up}.")
        require(own_rounds >= 1, f"own_rounds must be at least 1. Got {own_rounds}.")
        self.threshold, self.warm_up = float(threshold), int(warm_up)
        self.own_rounds = int(own_rounds)

    def first(self, initial: Model) -> MAXFLState:
        """Nobody yet."""
        return MAXFLState(Members(initial), initial)

    def admit(self, state: MAXFLState, silos: Sequence[Silo], *, round: int) -> MAXFLState:
        """Everybody starts its own model from w⁰."""
        return replace(state, members=enrol(state.members, silos, state.members.initial))

    def prepare(
        self, state: MAXFLState, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], MAXFLState]:
        """Who takes part in this round."""
        settled = [silo for silo in silos if silo.name in state.own]
        if round <= 1 + self.warm_up:
            return replace(state, inside=frozenset(s.name for s in settled), losses={})
        losses = yield from _losses(state, settled)
        inside = {name for name in state.inside if name not in losses}
        inside |= {name for name, (both, own) in losses.items() if both <= own - self.threshold}
        return replace(state, inside=frozenset(inside), losses=losses)

    def orders(
        self, state: MAXFLState, silos: Sequence[Silo], *, round: int
    ) -> tuple[MAXFLState, list[Order]]:
        """Train the global model or your own."""
        here = [silo.name for silo in silos]
        inside = tuple(name for name in here if name in state.inside)
        alone: list[Group] = [(name,) for name in here if name not in state.inside]
        start = {
            name: state.shared if name in inside else state.own.get(name, state.members.initial)
            for name in here
        }
        groups = tuple(sorted(([inside] if inside else []) + alone))
        members = replace(state.members, models={**state.members.models, **start}, groups=groups)
        orders = [Order(silo, start[silo.name]) for silo in silos]
        if round <= self.own_rounds:
            orders += [
                Order(silo, state.own[silo.name], purpose=OWN_MODEL)
                for silo in silos
                if silo.name in inside
            ]
        return replace(state, members=members), orders

    def absorb(self, state: MAXFLState, updates: Sequence[Update], *, round: int) -> MAXFLState:
        """The mean of those inside is the global model; the others' models are their own."""
        trained = [u for u in updates if not u.purpose]
        members = average_groups(state.members, trained)
        # In round 1 the first training is everybody's.
        shared = counted([u for u in trained if not state.own or u.silo.name in state.inside])
        own = {u.silo.name: u.model for u in trained if u.silo.name not in state.inside}
        own |= {u.silo.name: u.model for u in updates if u.purpose == OWN_MODEL}
        state = replace(state, members=members, own={**state.own, **own})
        if not shared:
            return state
        mean = weighted_mean([u.model for u in shared], [u.num_examples for u in shared])
        return replace(state, shared=mean)

    def models(self, state: MAXFLState) -> Mapping[str, Model]:
        """Silo → the global model if it took part, else its own."""
        return state.members.models

    def groups(self, state: MAXFLState) -> Sequence[Group]:
        """Those who took part together; every other silo alone."""
        return state.members.groups

    def sizes(self, state: MAXFLState) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.members.sizes

    def details(self, state: MAXFLState) -> Mapping[str, Any]:
        """Who takes part, and the losses by which it was decided."""
        return {
            "inside": sorted(n for g in state.members.groups for n in g if n in state.inside),
            "losses": {name: [round(x, 6) for x in row] for name, row in state.losses.items()},
        }


def _losses(
    state: MAXFLState, silos: Sequence[Silo]
) -> Generator[Sequence[Order], list[Update], dict[str, tuple[float, float]]]:
    """Silo → its loss of the global and of its own model, of those who answered both."""
    answers = yield [
        probe(silo, model, purpose)
        for silo in silos
        for purpose, model in ((GLOBAL, state.shared), (OWN, state.own[silo.name]))
    ]
    stated = {(u.silo.name, u.purpose): loss_of(u) for u in answers}
    pairs = {
        silo.name: (stated.get((silo.name, GLOBAL), np.nan), stated.get((silo.name, OWN), np.nan))
        for silo in silos
    }
    return {name: pair for name, pair in pairs.items() if not np.isnan(pair).any()}
