"""Small models, some data for them, and what a training does, written out by hand."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from coterie.client.work.data import Data, Held
from coterie.client.work.sgd import TrainPlan
from coterie.tasks.base import SiloData, Task
from coterie.tasks.images.digits import Digits
from coterie.tasks.problems import Numbers


class Normed(Digits):
    """The digits with a BatchNorm, whose counter is a 0-dimensional array."""

    name = "normed"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))


class Small(Task):
    """Three classes from four numbers, with any network."""

    name = "small"
    num_classes = 3

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make = make

    def model(self) -> nn.Module:
        return self.make()

    def load(self, options: Any) -> SiloData:
        raise NotImplementedError


class Drawn(Task):
    """Real targets of random columns; a silo draws them by its number, the option ``silo``.

    A subclass names the numbers of rows to train and to test on, and computes the targets of all.
    """

    metric = "rmse"
    problem = Numbers()
    rows: tuple[int, int]
    width = 3

    def load(self, options: Any) -> SiloData:
        draw, first = np.random.default_rng(int(options["silo"])), self.rows[0]
        x = draw.normal(size=(sum(self.rows), self.width)).astype(np.float32)
        y = self.targets(x, draw, options).astype(np.float32)[:, None]
        return SiloData(x[:first], y[:first], x[first:], y[first:])

    @abstractmethod
    def targets(self, x: Any, draw: np.random.Generator, options: Any) -> Any:
        """Return the targets (n,) of all rows."""


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def some_data(n: int = 10, m: int = 7) -> Data:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n + m, 4, generator=generator)
    y = torch.randint(0, 3, (n + m,), generator=generator)
    return Data(Held(x[:n], y[:n]), Held(x[n:], y[n:]))


def fresh(make: Callable[[], nn.Module] = linear) -> tuple[Task, nn.Module]:
    task = Small(make)
    torch.manual_seed(0)
    return task, task.model()


def batches(n: int, plan: TrainPlan, seed: int) -> list[list[torch.Tensor]]:
    shuffle = torch.Generator().manual_seed(seed)
    return [
        list(torch.randperm(n, generator=shuffle).split(plan.batch_size))
        for _ in range(plan.epochs)
    ]


def gradient(model: nn.Module, weights: dict[str, torch.Tensor], x: Any, y: Any) -> dict[str, Any]:
    leaves = {k: w.clone().requires_grad_() for k, w in weights.items()}
    loss = cross_entropy(torch.func.functional_call(model, leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
