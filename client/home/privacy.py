"""Differential privacy as a silo asks for it in ``[privacy]``: its terms, and what they rule out.

With it, everything that is made of training data and may leave is made of clipped gradients with
noise (``coterie.client.work.private``) and counted (``coterie.client.home.budget``). What cannot be
made so does not leave; here, and nowhere else, is what that is.

Neighbours are data with one training sample more or less. The number of training samples is not
protected, and test data are not: errors on them leave as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from coterie import wire
from coterie.client.home.policy import number
from coterie.client.home.schema import In

LEAST_NOISE, MOST_NOISE = 0.1, 1000.0
"""Of ``noise``: below, no accountant gives a figure worth its name."""
MOST_EPSILON = 1000.0


@dataclass(frozen=True)
class Privacy:
    """What a silo spends of its data's privacy, over all runs together, and how.

    Raises:
        ValueError: a value is out of bounds.
    """

    epsilon: Annotated[
        float,
        In("privacy", "The budget of this silo's data over all runs together, above 0.", "8.0"),
    ]
    delta: Annotated[
        float | None,
        In(
            "privacy",
            "Must be below 1/n of n training samples. Without this line, 1/(10 n).",
            "1e-4",
        ),
    ] = None
    noise: Annotated[
        float,
        In(
            "privacy",
            f"The standard deviation of the noise, as a multiple of clip; at least {LEAST_NOISE}.",
        ),
    ] = 1.0
    clip: Annotated[float, In("privacy", "The largest norm of one sample's gradient.")] = 1.0

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
        """δ for so many training samples.

        By default 1/(10 n): with a δ of 1/n, giving one sample away as it is would be private.

        Raises:
            ValueError: the one that was given is too large for so few samples.
        """
        if self.delta is None:
            return 0.1 / num_examples
        if self.delta >= 1 / num_examples:
            raise ValueError(
                f"delta must be below 1/{num_examples}, one over the number of training samples. "
                f"Got {self.delta:g}."
            )
        return self.delta


REFUSED = {
    wire.LABEL_COUNTS: "label counts",
    wire.COLUMN_SUMS: "sums of columns",
    wire.STATISTICS: "exact statistics of data",
    wire.EVALUATE_TRAINING: "errors on training data",
    wire.TRAIN_DISCRIMINATOR: "discriminators",
    wire.EVALUATE_DISCRIMINATOR: "discriminators",
    wire.TRAIN_PLACING: "discriminators",
    wire.EVALUATE_PLACING: "discriminators",
    wire.TRAIN_PER_FEDAVG: "Per-FedAvg's training",
    wire.TRAIN_PFEDME: "pFedMe's training",
    wire.TRAIN_APFL: "APFL's training",
}
"""Type of a message → what it asks for that is not made privately."""
CANNOT_DO_WITHOUT = {
    **{"maxfl": wire.EVALUATE_TRAINING, "fedfa": wire.EVALUATE_TRAINING},
    **{"ifca": wire.EVALUATE_TRAINING, "flsc": wire.EVALUATE_TRAINING},
    **{"perfedavg": wire.TRAIN_PER_FEDAVG, "pfedme": wire.TRAIN_PFEDME, "apfl": wire.TRAIN_APFL},
    **{"fedgen": wire.LABEL_COUNTS},
}
"""Strategy → the type of message without which a silo is of no use to it: refused at the join."""
REFUSED_KEYS = {
    wire.META_LR: REFUSED[wire.TRAIN_PER_FEDAVG],  # also within the groups of another strategy
    wire.MOREAU_LAMBDA: REFUSED[wire.TRAIN_PFEDME],
    wire.ASKS_LABEL_COUNTS: "label counts",
    wire.GENERATED_WEIGHT: "training on generated latents",
    wire.DISTIL_WEIGHT: "training on generated latents",
    wire.ADAPT_STEPS: "steps on all training data before a test",
}
"""Entry of a message, where it is above 0 → what it asks for."""
REFUSED_VALUES = {
    wire.BALANCE: ("weights", "sampling"),  # both come of the labels' counts
    wire.PRECISION: ("float16",),  # its loss scaling goes by all gradients
}
STAYING = frozenset(
    {
        *(wire.TRIVIAL, wire.TRAIN_LOSS, wire.HOLDOUT_ERROR, wire.HOLDOUT_LOSS),
        wire.RECEIVED_VALIDATION_ERROR,
    }
)
"""Metrics that are measured on training data, or come of it, and do not leave."""


def objection(kind: str, config: Mapping[str, object]) -> str:
    """Why a silo with differential privacy refuses a message of this type; empty if it does not."""
    if kind in REFUSED:
        return _cannot(REFUSED[kind], kind)
    needed = CANNOT_DO_WITHOUT.get(str(config.get(wire.STRATEGY, "")))
    if needed is not None:
        return _cannot(REFUSED[needed], f"{wire.STRATEGY} = {config[wire.STRATEGY]}")
    for key, what in REFUSED_KEYS.items():
        asked = config.get(key, 0)
        if asked is True or not (asked is False or number(asked) <= 0):
            return _cannot(what, key)
    for key, values in REFUSED_VALUES.items():
        if config.get(key) in values:
            return _cannot(f"{key} = {config[key]}", key)
    return ""


def _cannot(what: str, key: str) -> str:
    return (
        f"trains with differential privacy ([privacy] in silo.toml), and {what} cannot be made "
        f"private here ({key})."
    )
