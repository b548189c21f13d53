"""Per-FedAvg: one model from which every silo is well off after a step on its own data.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, https://arxiv.org/abs/2002.07948; Algorithm 1,
first order (FO): a silo's step from w is ``w ← w − β ∇f(w − α ∇f(w; B); B′)``, with B and B′ two
batches. The server averages.

α is ``meta_lr``, β the run's learning rate. Before a model is tested, and before a silo keeps its
final one, the silo takes ``adapt_steps`` steps of rate α along the gradient of all its training
data; that personal model never leaves it. ``models`` are what the server knows: the common model.

Differs from the paper in size-weighted means (the paper's silos count equally), as FedAvg's.

Needs silos that understand ``train.per_fedavg``; those of coterie do. Two gradients a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from coterie import wire
from coterie.strategies.errors import FederationError, require
from coterie.strategies.rounds.grouping import (
    Members,
    average_groups,
    enrol,
    global_model,
    orders_from,
    together,
)
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


class PerFedAvg(GroupStrategy[Members]):
    """A common start for one step of one's own.

    Args:
        meta_lr: α > 0.
        adapt_steps: steps before a test, at least 1.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self, *, meta_lr: float = 0.03, adapt_steps: int = 1, **options: Unpack[LoopOptions]
    ) -> None:
        super().__init__(**options)
        require(0 < meta_lr < float("inf"), f"meta_lr must be finite and above 0. Got {meta_lr}.")
        require(adapt_steps >= 1, f"adapt_steps must be at least 1. Got {adapt_steps}.")
        self.train_config |= {
            wire.META_LR: float(meta_lr),
            wire.ADAPT_STEPS: int(adapt_steps),
            wire.ADAPT_LR: float(meta_lr),
        }

    def first(self, initial: Model) -> Members:
        """Nobody yet."""
        return Members(initial)

    def admit(self, state: Members, silos: Sequence[Silo], *, round: int) -> Members:
        """A newcomer starts from the common model, which is made for newcomers."""
        return enrol(state, silos, global_model(state))

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Meta-train the common model."""
        state = together(state, silos)
        kind = wire.TRAIN_PER_FEDAVG
        return state, [replace(order, kind=kind) for order in orders_from(state.models, silos)]

    def absorb(self, state: Members, updates: Sequence[Update], *, round: int) -> Members:
        """The mean goes to everybody who is here."""
        require_understood(updates, wire.TRAIN_PER_FEDAVG, round)
        return average_groups(state, updates)

    def models(self, state: Members) -> Mapping[str, Model]:
        """Silo → the common model; its personal one is its own affair."""
        return state.models

    def groups(self, state: Members) -> Sequence[Group]:
        """One."""
        return state.groups

    def sizes(self, state: Members) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.sizes


def require_understood(updates: Sequence[Update], kind: str, round: int) -> None:
    """End a run in whose first round no silo understood what it was asked.

    Raises:
        FederationError: in round 1, without any update.
    """
    if round == 1 and not updates:
        raise FederationError(
            f"no silo answered {kind!r} in round 1; the log says why. This strategy needs silos "
            "that understand it, like those of `coterie silo`; other ClientApps need a function "
            f"for {kind!r}.",
            round=round,
            phase=kind,
        )
