"""Differential privacy as set in ``[privacy]``; ``coterie.features.privacy`` acts on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from coterie.client.home.schema import In

LEAST_NOISE, MOST_NOISE = 0.1, 1000.0
"""Bounds of ``noise``: below, no accountant gives a meaningful figure."""
MOST_EPSILON = 1000.0


@dataclass(frozen=True)
class Privacy:
    """A silo's differential privacy: its budget over all runs, and the noise.

    Raises:
        ValueError: a value is out of bounds.
    """

    epsilon: Annotated[
        float,
        In(
            "privacy",
            "Privacy budget (ε) of this silo's data over all runs together, above 0.",
            "8.0",
        ),
    ]
    delta: Annotated[
        float | None,
        In("privacy", "δ, below 1/n for n training samples. Without this line: 1/(10 n).", "1e-4"),
    ] = None
    noise: Annotated[
        float,
        In(
            "privacy",
            f"Standard deviation of the noise, as a multiple of clip; at least {LEAST_NOISE}.",
        ),
    ] = 1.0
    clip: Annotated[
        float,
        In("privacy", "Largest norm of one sample's gradient; a longer one is scaled down to it."),
    ] = 1.0

    def __post_init__(self) -> None:
        for key, value, low, high in (
            ("epsilon", self.epsilon, 0.0, MOST_EPSILON),
            ("noise", self.noise, LEAST_NOISE, MOST_NOISE),
            ("clip", self.clip, 0.0, 1e6),
        ):
            if not low <= value <= high or not value:
                least = f"at least {low:g}" if low else "above 0"
                raise ValueError(f"{key} must be {least} and at most {high:g}. Got {value:g}.")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must be above 0 and below 1. Got {self.delta:g}.")

    def delta_of(self, num_examples: int) -> float:
        """Return δ for a number of training samples.

        The default is 1/(10 n): at a δ of 1/n, publishing one sample as it is would count as
        private.

        Raises:
            ValueError: the configured δ is too large for so few samples.
        """
        if self.delta is None:
            return 0.1 / num_examples
        if self.delta >= 1 / num_examples:
            raise ValueError(
                f"delta must be below 1/{num_examples}, one over the number of training samples. "
                f"Got {self.delta:g}."
            )
        return self.delta
