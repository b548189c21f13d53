"""Fit temperature and thresholds of a saved model to the silo's data: ``coterie silo calibrate``.

One temperature for all outputs maximises the likelihood of the silo's samples (Guo et al., "On
Calibration of Modern Neural Networks", ICML 2017). Then a threshold on the resulting probabilities
maximises sensitivity + specificity − 1 (Youden, "Index for rating diagnostic tests", Cancer 1950),
or is the highest one with the requested sensitivity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from coterie.client.cli.answers import names_of
from coterie.client.cli.predict import Kept, asked, halves
from coterie.client.work.card import Calibration, Card, write_card
from coterie.client.work.data import Part, to_device
from coterie.client.work.figures import Figure
from coterie.client.work.hold_out import held_out
from coterie.client.work.measure import figures_of
from coterie.client.work.session import hash_of
from coterie.tasks.base import Option, TaskError
from coterie.tasks.draws import num_persons
from coterie.tasks.problems import Classes, Evidence, Labels, Problem
from coterie.wire import counted

Array = NDArray[np.float64]

FEWEST = 10
"""The fewest samples to fit on."""
FEW = 100
"""The user is warned that the fit on fewer samples is rough."""
HOTTEST = 20.0
"""The largest temperature that is tried; the smallest is its inverse."""


@dataclass(frozen=True)
class Calibrated:
    """A model's calibration, notes for a person, and metrics before and after.

    The metrics are measured on test samples that were not used for the fit.
    """

    calibration: Calibration
    before: Mapping[str, Figure]
    after: Mapping[str, Figure]
    notes: Sequence[str]


def calibrate(
    kept: Kept, *, options: Mapping[str, Option], sensitivity: float | None = None, workers: int = 0
) -> Calibrated:
    """Fit temperature and thresholds on data of the silo that the model was not trained on.

    These are the validation data, if the run had any, else half of the test data; the figures are
    of the whole test data, or of its other half. A calibration that the model has is ignored.

    Args:
        sensitivity: the sensitivity that the thresholds must have on the fitted samples, in (0, 1];
            None: maximise the sum of sensitivity and specificity.
        workers: processes that read a dataset.

    Raises:
        TaskError: the task has no probabilities, the silo's data are not those that the model was
            trained on, or they are too few, or they lack a class.
    """
    problem, card = kept.task.problem, replace(kept.card, calibration=None)
    if not isinstance(problem, Classes | Labels):
        raise TaskError(
            "calibration needs a classification or multi-label model. Task "
            f"{kept.task.name!r} has a target of kind {problem.kind!r}."
        )
    two = isinstance(problem, Classes) and problem.num_classes == 2
    if sensitivity is not None and not (two or isinstance(problem, Labels)):
        raise TaskError(
            f"--sensitivity needs two classes, or labels. Task {kept.task.name!r} has "
            f"{kept.task.num_classes} classes. Leave --sensitivity out."
        )
    kept = replace(kept, card=card)
    named, fitted_on, tested_on = _parts(kept, options, workers)
    if len(fitted_on) < FEWEST:
        raise TaskError(
            f"there {'is' if len(fitted_on) == 1 else 'are'} "
            f"{counted(len(fitted_on), 'sample')} to calibrate on (of the silo's {named} data). "
            f"At least {FEWEST} are needed, several hundred are better."
        )
    temperature = _temperature(problem, *_evidence(kept, fitted_on))
    cooled = Calibration(temperature, (), "", "", named, 0, len(fitted_on), len(tested_on))
    warm = replace(kept, card=replace(card, calibration=cooled))
    chances, targets = _evidence(warm, fitted_on)
    thresholds, notes = _thresholds(kept, problem, chances, targets, sensitivity)
    rule = "greatest sensitivity + specificity"
    if sensitivity is not None:
        rule = f"sensitivity at least {sensitivity:g}"
    persons = tested_on.persons
    before = figures_of(problem, _evidence(kept, tested_on), persons=persons)
    after = figures_of(problem, _evidence(warm, tested_on), thresholds=thresholds, persons=persons)
    if len(fitted_on) < FEW:
        notes.append(
            f"Note: {len(fitted_on)} samples are few for a calibration. With other samples, its "
            "numbers may be quite different; compare the figures before and after."
        )
    if max(temperature, 1 / temperature) > 0.99 * HOTTEST:
        notes.append(
            f"Note: the temperature is at the limit of the search, {temperature:.3g}: on the "
            "calibration samples, the model is always right, or never better than chance."
        )
    calibration = replace(
        cooled,
        thresholds=thresholds,
        positive=names_of(kept.task, 2)[1] if two else "yes",
        rule=rule if thresholds else "",
        part_examples=len(fitted_on) + (len(tested_on) if named == "test" else 0),
        part_persons=sum(
            num_persons(part.persons)
            for part in (fitted_on, tested_on)[: 2 if named == "test" else 1]
            if part.persons is not None
        ),
        figures={name: (f.value, f.low, f.high) for name, f in after.items()},
    )
    return Calibrated(calibration, before, after, notes)


def keep_calibration(file: Path, card: Card, calibration: Calibration) -> None:
    """Write the calibration into the model's card, replacing an earlier one."""
    write_card(file, replace(card, calibration=calibration), dict(load_file(file)))


def _parts(kept: Kept, options: Mapping[str, Option], workers: int) -> tuple[str, Part, Part]:
    card = kept.card
    loaded = kept.task.load(options)
    if card.data_hash not in ("", hash_of(loaded)):
        raise TaskError(
            "the silo's training data is not what the model was trained on: the data, the "
            "share of test data or the options have changed since. A model must not be "
            "calibrated on samples that it may have been trained on. Give the earlier data and "
            "options with --set, or train again."
        )
    data = to_device(loaded, torch.device("cpu"), workers=workers)
    if card.validation:
        part = held_out(data, card.validation, silo=card.silo, seed=card.seed)
        return "validation", part, data.test
    fit, rest = (torch.from_numpy(rows) for rows in halves(len(data.test), data.test.persons))
    if not len(rest):
        raise TaskError(
            "all test samples belong to one person (group), so no others are left to measure "
            "the calibration on."
        )
    return "test", data.test.take(fit), data.test.take(rest)


def _evidence(kept: Kept, part: Part) -> Evidence:
    return asked(kept, part)[1]


def _temperature(problem: Problem, chances: Array, targets: Array) -> float:
    """Return the temperature of maximum likelihood, in [1 / HOTTEST, HOTTEST].

    ``chances`` are probabilities without a temperature. Their logarithms, or log odds, equal the
    outputs up to a constant per sample, which has no effect.
    """
    from scipy.optimize import minimize_scalar

    tiny = np.finfo(np.float64).tiny
    logs = np.log(np.maximum(chances, tiny))
    if isinstance(problem, Labels):
        logs = logs - np.log(np.maximum(1 - chances, tiny))
    outputs, known = torch.from_numpy(logs), torch.from_numpy(targets)

    def loss(log_temperature: float) -> float:
        return float(problem.loss(outputs / np.exp(log_temperature), known))

    widest = np.log(HOTTEST)
    found = minimize_scalar(loss, bounds=(-widest, widest), method="bounded")
    return float(np.exp(found.x))


def _thresholds(
    kept: Kept, problem: Problem, chances: Array, targets: Array, sensitivity: float | None
) -> tuple[tuple[float, ...], list[str]]:
    """Return a threshold for two classes, or one per label, or none for more classes; and notes."""
    task = kept.task
    if isinstance(problem, Classes):
        if problem.num_classes != 2:
            return (), []
        found = _threshold(chances[:, 1], targets == 1, sensitivity)
        if found is None:
            raise TaskError(
                "no threshold can be chosen: the calibration samples all have one class, or "
                "the model gives them all the same score."
            )
        return (found,), []
    thresholds, notes = [], []
    for label in range(chances.shape[1]):
        found = _threshold(chances[:, label], targets[:, label] > 0.5, sensitivity)
        if found is None:
            name = names_of(task, chances.shape[1])[label]
            notes.append(
                f"Note: label {name} keeps the threshold 0.5. The calibration samples all have "
                "the label, or none has it, or the model gives them all the same score."
            )
        thresholds.append(0.5 if found is None else found)
    return tuple(thresholds), notes


def _threshold(
    chances: Array, positive: NDArray[np.bool_], sensitivity: float | None
) -> float | None:
    """Return a probability above which the answer is positive; None if none is justified.

    It lies halfway between two samples' probabilities, so that rounding does not change an answer.
    """
    from sklearn.metrics import roc_curve

    if positive.all() or not positive.any():
        return None
    false, true, levels = roc_curve(positive, chances, drop_intermediate=False)
    # Row i answers yes from levels[i] on; the first answers yes to nobody.
    if sensitivity is None:
        best = int(np.argmax(true - false))
        if true[best] - false[best] <= 0:
            return None
    else:
        best = int(np.argmax(true >= sensitivity - 1e-12))
    below = levels[best + 1] if best + 1 < len(levels) else 0.0
    return float((levels[best] + below) / 2)
