"""Figures of a model on test data: their names on the wire, what they are called, what is better.

A federation compares silos by *one* figure, the leading metric. So that everything that compares
can go by "lower is better", it is turned into a *shortfall*: what is missing to the best value, 1,
where higher is better, else the value itself.
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
    """A figure of a model.

    Attributes:
        name: on the wire and in keys: letters, digits and dashes.
        title: for people.
        higher: whether higher is better; the best value is 1 then, else 0.
        share: in [0, 1], which people read in per cent.
    """

    name: str
    title: str
    higher: bool = False
    share: bool = False

    def shortfall(self, value: float) -> float:
        """The value with lower better; its own inverse."""
        return 1.0 - value if self.higher else value

    def text(self, value: float, unit: str = "") -> str:
        """A value for people: in per cent, or with three figures and the target's unit."""
        if not isfinite(value):
            return "–"
        if self.share:
            return f"{100 * value:.1f} %"
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

LOW: Final = "-low"
HIGH: Final = "-high"
"""Behind a metric's name: the ends of its 95 % interval."""
