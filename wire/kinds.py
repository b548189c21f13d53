"""Message types to silos, each declared once with the rules by which a silo answers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.wire import names
from coterie.wire.fixed import HISTOGRAMS, SUMS, Fixed

GROUPING = ("hcct", "fedgroup", "fedcollab")
"""Strategies that form groups, inside which other algorithms may run (``within``)."""


@dataclass(frozen=True)
class Kind:
    """The rules for a message type.

    Attributes:
        strategies: only runs of these strategies send it; empty: any run may.
        secret: whether the outcome stays at the silo in a secure run.
        summed: in a secure run the numbers of the answer leave masked, in this format; None: as
            they are.
        before_scale: whether a silo answers it before the run has a column scale.
        with_model: whether the answer has what a silo reports about its model in use.
        without_labels, testing: whether a silo without labels, or one that only tests, answers it.
    """

    strategies: tuple[str, ...] = ()
    secret: bool = False
    summed: Fixed | None = None
    before_scale: bool = False
    with_model: bool = False
    without_labels: bool = False
    testing: bool = False

    @property
    def hidden(self) -> bool:
        """Whether nobody sees this silo's own answer in a secure run."""
        return self.secret or self.summed is not None


EVERYBODY: Any = {"without_labels": True, "testing": True}

KINDS: Mapping[str, Kind] = {
    names.DESCRIBE: Kind(before_scale=True, **EVERYBODY),
    names.INITIAL: Kind(before_scale=True, **EVERYBODY),
    names.COLUMN_SUMS: Kind(before_scale=True),
    names.STATISTICS: Kind(before_scale=True, with_model=True, testing=True),
    names.SECURE_KEY: Kind(before_scale=True),
    names.SECURE_SEED: Kind(before_scale=True),
    names.MASKED_SUM: Kind(before_scale=True),
    names.TRAIN: Kind(secret=True),
    names.COLD_START: Kind(secret=True),
    names.TRAIN_SUMS: Kind(names.BY_SUMS, summed=SUMS, before_scale=True),
    names.TRAIN_PER_FEDAVG: Kind(("perfedavg", *GROUPING), secret=True),
    names.TRAIN_PFEDME: Kind(("pfedme", *GROUPING), secret=True),
    names.TRAIN_APFL: Kind(("apfl",), secret=True),
    names.TRAIN_DISCRIMINATOR: Kind(("fedcollab", "auto")),
    names.TRAIN_PLACING: Kind(**EVERYBODY),
    names.EVALUATE: Kind(**EVERYBODY),
    names.EVALUATE_GROUP: Kind(testing=True),
    names.EVALUATE_GIVEN: Kind((names.ONLY_EVALUATION, names.CONTRIBUTION), testing=True),
    names.EVALUATE_TRAINING: Kind(("ifca", "flsc", "maxfl", "fedfa", "auto")),
    names.EVALUATE_OWN: Kind(),
    names.EVALUATE_HISTOGRAMS: Kind(("trees", "fedcollab", "auto"), summed=HISTOGRAMS),
    names.EVALUATE_DISCRIMINATOR: Kind(("fedcollab", "auto")),
    names.EVALUATE_PLACING: Kind(**EVERYBODY),
    names.LABEL_COUNTS: Kind(("fedgen",)),
    names.ENSEMBLE: Kind(("fedensemble",)),
}
"""Every type that coterie's silos answer."""
OTHER = Kind()
"""The rules for a type of another Flower app."""


def kind_of(message_type: str) -> Kind:
    """Return the rules for a type of message."""
    return KINDS.get(message_type, OTHER)
