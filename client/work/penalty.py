"""The penalty of local training: λ/2·|w − c|² of every parameter but the model's last bias.

With the centre c = 0 it is ridge regression's; with the model of the silo's group, partial pooling
(Ditto: Li et al., ICML 2021, https://arxiv.org/abs/2012.04221, of all parameters). The last bias
is free, so that a silo keeps its base rate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from coterie.wire import Model


def free_bias(named: Mapping[str, nn.Parameter]) -> str:
    """Return the name of the model's last parameter if it is a bias; otherwise an empty string."""
    last = list(named)[-1]
    return last if named[last].ndim == 1 and last.rsplit(".", 1)[-1] == "bias" else ""


class Penalty:
    """A penalty in a training.

    Args:
        named: the trained parameters, in the model's order.
        strength: λ ≥ 0; 0: no penalty.
        centre: c; None: 0.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], strength: float, centre: Model | None
    ) -> None:
        self.strength = strength
        free = free_bias(named) if strength else ""
        self.parameters = {n: p for n, p in named.items() if strength and n != free}
        self.centres = {
            name: torch.zeros_like(p)
            if centre is None
            else torch.from_numpy(np.array(centre[name])).to(p.device)
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move to the minimum of λ/2·|w − c|² + |w − w_now|²/(2·lr), which no λ makes diverge."""
        share = lr * self.strength / (1 + lr * self.strength)
        for name, parameter in self.parameters.items():
            parameter.lerp_(self.centres[name], share)
