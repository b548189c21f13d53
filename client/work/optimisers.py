"""Optimisers and learning-rate schedules of local training: torch's, by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.sgd import sgd

from coterie.tasks.base import Task, TaskError

if TYPE_CHECKING:
    from coterie.client.work.sgd import TrainPlan

Slots = dict[str, torch.Tensor]
"""An optimiser's state: ``<parameter>/<entry>`` → tensor."""

AUTO = "auto"
"""An exact step for a linear model on a table (``linear``); otherwise SGD."""
PLAIN = (AUTO, "sgd")
"""Optimisers that take gradient steps as SGD, if they take any."""

DROPS = ((0.5, 0.1), (0.75, 0.1))
"""``step``: (share of the run, further factor on the learning rate from then on)."""


@dataclass(frozen=True)
class Schedule:
    """A learning rate over the whole run.

    ``kind`` is ``constant``, ``cosine`` or ``step``. In the share ``warm_up`` of the run the
    rate rises linearly from 0. ``begin`` and ``share`` are shares of the run before this
    training and in it; ``own`` is the task's further factor (``Task.lr_factor``).
    """

    kind: str
    warm_up: float
    begin: float
    share: float
    own: Callable[[float], float] | None = None

    def factor(self, done: float) -> float:
        """Return the factor on the learning rate after this share of this training.

        Raises ``TaskError`` if the task's factor is not a finite number of at least 0.
        """
        at = self.begin + self.share * done
        factor = self._factor(at)
        if self.own is None:
            return factor
        further = self.own(at)
        if not isinstance(further, int | float) or not 0 <= further < math.inf:
            raise TaskError(
                f"lr_factor of the task must give a finite number of at least 0. Got {further!r} "
                f"after {at:g} of the run."
            )
        return factor * further

    def _factor(self, at: float) -> float:
        if at < self.warm_up:
            return at / self.warm_up
        if self.kind == "cosine":
            after = (at - self.warm_up) / (1 - self.warm_up)
            return 0.5 * (1 + math.cos(math.pi * after))
        if self.kind == "step":
            return math.prod(factor for since, factor in DROPS if at >= since)
        return 1.0


class Optimiser(ABC):
    """An optimiser for one training: it turns gradients into steps."""

    scaler: torch.amp.GradScaler | None = None
    inner: torch.optim.Optimizer

    def __init__(self, plan: TrainPlan) -> None:
        self.plan = plan

    @abstractmethod
    def step(self, lr: float) -> None:
        """Move the parameters along their gradients."""

    @abstractmethod
    def remember(self, slots: Slots) -> None:
        """Save in ``slots`` the state that the next training starts from."""

    def backward(self, objective: torch.Tensor) -> None:
        """Add a mini-batch's gradient; several before a step are averaged."""
        if self.plan.accumulate > 1:
            objective = objective / self.plan.accumulate
        if self.scaler is not None:
            objective = self.scaler.scale(objective)
        objective.backward()

    def finish_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Unscale and clip the gradients, after the last mini-batch of a step."""
        if self.scaler is not None:
            self.scaler.unscale_(self.inner)
        if self.plan.clip_norm:
            nn.utils.clip_grad_norm_(parameters, self.plan.clip_norm)


class _PlainSGD(Optimiser):
    """torch's own functional SGD. ``torch.optim.SGD`` computes the same, but making one imports
    the compiler stack: 1.3 s and 100 MB in every silo process that never compiles anything."""

    def __init__(self, plan: TrainPlan, named: Mapping[str, nn.Parameter], slots: Slots) -> None:
        super().__init__(plan)
        self.names = list(named)
        self.parameters = list(named.values())
        self.buffers = [slots.get(f"{name}/momentum_buffer") for name in self.names]

    def step(self, lr: float) -> None:
        used = [(p, i) for i, p in enumerate(self.parameters) if p.grad is not None]
        momenta = [self.buffers[i] for _, i in used]
        with torch.no_grad():
            sgd(
                [p for p, _ in used],
                [cast(torch.Tensor, p.grad) for p, _ in used],
                momenta,
                weight_decay=self.plan.weight_decay,
                momentum=self.plan.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        for (_, i), momentum in zip(used, momenta, strict=True):
            self.buffers[i] = momentum

    def remember(self, slots: Slots) -> None:
        for name, buffer in zip(self.names, self.buffers, strict=True):
            if buffer is not None:
                slots[f"{name}/momentum_buffer"] = buffer


class _FromTorch(Optimiser):
    def __init__(
        self,
        plan: TrainPlan,
        inner: torch.optim.Optimizer,
        named: Mapping[str, nn.Parameter],
        slots: Slots,
    ) -> None:
        super().__init__(plan)
        self.inner = inner
        self.names = {id(parameter): name for name, parameter in named.items()}
        self.parameters = list(named.values())
        # Groups of a task's own may have rates of their own: a schedule keeps their proportions.
        self.proportions = [group["lr"] / plan.lr for group in inner.param_groups]
        # Loss scaling keeps float16 gradients from vanishing (Micikevicius et al., ICLR 2018).
        if plan.precision == "float16":
            self.scaler = torch.amp.GradScaler(self.parameters[0].device.type)
        for name, parameter in named.items():
            own = {k.split("/")[1]: v for k, v in slots.items() if k.split("/")[0] == name}
            if own:
                inner.state[parameter] = own

    def step(self, lr: float) -> None:
        for group, proportion in zip(self.inner.param_groups, self.proportions, strict=True):
            group["lr"] = lr * proportion
        if self.scaler is None:
            self.inner.step()
        else:
            self.scaler.step(self.inner)
            self.scaler.update()

    def remember(self, slots: Slots) -> None:
        for parameter, state in self.inner.state.items():
            for what, value in state.items():
                if isinstance(value, torch.Tensor):
                    slots[f"{self.names[id(parameter)]}/{what}"] = value


def optimiser_of(
    plan: TrainPlan, task: Task, model: nn.Module, named: Mapping[str, nn.Parameter], slots: Slots
) -> Optimiser:
    """Return the optimiser of a training; the task's own takes precedence over the plan's.

    ``named`` are the trained parameters; ``slots`` is state from an earlier training, or empty.
    Raises ``TaskError`` as ``class_of``.
    """
    own = task.optimiser(model, plan.lr)
    if own is not None:
        return _FromTorch(plan, own, named, slots)
    if plan.optimiser in PLAIN and plan.precision != "float16":
        return _PlainSGD(plan, named, slots)
    how: dict[str, Any] = {"lr": plan.lr, "weight_decay": plan.weight_decay}
    name = "sgd" if plan.optimiser == AUTO else plan.optimiser
    if name in ("sgd", "rmsprop"):
        how["momentum"] = plan.momentum
    return _FromTorch(plan, class_of(name)(list(named.values()), **how), named, slots)


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return torch's optimiser of this name, in upper or lower case.

    Raises ``TaskError`` if there is none, or if its step needs the loss repeatedly (LBFGS).
    """
    found = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    usable = sorted(set(found) - {"optimizer", "lbfgs", "sparseadam"})
    if name.lower() not in usable:
        raise TaskError(f"optimiser must be one of {', '.join(usable)}. Got {name!r}.")
    return found[name.lower()]
