"""Metrics of a model on test data: name on the wire, title, direction.

A federation compares silos by the primary metric. So that every comparison can use "lower is
better", it is turned into a *shortfall*: 1 − value if higher is better, else the value itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Final

from coterie.wire.words import readable


@dataclass(frozen=True)
class Metric:
    """A metric of a model.

    Attributes:
        name: on the wire and in keys: letters, digits and dashes.
        higher: higher is better, and the best value is 1; else it is 0.
        share: in [0, 1], shown as a percentage.
    """

    name: str
    title: str
    higher: bool = False
    share: bool = False

    def shortfall(self, value: float) -> float:
        """Return the value with lower better; the function is its own inverse."""
        return 1.0 - value if self.higher else value

    def text(self, value: float, unit: str = "") -> str:
        """Return a value for people: a percentage, three decimals, or three figures with the unit.

        Shares of the best value, such as AUROC, have three decimals.
        """
        if not isfinite(value):
            return "–"
        if self.share:
            return f"{100 * value:.1f}%"
        if self.higher:
            return f"{value:.3f}"
        return f"{readable(value)} {unit}".rstrip()


KNOWN_METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric("error", "error", share=True),
            Metric("balanced-accuracy", "balanced accuracy", higher=True, share=True),
            Metric("auroc", "AUROC", higher=True),
            Metric("average-precision", "average precision", higher=True),
            Metric("f1", "F1", higher=True),
            Metric("sensitivity", "sensitivity", higher=True, share=True),
            Metric("specificity", "specificity", higher=True, share=True),
            Metric("brier", "Brier score"),
            Metric("calibration-error", "calibration error", share=True),
            Metric("mae", "MAE"),
            Metric("rmse", "RMSE"),
            Metric("r2", "R²", higher=True),
            Metric("concordance", "concordance index", higher=True),
            Metric("dice", "Dice", higher=True),
            Metric("iou", "IoU", higher=True),
            Metric("loss", "loss"),
        )
    }
)
"""Every metric that silos of this version know, by name."""

OF_NUMBERS: Final = ("mae", "rmse", "r2")
"""Those of real targets."""
CALIBRATION: Final = ("calibration-intercept", "calibration-slope")
"""How given models are calibrated at a site (``coterie.features.evaluation.calibration``): neither
lower nor higher is better."""

LOW: Final = "-low"
HIGH: Final = "-high"
"""Suffixes of a metric's name: the ends of its 95% interval."""
