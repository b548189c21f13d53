"""Steps of server optimisers: FedAvgM, FedAdam and FedYogi, as Flower computes them.

- FedAvgM: Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated
  Visual Classification", 2019, https://arxiv.org/abs/1909.06335; ``m ← β₁ m + Δ``, ``w ← w + η m``.
- FedAdam, FedYogi: Reddi et al.: "Adaptive Federated Optimization", ICLR 2021,
  https://arxiv.org/abs/2003.00295; Algorithm 2. FedAdam's learning rate is corrected for the zero
  start of the moments, as Flower does it.

Δ is the mean of the silos' models minus the model that they started from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

BETA_2 = 0.99
"""β₂, Flower's default."""


@dataclass(frozen=True)
class Moments:
    """What an optimiser remembers of a group: steps made, and moments of Δ; empty before any."""

    steps: int = 0
    first: Arrays = field(default_factory=dict)
    second: Arrays = field(default_factory=dict)


def step(
    name: str,
    start: Arrays,
    mean: Arrays,
    before: Moments,
    *,
    lr: float,
    momentum: float,
    tau: float,
    moves: Callable[[str], bool],
) -> tuple[dict[str, NDArray[Any]], Moments]:
    """Return a group's next model and moments.

    Args:
        name: ``fedavgm``, ``fedadam`` or ``fedyogi``.
        start: the model that the silos trained.
        mean: of the silos' models: same names and shapes.
        moves: whether an array is a parameter; others become those of ``mean``.
    """
    steps = before.steps + 1
    rate = lr
    if name == "fedadam":
        rate *= float(np.sqrt(1 - BETA_2 ** (steps + 1)) / (1 - momentum ** (steps + 1)))
    model, first, second = dict(mean), {}, {}
    for key in filter(moves, mean):
        wide = np.result_type(start[key].dtype, np.float32)
        old = start[key].astype(wide)
        change = mean[key].astype(wide) - old
        fresh = 1.0 if name == "fedavgm" else 1 - momentum
        move = fresh * change
        if key in before.first:
            move = momentum * before.first[key] + move
        first[key] = np.asarray(move, wide)
        if name == "fedavgm":
            model[key] = (old + rate * move).astype(start[key].dtype)
            continue
        square = change**2
        past = before.second.get(key, np.zeros_like(square))
        if name == "fedadam":
            now = BETA_2 * past + (1 - BETA_2) * square
        else:
            now = past - (1 - BETA_2) * square * np.sign(past - square)
        second[key] = np.asarray(now, wide)
        model[key] = (old + rate * move / (np.sqrt(now) + tau)).astype(start[key].dtype)
    return model, Moments(steps, first, second)
