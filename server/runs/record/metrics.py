"""The benefit of collaboration for each silo, compared with local training.

The metrics are from Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo
Federated Learning", ICML 2023, Table 1, on errors (or accuracies turned into errors) per silo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coterie import wire

Errors = Mapping[str, float]
"""Silo → error in [0, 1]."""


def gains(errors: Errors, alone: Errors) -> dict[str, float]:
    """Return silo → error alone − error together, for silos in both runs; above 0 is better."""
    return {name: alone[name] - error for name, error in errors.items() if name in alone}


def ipr(errors: Errors, alone: Errors) -> float:
    """Return the incentivised participation rate: share of silos with a gain above 0, in [0, 1].

    NaN if no silo is in both runs.
    """
    return _mean([gain > 0 for gain in gains(errors, alone).values()])


def rsd(errors: Errors, alone: Errors) -> float:
    """Return the reward standard deviation (of the population of gains); NaN as in ``ipr``."""
    found = list(gains(errors, alone).values())
    mean = _mean(found)
    return math.sqrt(_mean([(gain - mean) ** 2 for gain in found]))


def mean_accuracy(errors: Errors) -> float:
    """Return the plain mean over silos of 1 − error; NaN without silos."""
    return 1 - _mean(list(errors.values()))


def p_text(p: float) -> str:
    """Return a p-value as text; a dash if it is unknown."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Collaboration:
    """A run compared with local training: shares in [0, 1], of the silos in both runs."""

    silos: int
    mean_accuracy: float
    mean_accuracy_alone: float
    ipr: float
    rsd: float


def collaboration(errors: Errors, alone: Errors) -> Collaboration:
    """Compute all figures for a record, each over the silos that both runs measured."""
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
    """The primary metric of a run, which counts its silos' errors: lower is better.

    ``metric`` is its name on the wire; ``unit`` is that of real targets.
    """

    metric: str = wire.ERROR
    unit: str = ""

    @property
    def _known(self) -> wire.Metric:
        return wire.KNOWN_METRICS.get(self.metric, wire.KNOWN_METRICS[wire.ERROR])

    @property
    def title(self) -> str:
        """The name of values: ``error``, ``AUROC``, ``MAE``."""
        return self._known.title

    @property
    def label(self) -> str:
        """The name of errors on an axis, where smaller is better: ``1 − AUROC, %``."""
        called = f"1 − {self.title}" if self._known.higher else self.title
        return f"{called}, {self.unit or '%'}" if self.unit or self.scale == 100 else called

    @property
    def scale(self) -> float:
        """The factor from errors to axis values: 100 for percentages, else 1."""
        return 100.0 if self._known.share or self._known.higher else 1.0

    @property
    def head(self) -> str:
        """The head of a column of values: ``error (%)``, ``AUROC``, ``MAE (days)``."""
        unit = "%" if self._known.share else self.unit
        return f"{self.title} ({unit})" if unit else self.title

    @property
    def direction(self) -> str:
        """Whether higher or lower values are better, as text."""
        return f"{'higher' if self._known.higher else 'lower'} is better"

    @property
    def points(self) -> str:
        """The unit of differences of errors."""
        return "points" if self.scale == 100 else self.unit or self.title

    def value(self, error: float) -> float:
        """Return the metric's value for an error: 0.96 for an AUROC with error 0.04."""
        return self._known.shortfall(error)

    def text(self, error: float | None) -> str:
        """Format the metric's value for an error; a dash if it is unknown."""
        if error is None or math.isnan(error):
            return "–"
        return self._known.text(self._known.shortfall(error), self.unit)

    def number(self, error: float) -> str:
        """Format the value for a column under ``head``, without its unit."""
        return "–" if math.isnan(error) else self._form(self._known.shortfall(error))

    def spread(self, deviation: float) -> str:
        """Format a deviation of values as ``number`` does."""
        return self._form(deviation)

    def interval(self, low: float, high: float) -> str:
        """Format an interval of values as ``number`` does."""
        return f"{self._form(low)} to {self._form(high)}"

    def _form(self, value: float) -> str:
        if self._known.share:
            return f"{100 * value:.1f}"
        return f"{value:.3f}" if self._known.higher else wire.readable(value)

    def gain(self, gain: float, *, sign: str = "+") -> str:
        """Format a difference of errors without its unit, ``points``; a dash if unknown."""
        if math.isnan(gain):
            return "–"
        shares = self.scale == 100
        text = f"{100 * gain:{sign}z.1f}" if shares else wire.readable(gain, sign=sign)
        return text.replace("-", "−")

    def compared(self, gain: float, noise: float = math.nan) -> str:
        """Describe a difference of a silo's errors: ``it erred 4.1 ± 1.2 points less often``."""
        size = self.gain(abs(gain), sign="")
        if math.isfinite(noise):
            size += f" ± {self.gain(noise, sign='')}"
        if self.metric == wire.ERROR:
            return f"it erred {size} points {'less' if gain >= 0 else 'more'} often"
        higher = self._known.higher == (gain >= 0)
        size += f" {self.points}" * (self.points != self.title)
        return f"its {self.title} was {size} {'higher' if higher else 'lower'}"

    def error_of(self, value: float) -> float:
        """Return the error for a value of the metric.

        Raises ``ValueError`` if the metric cannot have this value.
        """
        most = 1.0 if self._known.share or self._known.higher else math.inf
        if not 0 < value < most:
            bounds = "between 0 and 1" if most == 1 else "above 0"
            raise ValueError(f"the metric is {self.title}, so it must be {bounds}. Got {value:g}")
        return self._known.shortfall(value)
