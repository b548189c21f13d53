"""pFedMe: personal models held near a common one by a Moreau envelope.

Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
https://arxiv.org/abs/2006.08848; Algorithm 1. For every batch a silo takes K steps towards
``θ̃ = argmin f(θ; B) + λ/2 |θ − w|²`` and then moves ``w ← w − η λ (w − θ̃)``; the server moves
``w ← (1 − β) w + β · mean(w_i)``.

K is ``inner_steps``, their rate the run's learning rate, λ ``moreau_lambda``, η ``moreau_lr``, β
``server_lr``. Before a model is tested, and before a silo keeps its final one, the silo takes
``adapt_steps`` such steps from w on all its training data: that is its personal model, and never
leaves it. ``models`` are what the server knows: the common model.

Differs from the paper in size-weighted means, and in β ≤ 1 (the paper tries up to 4).

Needs silos that understand ``train.pfedme``; those of coterie do. K gradients a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from coterie import wire
from coterie.strategies.baselines.perfedavg import require_understood
from coterie.strategies.errors import require
from coterie.strategies.rounds.grouping import (
    Members,
    enrol,
    global_model,
    hand_out,
    orders_from,
    together,
)
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


class PFedMe(GroupStrategy[Members]):
    """A common model that pulls at personal ones.

    Args:
        moreau_lambda: λ > 0: large keeps personal models near the common one.
        moreau_lr: η > 0, with η·λ ≤ 1.
        inner_steps: K ≥ 1.
        server_lr: β in (0, 1].
        adapt_steps: steps towards the personal model before a test, at least 1.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        moreau_lambda: float = 15.0,
        moreau_lr: float = 0.005,
        inner_steps: int = 5,
        server_lr: float = 1.0,
        adapt_steps: int = 20,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        require(
            0 < moreau_lambda < float("inf"),
            f"moreau_lambda must be finite and above 0. Got {moreau_lambda}.",
        )
        require(
            0 < moreau_lr * moreau_lambda <= 1,
            f"moreau_lr must be above 0, and moreau_lr · moreau_lambda at most 1. Got {moreau_lr} "
            f"and {moreau_lambda}.",
        )
        require(inner_steps >= 1, f"inner_steps must be at least 1. Got {inner_steps}.")
        require(0 < server_lr <= 1, f"server_lr must be in (0, 1]. Got {server_lr}.")
        require(adapt_steps >= 1, f"adapt_steps must be at least 1. Got {adapt_steps}.")
        lr = float(self.train_config.get(wire.LR, 0.01))
        require(
            lr * moreau_lambda < 2,
            f"lr · moreau_lambda must be below 2, or the steps towards a personal model diverge. "
            f"Got {lr} and {moreau_lambda}.",
        )
        self.server_lr = float(server_lr)
        self.train_config |= {
            wire.MOREAU_LAMBDA: float(moreau_lambda),
            wire.MOREAU_LR: float(moreau_lr),
            wire.INNER_STEPS: int(inner_steps),
            wire.ADAPT_STEPS: int(adapt_steps),
            wire.ADAPT_LR: lr,
            wire.ADAPT_MU: float(moreau_lambda),
        }

    def first(self, initial: Model) -> Members:
        """Nobody yet."""
        return Members(initial)

    def admit(self, state: Members, silos: Sequence[Silo], *, round: int) -> Members:
        """A newcomer starts from the common model."""
        return enrol(state, silos, global_model(state))

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Move the common model along your Moreau envelope."""
        state = together(state, silos)
        kind = wire.TRAIN_PFEDME
        return state, [replace(order, kind=kind) for order in orders_from(state.models, silos)]

    def absorb(self, state: Members, updates: Sequence[Update], *, round: int) -> Members:
        """``(1 − β) w + β · mean``."""
        require_understood(updates, wire.TRAIN_PFEDME, round)
        if not updates:
            return state
        mean = weighted_mean([u.model for u in updates], [u.num_examples for u in updates])
        if self.server_lr < 1:
            beta = self.server_lr
            mean = weighted_mean([updates[0].start, mean], [1 - beta, beta])
        return hand_out(state, mean, updates)

    def models(self, state: Members) -> Mapping[str, Model]:
        """Silo → the common model; its personal one is its own affair."""
        return state.models

    def groups(self, state: Members) -> Sequence[Group]:
        """One."""
        return state.groups

    def sizes(self, state: Members) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.sizes
