"""APFL at the silo: its own model v, trained on its mixture with the model received.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020,
https://arxiv.org/abs/2003.13461; Algorithm 1 and eq. 10. For every mini-batch ξ of the group
model's training, with ``v̄ = α v + (1 − α) w`` and w as it is at that step:

    v ← v − η ∇_v f(v̄; ξ),  ∇_v f = α ∇f(v̄)
    α ← α − η_α ∇_α f(v̄; ξ),  ∇_α f = ⟨v − w, ∇f(v̄)⟩,  then into [0, 1]

Running statistics (BatchNorm) are those of v̄.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call

from coterie.client.work.data import Part
from coterie.client.work.optimisers import optimiser_of
from coterie.client.work.sgd import TrainPlan, autocast, loss_for
from coterie.client.work.weights import load_weights, read_weights, set_training, travelling
from coterie.tasks.base import Nest, Task
from coterie.wire import Model

SHARE: Final = "/mixture"
"""Name of α among the arrays that a silo keeps; no array of a model has it."""


class Mixture:
    """v and α in a training of w; see the module and ``coterie.client.work.sgd.Beside``.

    Args:
        shared: w, which ``train`` moves.
        kept: v and α after an earlier round, from ``arrays``; None: v starts as w.
        share: α if nothing was kept, in [0, 1].
        lr: of α, ≥ 0.
    """

    def __init__(
        self,
        task: Task,
        shared: nn.Module,
        part: Part,
        plan: TrainPlan,
        *,
        kept: Model | None,
        share: float,
        lr: float,
    ) -> None:
        self.plan, self.device, self.lr = plan, part.device, lr
        self.shared = dict(shared.named_parameters())
        self.own = deepcopy(shared)
        if kept is not None:
            load_weights(self.own, {name: kept[name] for name in travelling(shared)})
            share = float(kept[SHARE])
        set_training(self.own)
        self.trained = {n: p for n, p in self.own.named_parameters() if p.requires_grad}
        self.share = torch.tensor(share, device=self.device, requires_grad=True)
        self.optimiser = optimiser_of(plan, task, self.own, self.trained, {})
        self.loss_of = loss_for(task, part, plan)
        self._forget_gradients()

    def backward(self, x: Nest, y: Nest) -> None:
        """Add the gradients of v and α."""
        mixed = {
            name: self.share * own + (1 - self.share) * self.shared[name].detach()
            for name, own in self.trained.items()
        }
        cards = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(cards):  # dropout here must not change w's
            with autocast(self.plan.precision, self.device):
                loss = self.loss_of(functional_call(self.own, mixed, (x,)), y)
            self.optimiser.backward(loss)

    def step(self, lr: float) -> None:
        """Update v and α."""
        self.optimiser.finish_gradients(list(self.trained.values()))
        self.optimiser.step(lr)
        with torch.no_grad():
            if self.share.grad is not None:
                self.share.sub_(self.share.grad, alpha=self.lr).clamp_(0, 1)
        self._forget_gradients()

    def arrays(self) -> Model:
        """Return what the silo keeps: v, the running statistics of v̄, and α under ``SHARE``."""
        return {**read_weights(self.own), SHARE: np.array(self.share.item(), np.float32)}

    def _forget_gradients(self) -> None:
        for parameter in (*self.trained.values(), self.share):
            parameter.grad = None


def mix_in(model: nn.Module, kept: Model) -> None:
    """Turn w, in ``model``, into v̄ = α v + (1 − α) w in place; ``kept`` is from ``arrays``.

    The running statistics are the kept ones.
    """
    share = float(kept[SHARE])
    parameters = dict(model.named_parameters())
    mixed = {
        name: _between(array, kept[name], share) if name in parameters else kept[name]
        for name, array in read_weights(model).items()
    }
    load_weights(model, mixed)


def _between(shared: NDArray[Any], own: NDArray[Any], share: float) -> NDArray[Any]:
    wide = share * own.astype(np.float64) + (1 - share) * shared.astype(np.float64)
    return np.asarray(wide.astype(shared.dtype))
