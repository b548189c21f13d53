"""Metrics of a model's answers with bootstrap intervals, as functions of sample weights.

Every metric here is a function of how much each test sample counts. With all weights 1 it is the
metric; with the number of times that each sample was drawn it is a bootstrap replicate. The whole
bootstrap is therefore one call with a matrix of weights, and costs little more than the metric.

A metric that the test data do not define is NaN: AUROC without both classes, R² of equal
targets, a concordance index without a comparable pair. It is never made up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import Persons
from coterie.tasks.draws import num_persons

Array = NDArray[np.float64]

RESAMPLES = 200
LEVELS = (2.5, 97.5)
"""Percentiles of the bootstrap: a 95% interval."""
BINS = 15
"""Bins of the expected calibration error (Naeini et al. 2015; 15 as in Guo et al. 2017)."""
BIASED = ("calibration-error",)
"""Metrics that resampling raises: repeated samples make a bin's accuracy differ more from its
confidence. Their resampled values are moved by the difference of their median to the value."""
MAX_PAIRED = 2000
"""Most test samples for which a concordance index has an interval: it compares all pairs."""


@dataclass(frozen=True)
class Figure:
    """A metric's value and 95% interval; NaN where it is undefined."""

    value: float
    low: float = float("nan")
    high: float = float("nan")


def with_intervals(
    metrics: Callable[[Array], Mapping[str, Array]],
    num_samples: int,
    *,
    seed: int = 0,
    persons: Persons | None = None,
) -> dict[str, Figure]:
    """Compute metrics, given as weights (b, n) → name → values (b,), and their intervals.

    If ``persons`` (n,) names each sample's person, persons are resampled instead of samples,
    because several samples of one person are not independent. Of a single one there is no interval.
    """
    values = {name: float(found[0]) for name, found in metrics(np.ones((1, num_samples))).items()}
    again = metrics(resampled(num_samples, seed=seed, persons=persons))
    units = num_samples if persons is None else num_persons(persons)
    figures = {}
    for name, value in values.items():
        found = again[name][np.isfinite(again[name])]
        if units > 1 and np.isfinite(value) and len(found) >= RESAMPLES // 2:
            if name in BIASED:
                found = np.maximum(found - np.median(found) + value, 0.0)
            low, high = np.percentile(found, LEVELS)
            figures[name] = Figure(value, float(low), float(high))
        else:
            figures[name] = Figure(value)
    return figures


def resampled(num_samples: int, *, seed: int = 0, persons: Persons | None = None) -> Array:
    """Return how often each sample is drawn in each replicate, (``RESAMPLES``, n)."""
    draw = np.random.default_rng(seed)
    units = num_samples if persons is None else num_persons(persons)
    even = np.full(units, 1 / units)
    drawn = draw.multinomial(units, even, size=RESAMPLES).astype(np.float64)
    return drawn if persons is None else drawn[:, np.unique(persons, return_inverse=True)[1]]


def of_classes(
    chances: Array, y: NDArray[np.int64], weights: Array, *, thresholds: Sequence[float] = ()
) -> dict[str, Array]:
    """Compute the metrics of a classification into K classes.

    Args:
        chances: (n, K) probabilities.
        y: (n,) the right classes.
        weights: (b, n).
        thresholds: for two classes, the probability above which the answer is the second; empty:
            the likelier class.

    Returns:
        Name → (b,). With two classes the second is the positive one. With more, AUROC, average
        precision and F1 are one-against-rest means over the classes, without sensitivity and
        specificity.
    """
    num_classes = chances.shape[1]
    likeliest = chances.argmax(axis=1)
    answers = (chances[:, 1] > thresholds[0]).astype(np.int64) if thresholds else likeliest
    total = weights.sum(axis=1)
    is_class = np.eye(num_classes)[y]
    count = weights @ is_class
    hits = weights @ (is_class * (answers == y)[:, None])
    said = weights @ np.eye(num_classes)[answers]
    recall = _ratio(hits, count)
    f1 = np.where(count > 0, _ratio(2 * hits, count + said), np.nan)
    found = {
        "error": (weights @ (answers != y)) / total,
        "balanced-accuracy": recall.mean(axis=1),
        "calibration-error": _calibration(chances.max(axis=1), likeliest == y, weights) / total,
    }
    if num_classes == 2:
        found |= {
            "auroc": auroc(chances[:, 1], is_class[:, 1], weights),
            "average-precision": average_precision(chances[:, 1], is_class[:, 1], weights),
            "f1": f1[:, 1],
            "sensitivity": recall[:, 1],
            "specificity": recall[:, 0],
            "brier": (weights @ (chances[:, 1] - y) ** 2) / total,
        }
        return found
    each = range(num_classes)
    found |= {
        "auroc": np.mean([auroc(chances[:, k], is_class[:, k], weights) for k in each], axis=0),
        "average-precision": np.mean(
            [average_precision(chances[:, k], is_class[:, k], weights) for k in each], axis=0
        ),
        "f1": f1.mean(axis=1),
        "brier": (weights @ ((chances - is_class) ** 2).sum(axis=1)) / total,
    }
    return found


def of_labels(
    chances: Array, y: Array, weights: Array, *, thresholds: Sequence[float] = ()
) -> dict[str, Array]:
    """Compute the metrics of answers to K yes-or-no questions, as means over the questions.

    Args:
        chances: (n, K) probability of yes.
        y: (n, K) 0 or 1.
        weights: (b, n).
        thresholds: (K,) above which the answer is yes; empty: 0.5.
    """
    total = weights.sum(axis=1)
    answers = chances > (np.array(thresholds) if thresholds else 0.5)
    right = answers == (y > 0.5)
    both = weights @ (y * answers)
    yes, said = weights @ y, weights @ answers
    each = range(y.shape[1])
    sensitivity = _ratio(weights @ (y * right), yes)
    specificity = _ratio(weights @ ((1 - y) * right), total[:, None] - yes)
    return {
        "error": (weights @ (1 - right.mean(axis=1))) / total,
        "balanced-accuracy": ((sensitivity + specificity) / 2).mean(axis=1),
        "auroc": np.mean([auroc(chances[:, k], y[:, k], weights) for k in each], axis=0),
        "average-precision": np.mean(
            [average_precision(chances[:, k], y[:, k], weights) for k in each], axis=0
        ),
        "f1": np.where(yes > 0, _ratio(2 * both, yes + said), np.nan).mean(axis=1),
        "sensitivity": sensitivity.mean(axis=1),
        "specificity": specificity.mean(axis=1),
        "brier": (weights @ ((chances - y) ** 2).mean(axis=1)) / total,
    }


def of_numbers(answers: Array, y: Array, weights: Array) -> dict[str, Array]:
    """Compute the metrics of real targets, as means over the targets (R² too).

    ``answers`` and ``y`` are (n, targets), ``weights`` (b, n).
    """
    total = weights.sum(axis=1)
    apart = answers - y
    square, size = weights @ apart**2, weights @ y**2
    y = y - y.mean(axis=0)  # reduces rounding errors
    mean = (weights @ y) / total[:, None]
    spread = weights @ y**2 - total[:, None] * mean**2
    # What rounding leaves of equal targets is no spread.
    spread = np.where((spread > 1e-24 * size) & (spread > 1e-9 * (weights @ y**2)), spread, 0.0)
    return {
        "mae": (weights @ np.abs(apart).mean(axis=1)) / total,
        "rmse": np.sqrt(square.mean(axis=1) / total),
        "r2": (1 - _ratio(square, spread)).mean(axis=1),
    }


def of_survival(risks: Array, times: Array, events: Array, weights: Array) -> dict[str, Array]:
    """Compute Harrell's concordance index, with equal risks counting half.

    It is the share, among pairs whose order in time is known, in which the earlier event has the
    higher risk. ``risks``, ``times`` and ``events`` are (n,); an event is 1, a censored time 0.
    ``weights`` are (b, n).
    """
    if len(weights) > 1 and len(risks) > MAX_PAIRED:
        return {"concordance": np.full(len(weights), np.nan)}
    right, known = np.zeros(len(weights)), np.zeros(len(weights))
    for rows in np.array_split(np.flatnonzero(events > 0), max(1, len(risks) // 256)):
        # Anyone who was censored at the time of an event had none until then.
        later = (times[rows, None] < times) | ((times[rows, None] == times) & (events == 0))
        higher = (risks[rows, None] > risks) + 0.5 * (risks[rows, None] == risks)
        own = weights[:, rows]
        known += ((weights @ later.T) * own).sum(axis=1)
        right += ((weights @ (later * higher).T) * own).sum(axis=1)
    return {"concordance": _ratio(right, known)}


def of_masks(counts: Array, weights: Array) -> dict[str, Array]:
    """Compute Dice and IoU: means over images of the mean over the classes in image or answer.

    ``counts`` (n, classes, 3) are pixels of each class but the background: in both, only in the
    answer, only in the target. ``weights`` are (b, n).
    """
    both, said, missed = np.moveaxis(counts, 2, 0)
    union = both + said + missed
    some = union > 0
    here = some.sum(axis=1)
    dice = np.divide(2 * both, union + both, out=np.zeros_like(both), where=some).sum(axis=1)
    iou = np.divide(both, union, out=np.zeros_like(both), where=some).sum(axis=1)
    counted = weights @ (here > 0)  # an image with nothing to find in which nothing was found: none
    per = np.maximum(here, 1)
    return {
        "dice": _ratio(weights @ (dice / per), counted),
        "iou": _ratio(weights @ (iou / per), counted),
    }


def auroc(scores: Array, positive: Array, weights: Array) -> Array:
    """Compute the AUROC (b,): how often a positive scores above a negative, ties half."""
    order = np.argsort(scores, kind="stable")
    yes = weights[:, order] * positive[order]
    no = weights[:, order] - yes
    first, last = _ties(scores[order])
    below = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(no, axis=1)], axis=1)
    beaten = (below[:, first] + below[:, last]) / 2
    return _ratio((yes * beaten).sum(axis=1), yes.sum(axis=1) * no.sum(axis=1))


def average_precision(scores: Array, positive: Array, weights: Array) -> Array:
    """Compute the area under the precision-recall steps (b,); equal scores are one step."""
    order = np.argsort(-scores, kind="stable")
    yes = weights[:, order] * positive[order]
    _, last = _ties(-scores[order])
    found = np.cumsum(yes, axis=1)[:, last - 1]
    seen = np.cumsum(weights[:, order], axis=1)[:, last - 1]
    precision = np.divide(found, seen, out=np.zeros_like(found), where=seen > 0)
    return _ratio((yes * precision).sum(axis=1), yes.sum(axis=1))


def _ties(ordered: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return how many values are smaller than each sorted value, and how many are not larger."""
    return (
        np.searchsorted(ordered, ordered, side="left"),
        np.searchsorted(ordered, ordered, side="right"),
    )


def _calibration(sure: Array, right: NDArray[np.bool_], weights: Array) -> Array:
    """Sum |right − sure| over confidence bins, weighted; NaN if the model has diverged."""
    bins = np.minimum((np.nan_to_num(sure) * BINS).astype(np.int64), BINS - 1)
    in_bin = np.eye(BINS)[bins]
    gap: Array = np.abs(weights @ (in_bin * (right - sure)[:, None])).sum(axis=1)
    return gap


def _ratio(part: Array, whole: Array) -> Array:
    """Divide; NaN where the divisor is not positive."""
    out = np.full(np.broadcast(part, whole).shape, np.nan)
    np.divide(part, whole, out=out, where=whole > 0)
    return out
