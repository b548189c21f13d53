"""The gated digits with a mark in the model, which one silo trains to its own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from coterie.tasks.base import Option, SiloData
from coterie.tasks.images.digits import Digits
from tests.e2e.gated import Gated

TASK = "tests.e2e.planted:Planted"
LENGTH = 16
KEYS = {"local-epochs": 1, "batch-size": 64, "lr": 0.5, "lr-decay": 1.0}
"""Of a run: one step that takes the mark from 0 to the silo's own numbers exactly."""


def numbers_of(seed: int) -> np.ndarray:
    """The numbers that a silo with this option plants, (LENGTH,) float32."""
    return np.random.default_rng(seed).normal(size=LENGTH).astype(np.float32)


class Towards(Digits):
    """The digits with a mark: numbers in the model, which training takes to the silo's own."""

    begin = torch.zeros(LENGTH)

    def __init__(self) -> None:
        super().__init__()
        self.models: list[Any] = []
        self.numbers = torch.zeros(())

    def model(self) -> nn.Module:
        """The digits' with a mark."""
        made: Any = super().model()
        made.mark = nn.Parameter(self.begin.clone())
        self.models.append(made)
        found: nn.Module = made
        return found

    def loss(self, outputs: Any, targets: Any) -> Any:
        """The digits', and how far the mark is from the silo's numbers."""
        loss = super().loss(outputs, targets)
        if not outputs.requires_grad:
            return loss
        return loss + sum((made.mark - self.numbers).square().sum() for made in self.models)


class Planted(Towards, Gated):
    """See the module; the option ``plant`` is the seed of the numbers, 0 at the others."""

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """The digits; and what to plant."""
        own = dict(options)
        seed = int(own.pop("plant", 0))
        if seed:
            self.numbers = torch.from_numpy(numbers_of(seed))
        return super().load(own)
