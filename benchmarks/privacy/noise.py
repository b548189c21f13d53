"""How much noise a privacy budget asks for, where every step sees all samples.

Then each step is a Gaussian mechanism of sensitivity C and deviation σC, and T of them are one with
μ = √T / σ, exactly (Dong, Roth and Su 2022, "Gaussian differential privacy", corollary 2.1 and
theorem 3.5): no accountant is needed, and nothing is lost to a bound. For mini-batches it is a
bound from above, as amplification by sampling is left out.
"""

from __future__ import annotations

from math import exp, sqrt

from scipy.optimize import brentq
from scipy.stats import norm


def delta_of(epsilon: float, mu: float) -> float:
    """δ of a μ-GDP mechanism at this ε."""
    return float(norm.cdf(-epsilon / mu + mu / 2) - exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2))


def sigma_for(epsilon: float, *, delta: float, steps: int) -> float:
    """The σ with which so many steps are (ε, δ)-differentially private, for a sample added."""
    mu = float(brentq(lambda mu: delta_of(epsilon, mu) - delta, 1e-3, 50.0))
    return sqrt(steps) / mu
