"""FedNova's normalisation: the weight of each silo's update, independent of its number of steps.

Source: Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481; eqs. 8-10 and
the accumulation vectors a_i of section 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray


def accumulation(steps: int, *, momentum: float = 0.0, decay: float = 0.0) -> float:
    """Return |a_i|_1 of one silo: the number of gradients that its update amounts to.

    Args:
        steps: τ_i ≥ 1, local SGD steps.
        momentum: ρ in [0, 1): |a|₁ = (τ - ρ(1 - ρ^τ)/(1 - ρ)) / (1 - ρ).
        decay: lr·μ in [0, 1) of FedProx: a_i = [(1 - lr·μ)^(τ-1), ..., 1].

    With both, it is the sum over the linear recursion of SGD with momentum and a proximal pull.
    """
    steps = _check.integer("steps", steps, low=1, high=2**53)
    momentum, decay = _check.number("momentum", momentum), _check.number("decay", decay)
    if momentum == 0 and decay == 0:
        return float(steps)
    if decay == 0:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    if momentum == 0:
        return (1 - (1 - decay) ** steps) / decay
    moved = velocity = 0.0  # of unit gradients against the pull to the start
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - decay * moved
        moved += velocity
    return moved


def coefficients(sizes: ArrayLike, accumulations: ArrayLike) -> FloatArray:
    """Return (N,) factors c_i of ``w ← w + Σ c_i Δ_i``: τ_eff · p_i / |a_i|₁.

    With p_i = D_i / D and τ_eff = Σ p_i |a_i|₁. Equal accumulations give FedAvg's p_i.
    """
    a = np.asarray(accumulations, dtype=np.float64)
    d = _check.sizes(sizes, num_silos=len(a))
    _check.sizes(a, num_silos=len(a))
    p = d / d.sum()
    return np.asarray(float(p @ a) * p / a)
