"""Placement of silos that only test: by the errors of every group's model on some of their samples.

Each such silo measures all groups' models on the part of its data by which its group is chosen, and
then the chosen one on the rest. Where its policy keeps errors and losses back, it is placed by its
features, like a silo without labels (``placing``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, inf, isfinite, nan, sqrt
from typing import Any

from coterie import wire
from coterie.strategies.rounds.algorithm import Exchanges, Order
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.replies import error_of
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

SURE = 2.0
"""Standard errors by which a group's error is lower than the next one's to be beyond chance."""


@dataclass(frozen=True)
class Fit:
    """A group's model on some samples of a silo; error and loss are NaN if they stay there."""

    group: Group
    error: float = nan
    loss: float = nan
    samples: int = 0

    @property
    def key(self) -> tuple[float, float, Group]:
        """The order: by error, then by loss; those without either are last."""
        return _or_last(self.error), _or_last(self.loss), self.group

    def entry(self) -> dict[str, Any]:
        known = {"error": self.error, "loss": self.loss}
        return {
            "silos": list(self.group),
            "samples": self.samples,
            **{key: round(value, 6) for key, value in known.items() if isfinite(value)},
        }


@dataclass(frozen=True)
class Testers:
    """The silos that only test, by name, with every group's fit, the best first."""

    of: Mapping[str, tuple[Fit, ...]] = field(default_factory=dict)


def measure(silos: Sequence[Silo], models: Mapping[Group, Model]) -> Exchanges[Testers]:
    """Let every silo measure every group's model; a silo that states nothing is missing."""
    groups = list(models)
    numbers = {f"group-{number}": group for number, group in enumerate(groups)}
    answers = yield [
        Order(silo, models[group], purpose=purpose, kind=wire.EVALUATE_GROUP)
        for silo in silos
        for purpose, group in numbers.items()
    ]
    found: dict[str, list[Fit]] = {}
    for update in answers:
        error, loss = error_of(update.metrics), update.metrics.get(wire.LOSS, nan)
        if isfinite(error) or isfinite(loss):
            fit = Fit(numbers[update.purpose], error, loss, int(update.num_examples))
            found.setdefault(update.silo.name, []).append(fit)
    whole = {name: own for name, own in found.items() if len(own) == len(groups)}
    return Testers({name: tuple(sorted(own, key=lambda f: f.key)) for name, own in whole.items()})


def words(fits: Sequence[Fit], metric: str) -> str:
    """Return how a group was chosen, and how certain that is if ``metric`` is a share, as text."""
    first, second = fits[:2]
    if not isfinite(first.error) or not isfinite(second.error):
        return "its loss is least with this group's model"
    said = (
        f"on {wire.counted(first.samples, 'sample')}, the error of this group's model is "
        f"{first.error:.3f}, and the next is {second.error:.3f}"
    )
    if first.error == second.error:
        return f"{said}: its loss is lower, which may be chance"
    if metric in wire.OF_NUMBERS:
        return said
    (low, own), (high, other) = _share(first), _share(second)
    sure = high - low >= SURE * hypot(own, other)
    return f"{said}, which {'is beyond' if sure else 'may be'} chance"


def _share(fit: Fit) -> tuple[float, float]:
    """Return a share of wrong answers and its standard error; of another metric a rough bound.

    One right and one wrong answer are added, so that a few samples prove nothing (Agresti and
    Caffo, The American Statistician 2000).
    """
    samples = fit.samples + 2
    share = (min(max(fit.error, 0.0), 1.0) * fit.samples + 1) / samples
    return share, sqrt(share * (1 - share) / samples)


def _or_last(value: float) -> float:
    return value if isfinite(value) else inf
