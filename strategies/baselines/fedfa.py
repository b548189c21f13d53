"""FedFA: updates weighted by how badly the model does, −log₂ of the training accuracy.

Huang, Li, Wang, Du, Zhang: "Fairness and Accuracy in Federated Learning", 2020,
https://arxiv.org/abs/2012.10069; as Sun, Kountouris, Zhang compare it (HCCT, section 7.1):
``Δ = Σ_i (−log₂ A_i / Σ_j −log₂ A_j) Δ_i`` with plain SGD at the silos.

Differs from the paper in:

- Only the accuracies weigh, not how often a silo took part (here all do), and there is no
  momentum, as in HCCT's comparison.
- A_i is the accuracy of the round's global model, before the training. After it most small silos
  reach 1, and −log₂ 1 = 0 says nothing.
- An accuracy of 0 counts as half a sample's. Where all accuracies are 1 all silos weigh the same.

One forward pass over the training data and one model more a round and silo.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.strategies.baselines.probes import ask
from coterie.strategies.rounds.grouping import (
    Members,
    enrol,
    global_model,
    hand_out,
    orders_from,
    together,
)
from coterie.strategies.rounds.loop import Group, GroupStrategy, Order, Update, error_of
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


@dataclass(frozen=True)
class FedFAState:
    """Models and sizes, and silo → (accuracy, samples it is of) of the global model."""

    members: Members
    accuracy: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class FedFA(GroupStrategy[FedFAState]):
    """One global model; silos that it fits badly weigh more. See ``GroupStrategy``."""

    def first(self, initial: Model) -> FedFAState:
        """Nobody yet."""
        return FedFAState(Members(initial))

    def admit(self, state: FedFAState, silos: Sequence[Silo], *, round: int) -> FedFAState:
        """A newcomer starts from the global model."""
        return replace(state, members=enrol(state.members, silos, global_model(state.members)))

    def prepare(
        self, state: FedFAState, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], FedFAState]:
        """Ask everybody for the global model's accuracy on its training data."""
        answers = yield from ask(silos, [global_model(state.members)])
        stated = {
            name: (1.0 - error_of(by_model[0].metrics), by_model[0].num_examples)
            for name, by_model in answers.items()
        }
        heard = {name: pair for name, pair in stated.items() if 0 <= pair[0] <= 1}
        return replace(state, accuracy={**state.accuracy, **heard})

    def orders(
        self, state: FedFAState, silos: Sequence[Silo], *, round: int
    ) -> tuple[FedFAState, list[Order]]:
        """Train the global model."""
        state = replace(state, members=together(state.members, silos))
        return state, orders_from(state.members.models, silos)

    def absorb(self, state: FedFAState, updates: Sequence[Update], *, round: int) -> FedFAState:
        """The weighted mean goes to everybody who is here."""
        if not updates:
            return state
        weights = information([state.accuracy.get(u.silo.name) for u in updates])
        model = weighted_mean([u.model for u in updates], weights)
        return replace(state, members=hand_out(state.members, model, updates))

    def models(self, state: FedFAState) -> Mapping[str, Model]:
        """Silo → the global model (who left, the last that it had)."""
        return state.members.models

    def groups(self, state: FedFAState) -> Sequence[Group]:
        """One."""
        return state.members.groups

    def sizes(self, state: FedFAState) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.members.sizes

    def details(self, state: FedFAState) -> Mapping[str, Any]:
        """Every silo's training accuracy of the model before the round."""
        here = sorted(name for group in state.members.groups for name in group)
        known = {n: round(state.accuracy[n][0], 6) for n in here if n in state.accuracy}
        return {"training-accuracy": known}


def information(accuracies: Sequence[tuple[float, float] | None]) -> list[float]:
    """Weights −log₂ A_i; a silo that stated nothing has the mean of the others'.

    Args:
        accuracies: (A_i in [0, 1], number of samples > 0), or None.

    Returns:
        One weight ≥ 0 each, not all 0.
    """
    known = [-np.log2(max(a, 0.5 / n)) for a, n in filter(None, accuracies)]
    mean = float(np.mean(known)) if known else 1.0
    if mean == 0:
        return [1.0] * len(accuracies)
    rest = iter(known)
    return [mean if pair is None else float(next(rest)) for pair in accuracies]
