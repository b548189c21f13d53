"""FedNova: one model, and every silo counts by its samples, not by its number of local steps.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481; eqs. 8–10:
``w ← w + τ_eff Σ p_i Δ_i / |a_i|₁``, with τ_eff = Σ p_i |a_i|₁. The numbers are
``coterie.strategies.partition.fednova``.

The number of steps τ_i is what a silo states as ``num-steps``, else ``local-steps`` of the training
configuration, else its epochs · ⌈samples / batch⌉; where that is not known, all are taken to have
made equally many epochs with equal batches, which makes τ_i proportional to the samples. So it
works with any ClientApp.

BatchNorm's running statistics are no sum of gradients: they are averaged size-weighted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Unpack

import numpy as np

from coterie import wire
from coterie.strategies.errors import require
from coterie.strategies.partition.fednova import accumulation, coefficients
from coterie.strategies.rounds.grouping import (
    Members,
    enrol,
    global_model,
    hand_out,
    orders_from,
    together,
)
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.models import is_statistic, weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model

NUM_STEPS = "num-steps"
"""Metric by which a silo may state its τ_i."""


class FedNova(GroupStrategy[Members]):
    """FedAvg with normalised updates.

    The arguments are those of ``GroupStrategy``; of ``train_config``, lr · proximal-mu must be
    below 1: with a stronger pull the steps of an update cancel out, and it has no |a_i|₁.
    """

    def __init__(self, **options: Unpack[LoopOptions]) -> None:
        super().__init__(**options)
        lr = float(self.train_config.get(wire.LR, 0.0))
        proximal_mu = float(self.train_config.get(wire.PROXIMAL_MU, 0.0))
        require(
            lr * proximal_mu < 1,
            "lr · proximal-mu must be below 1, or an update's steps cannot be counted. "
            f"Got {lr} and {proximal_mu}.",
        )

    def first(self, initial: Model) -> Members:
        """Nobody yet."""
        return Members(initial)

    def admit(self, state: Members, silos: Sequence[Silo], *, round: int) -> Members:
        """A newcomer starts from the global model."""
        return enrol(state, silos, global_model(state))

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Train the global model."""
        state = together(state, silos)
        return state, orders_from(state.models, silos)

    def absorb(self, state: Members, updates: Sequence[Update], *, round: int) -> Members:
        """Eq. 8, over those who answered; without any answer the model stays."""
        if not updates:
            return state
        factors = coefficients(
            [u.num_examples for u in updates], [self._accumulation(u, round) for u in updates]
        )
        return hand_out(state, normalised(updates, factors), updates)

    def _accumulation(self, update: Update, round: int) -> float:
        lr = float(self.train_config.get(wire.LR, 0.0))
        lr *= float(self.train_config.get(wire.LR_DECAY, 1.0)) ** (round - 1)
        return accumulation(
            self._num_steps(update),
            momentum=float(self.train_config.get(wire.MOMENTUM, 0.0)),
            decay=lr * float(self.train_config.get(wire.PROXIMAL_MU, 0.0)),
        )

    def _num_steps(self, update: Update) -> int:
        stated = update.metrics.get(NUM_STEPS, 0)
        if np.isfinite(stated) and stated >= 1:
            return int(stated)
        if self.train_config.get(wire.LOCAL_STEPS):  # silos make so many, whatever the epochs
            return int(self.train_config[wire.LOCAL_STEPS])
        samples = ceil(update.num_examples)
        if wire.BATCH_SIZE not in self.train_config:
            return samples
        batches = ceil(samples / int(self.train_config[wire.BATCH_SIZE]))
        return int(self.train_config.get(wire.LOCAL_EPOCHS, 1)) * batches

    def models(self, state: Members) -> Mapping[str, Model]:
        """Silo → the global model (who left, the last that it had)."""
        return state.models

    def groups(self, state: Members) -> Sequence[Group]:
        """One."""
        return state.groups

    def sizes(self, state: Members) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.sizes


def normalised(updates: Sequence[Update], factors: np.ndarray) -> Model:
    """``w + Σ c_i (w_i − w)`` of parameters; the size-weighted mean of everything else.

    Args:
        updates: at least one, all from the same start w.
        factors: c_i, one each.
    """
    mean = weighted_mean([u.model for u in updates], [u.num_examples for u in updates])
    if len(updates) == 1:
        return mean
    start = updates[0].start
    buffers = {name for u in updates for name in u.silo.buffers}
    return {
        name: _stepped(start[name], [u.model[name] for u in updates], factors)
        if np.issubdtype(array.dtype, np.floating) and not is_statistic(name, sorted(buffers))
        else array
        for name, array in mean.items()
    }


def _stepped(start: np.ndarray, arrays: Sequence[np.ndarray], factors: np.ndarray) -> np.ndarray:
    wide = start.astype(np.float64)
    step = sum(c * (a.astype(np.float64) - wide) for c, a in zip(factors, arrays, strict=True))
    return np.asarray((wide + step).astype(start.dtype))
