"""Types of messages to silos: each is declared once, with what a silo goes by before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coterie.wire import names

GROUPING = ("hcct", "fedgroup", "fedcollab")
"""Strategies that form groups, inside which other algorithms may run (``within``)."""


@dataclass(frozen=True)
class Kind:
    """What a type of message is to a silo.

    Attributes:
        strategies: it comes in runs of these alone; empty: of any.
        secret: in a secure run its outcome stays at the silo.
        before_scale: it is answered before the run has a scale.
        without_labels: a silo whose samples have no labels yet answers it.
    """

    strategies: tuple[str, ...] = ()
    secret: bool = False
    before_scale: bool = False
    without_labels: bool = False


KINDS: Mapping[str, Kind] = {
    names.DESCRIBE: Kind(before_scale=True, without_labels=True),
    names.INITIAL: Kind(before_scale=True, without_labels=True),
    names.COLUMN_SUMS: Kind(before_scale=True),
    names.STATISTICS: Kind(before_scale=True),
    names.SECURE_KEY: Kind(before_scale=True),
    names.SECURE_SEED: Kind(before_scale=True),
    names.MASKED_SUM: Kind(before_scale=True),
    names.TRAIN: Kind(secret=True),
    names.COLD_START: Kind(secret=True),
    names.TRAIN_PER_FEDAVG: Kind(("perfedavg", *GROUPING), secret=True),
    names.TRAIN_PFEDME: Kind(("pfedme", *GROUPING), secret=True),
    names.TRAIN_APFL: Kind(("apfl",), secret=True),
    names.TRAIN_DISCRIMINATOR: Kind(("fedcollab", "auto")),
    names.TRAIN_PLACING: Kind(without_labels=True),
    names.EVALUATE: Kind(without_labels=True),
    names.EVALUATE_TRAINING: Kind(),
    names.EVALUATE_DISCRIMINATOR: Kind(("fedcollab", "auto")),
    names.EVALUATE_PLACING: Kind(without_labels=True),
    names.LABEL_COUNTS: Kind(("fedgen",)),
    names.ENSEMBLE: Kind(("fedensemble",)),
}
"""Every type that a silo of coterie answers."""
OTHER = Kind()
"""A type of somebody else's app."""


def kind_of(message_type: str) -> Kind:
    """What a type of message is to a silo."""
    return KINDS.get(message_type, OTHER)
