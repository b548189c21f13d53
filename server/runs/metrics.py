"""What collaboration brings each silo, beside training alone.

The metrics of Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated
Learning", ICML 2023, Table 1, on errors (or accuracies turned into errors) per silo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coterie import wire

Errors = Mapping[str, float]
"""Silo → error in [0, 1]."""


def gains(errors: Errors, alone: Errors) -> dict[str, float]:
    """Silo → error alone − error together; above 0 is better. Silos measured in both runs."""
    return {name: alone[name] - error for name, error in errors.items() if name in alone}


def ipr(errors: Errors, alone: Errors) -> float:
    """Incentivised participation rate: share of silos strictly better than alone, in [0, 1].

    NaN where no silo is in both.
    """
    return _mean([gain > 0 for gain in gains(errors, alone).values()])


def rsd(errors: Errors, alone: Errors) -> float:
    """Reward standard deviation: the population's, of the gains; NaN as in ``ipr``."""
    found = list(gains(errors, alone).values())
    mean = _mean(found)
    return math.sqrt(_mean([(gain - mean) ** 2 for gain in found]))


def mean_accuracy(errors: Errors) -> float:
    """Plain mean over silos of 1 − error; NaN without silos."""
    return 1 - _mean(list(errors.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Collaboration:
    """What a run brought beside training alone: shares in [0, 1], of the silos in both runs."""

    silos: int
    mean_accuracy: float
    mean_accuracy_alone: float
    ipr: float
    rsd: float


def collaboration(errors: Errors, alone: Errors) -> Collaboration:
    """All of them, for a record. Every figure is of the silos that both runs measured."""
    both = {name: error for name, error in errors.items() if name in alone}
    return Collaboration(
        silos=len(both),
        mean_accuracy=mean_accuracy(both),
        mean_accuracy_alone=mean_accuracy({name: alone[name] for name in both}),
        ipr=ipr(both, alone),
        rsd=rsd(both, alone),
    )


@dataclass(frozen=True)
class Lead:
    """The leading metric of a run, in which its silos' errors are counted: lower is better.

    Attributes:
        metric: its name on the wire.
        unit: of real targets.
    """

    metric: str = wire.ERROR
    unit: str = ""

    @property
    def _known(self) -> wire.Metric:
        return wire.KNOWN_METRICS.get(self.metric, wire.KNOWN_METRICS[wire.ERROR])

    @property
    def title(self) -> str:
        """What values are called: ``error``, ``AUROC``, ``MAE``."""
        return self._known.title

    @property
    def label(self) -> str:
        """What errors are called on an axis, where smaller is better: ``1 − AUROC, %``."""
        called = f"1 − {self.title}" if self._known.higher else self.title
        return f"{called}, {self.unit or '%'}" if self.unit or self.scale == 100 else called

    @property
    def scale(self) -> float:
        """From errors to what an axis shows: per cent, if they are shares."""
        return 100.0 if self._known.share or self._known.higher else 1.0

    @property
    def head(self) -> str:
        """The head of a column of values: ``error (%)``, ``AUROC``, ``MAE (days)``."""
        unit = "%" if self._known.share else self.unit
        return f"{self.title} ({unit})" if unit else self.title

    @property
    def direction(self) -> str:
        """Which values are good, in words."""
        return f"{'higher' if self._known.higher else 'lower'} is better"

    @property
    def better(self) -> str:
        """What a silo that gains has."""
        return f"{'higher' if self._known.higher else 'smaller'} {self.title}"

    @property
    def points(self) -> str:
        """What differences of errors are counted in."""
        return "points" if self.scale == 100 else self.unit or self.title

    def text(self, error: float | None) -> str:
        """The metric's value, where this much is missing to the best; a dash if it is unknown."""
        if error is None or math.isnan(error):
            return "–"
        return self._known.text(self._known.shortfall(error), self.unit)

    def number(self, error: float) -> str:
        """The same under ``head``, so without its unit."""
        return "–" if math.isnan(error) else self._form(self._known.shortfall(error))

    def spread(self, deviation: float) -> str:
        """A deviation of values, in the form of ``number``."""
        return self._form(deviation)

    def interval(self, low: float, high: float) -> str:
        """An interval of values, in the form of ``number``."""
        return f"{self._form(low)} to {self._form(high)}"

    def _form(self, value: float) -> str:
        if self._known.share:
            return f"{100 * value:.1f}"
        return f"{value:.3f}" if self._known.higher else wire.readable(value)

    def gain(self, gain: float, *, sign: str = "+") -> str:
        """A difference of errors in ``points``, without that word; a dash if it is unknown."""
        if math.isnan(gain):
            return "–"
        shares = self.scale == 100
        text = f"{100 * gain:{sign}z.1f}" if shares else wire.readable(gain, sign=sign)
        return text.replace("-", "−")

    def compared(self, gain: float, noise: float = math.nan) -> str:
        """A difference of a silo's errors in words: ``it erred 4.1 ± 1.2 points less often``."""
        size = self.gain(abs(gain), sign="")
        if math.isfinite(noise):
            size += f" ± {self.gain(noise, sign='')}"
        if self.metric == wire.ERROR:
            return f"it erred {size} points {'less' if gain >= 0 else 'more'} often"
        higher = self._known.higher == (gain >= 0)
        return f"its {self.title} was {size} {self.points} {'higher' if higher else 'lower'}"

    def error_of(self, value: float) -> float:
        """What is missing to the best, where the metric has this value.

        Raises:
            ValueError: the metric cannot have it; in words.
        """
        most = 1.0 if self._known.share or self._known.higher else math.inf
        if not 0 < value < most:
            bounds = "between 0 and 1" if most == 1 else "above 0"
            raise ValueError(f"the metric is {self.title}, so it must be {bounds}. Got {value:g}")
        return self._known.shortfall(value)
