"""Differential privacy as set in ``[privacy]``: its parameters, and which messages it rules out.

With it, everything that is derived from training data and may leave uses clipped gradients with
noise (``coterie.client.work.private``) and is counted (``coterie.client.home.budget``). Anything
else does not leave; this module alone defines what that is. Neighbours are data sets that differ by
one training sample. The number of training samples is not protected, nor are test data: errors on
them leave unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from coterie import wire
from coterie.client.home.policy import number
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
        In(
            "privacy",
            "δ, below 1/n for n training samples. Without this line: 1/(10 n).",
            "1e-4",
        ),
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
"""Message type → what it asks for that has no private version."""
CANNOT_DO_WITHOUT = {
    **{"maxfl": wire.EVALUATE_TRAINING, "fedfa": wire.EVALUATE_TRAINING},
    **{"ifca": wire.EVALUATE_TRAINING, "flsc": wire.EVALUATE_TRAINING},
    **{"perfedavg": wire.TRAIN_PER_FEDAVG, "pfedme": wire.TRAIN_PFEDME, "apfl": wire.TRAIN_APFL},
    **{"fedgen": wire.LABEL_COUNTS},
}
"""Strategy → the message type without which it cannot use a silo: refused at the join."""
REFUSED_KEYS = {
    wire.META_LR: REFUSED[wire.TRAIN_PER_FEDAVG],  # also within the groups of another strategy
    wire.MOREAU_LAMBDA: REFUSED[wire.TRAIN_PFEDME],
    wire.ASKS_LABEL_COUNTS: "label counts",
    wire.GENERATED_WEIGHT: "training on generated latents",
    wire.DISTIL_WEIGHT: "training on generated latents",
    wire.ADAPT_STEPS: "steps on all training data before a test",
}
"""Entry of a message, refused above 0 → what it asks for."""
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
"""Metrics that depend on training data, and do not leave."""


def objection(kind: str, config: Mapping[str, object]) -> str:
    """Return why a silo with differential privacy refuses a message; empty if it accepts."""
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
