"""MAXFL: a silo takes part in the global model only while that serves it better than its own.

Cho, Jhunjhunwala, Li, Smith, Joshi: "Maximizing Global Model Appeal in Federated Learning", TMLR
2024, https://arxiv.org/abs/2205.14840; as Sun, Kountouris, Zhang compare it (HCCT, section 7.1): a
silo takes part if the global model's training loss is below its own requirement, and otherwise
trains alone.

In round 1 all silos train from w⁰; the results are their own models, and the mean of all is the
first global one. A silo's requirement is its own model's loss on its training data; that model is
trained for ``own_rounds`` in addition to the global one, by default for as long. During the warm-up
all silos train the global model, which is of little use at first. From then on each silo states its
loss of both before every round: it takes part if

    loss(global) ≤ loss(own) − threshold,

and otherwise continues with its own model; it is asked again in the next round. A threshold that no
silo meets leaves all alone, and the global model unchanged.

The paper's requirement is the loss of a model that the silo trained alone before it contributed,
fixed from then on. HCCT's authors (their released code, ``maxfl`` in ``utils/keyfunc.py``) train
that model for all epochs of the run, and then ask whether the global model's training loss is below
the *squared distance* of that model to the global one, statistics and counters included: the
farther apart, the easier a silo takes part. That rule is not offered here.

Differs from the paper in:

- *Yes or no.* The paper weighs updates by σ'(F_i(w) − ρ_i), near 0 for silos far from their
  requirement; here, as in HCCT's comparison, silos take part or do not, and count by their samples.
- The requirement follows the silo's own model while that is trained.
- *Newcomers* train their own model from w⁰ first, and are asked from the next round on. A silo that
  does not answer keeps its last decision.

Cost per round and silo: two more models and two passes over the training data after the warm-up;
one more training in rounds 2 to ``own_rounds`` (by default the warm-up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field

from coterie.strategies.plain.probes import loss_of, probe
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Exchanges,
    Order,
    Round,
    Updates,
    orders_from,
)
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.minimum_sizes import average, average_groups
from coterie.strategies.rounds.options import CountOrNone
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

GLOBAL, OWN = "loss-of-global", "loss-of-own"
OWN_MODEL = "own-model"
"""Purpose of a silo's additional training of its own model."""


@dataclass(frozen=True)
class MAXFLState:
    """MAXFL's state between rounds.

    Attributes:
        members: each silo's current model (the global or its own), sizes, groups.
        shared: the global model.
        own: silo → its own model, once trained.
        inside: silos that take part.
        losses: silo → its loss of the global and of its own model, of this round.
    """

    members: Members
    shared: Model
    own: Mapping[str, Model] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    losses: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class MAXFL(Algorithm[MAXFLState]):
    """A global model for the silos that gain by it; the others train alone."""

    threshold: float = Field(
        0.0,
        ge=-1e6,
        le=1e6,
        description="How far the global model's training loss must be below that of the silo's "
        "own model. Negative: it may be higher by that much.",
    )
    warm_up: CountOrNone = Field(
        5, description="Number of rounds after round 1 in which all silos take part."
    )
    own_rounds: CountOrNone = Field(
        0,
        description="Rounds of local training behind a silo's requirement. With few rounds, every "
        "model meets it; with many, none does. 0: as many as the global model has had when silos "
        "are first asked.",
    )

    outdated = "its own model"

    def first(self, initial: Arrays) -> MAXFLState:
        return MAXFLState(Members(initial), initial)

    def prepare(self, state: MAXFLState, now: Round) -> Exchanges[MAXFLState]:
        """Decide which silos take part in this round."""
        settled = [silo for silo in now.silos if silo.name in state.own]
        if now.number <= 1 + self.warm_up:
            return replace(state, inside=frozenset(s.name for s in settled), losses={})
        losses = yield from _losses(state, settled)
        inside = {name for name in state.inside if name not in losses}
        inside |= {name for name, (both, own) in losses.items() if both <= own - self.threshold}
        return replace(state, inside=frozenset(inside), losses=losses)

    def orders(self, state: MAXFLState, now: Round) -> tuple[MAXFLState, list[Order]]:
        """Order each silo's training of the global model or its own."""
        inside = tuple(name for name in now.names if name in state.inside)
        alone: list[Group] = [(name,) for name in now.names if name not in state.inside]
        start = {
            name: state.shared if name in inside else state.own.get(name, state.members.initial)
            for name in now.names
        }
        groups = sorted(([inside] if inside else []) + alone)
        orders = orders_from(start, now.silos)
        if now.number <= (self.own_rounds or 1 + self.warm_up):
            orders += [Order(now.here[name], state.own[name], purpose=OWN_MODEL) for name in inside]
        return replace(state, members=state.members.holding(start).grouped(groups)), orders

    def absorb(self, state: MAXFLState, updates: Updates, now: Round) -> MAXFLState:
        """Average the participants to the global model; store the other silos' own models."""
        trained = [u for u in updates if not u.purpose]
        members = average_groups(state.members, trained)
        # In round 1 the first training is everybody's.
        mean = average([u for u in trained if not state.own or u.silo.name in state.inside])
        own = {u.silo.name: u.model for u in trained if u.silo.name not in state.inside}
        own |= {u.silo.name: u.model for u in updates if u.purpose == OWN_MODEL}
        shared = state.shared if mean is None else mean
        return replace(state, members=members, own={**state.own, **own}, shared=shared)

    def details(self, state: MAXFLState) -> Mapping[str, Any]:
        return {
            "inside": sorted(n for n in state.members.here if n in state.inside),
            "losses": {name: [round(x, 6) for x in row] for name, row in state.losses.items()},
        }


def _losses(state: MAXFLState, silos: Sequence[Silo]) -> Exchanges[dict[str, tuple[float, float]]]:
    """Ask for silo → its loss of the global and of its own model, if it answered both."""
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
