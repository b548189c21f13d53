"""Predictions of a model that the silo kept: ``coterie silo predict``."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from coterie.client.home.card import PERSONALISED, Card, CardError, read_card
from coterie.client.work.measure import MOST_AT_ONCE
from coterie.client.work.weights import frozen_digest, load_weights, travelling
from coterie.client.work.workbench import hash_of, model_of
from coterie.tasks import Task, load_task
from coterie.tasks.base import Option, Samples, TaskError
from coterie.wire import Model, model_hash


@dataclass(frozen=True)
class Answers:
    """What the model says.

    Attributes:
        card: of the model.
        classes: (n,) the likeliest class of every sample.
        probabilities: (n, num_classes) of every class.
        labels: (n,) the true classes, where they are known.
        samples: that were asked about.
        names: (num_classes,) of the classes; empty: they are only numbered.
    """

    card: Card
    classes: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    labels: NDArray[np.int64] | None
    samples: Samples
    names: Sequence[str]


def find_model(home: Path, run: str) -> Path:
    """A kept model by its file, by its run's name, or the newest of a silo.

    What the silo trained last in a run, for itself, is called ``personalised/RUN``.

    Raises:
        CardError: there is none.
    """
    if run and Path(run).is_file():
        return Path(run)
    by_age = {
        kind: sorted(home.glob(f"{kind}/*.safetensors"), key=lambda file: file.stat().st_mtime)
        for kind in ("models", PERSONALISED)
    }
    called = {file.stem: file for file in by_age["models"]}
    called |= {f"{PERSONALISED}/{file.stem}": file for file in by_age[PERSONALISED]}
    if run.removesuffix(".safetensors") in called:
        return called[run.removesuffix(".safetensors")]
    if by_age["models"] and not run:
        return by_age["models"][-1]
    which = f"model {run!r}" if run else "model of a run"
    raise CardError(
        f"no {which} is kept in {home}. The kept models are: {', '.join(called) or 'none'}."
    )


def predict(
    file: Path, samples: Path | None, *, source: str = "", options: Mapping[str, Option]
) -> Answers:
    """Ask a kept model.

    Args:
        file: the model.
        samples: a file or folder that the task reads; None takes the silo's own test data.
        source: the task, if it is called otherwise than when the model was kept.
        options: the silo's settings of the task.

    Raises:
        CardError: the file is damaged, or not a kept model.
        TaskError: the task or the samples cannot be loaded, or do not fit the model; or the task's
            declaration is another one than the model was trained with.
    """
    card = read_card(file)
    weights = dict(load_file(file))
    if model_hash(weights) != card.sha256:
        raise CardError(f"{file} is damaged: its arrays do not match the SHA-256 of its card.")
    task = load_task(source or card.source)
    if task.name != card.task:
        raise TaskError(
            f"the model was trained for task {card.task!r}, but task {task.name!r} was loaded."
        )
    _check_declaration(card, task)
    if card.scale is not None:
        task.scale = card.scale
    model = whole(card, task, weights)
    found, labels = _samples(task, samples, options, card)
    if odd := _not_finite(found.x, found.names):
        raise TaskError(
            f"{odd} cannot be predicted: values that the model would see are NaN, infinite or "
            "beyond 3e38. Correct them, or leave the sample out."
        )
    classes, probabilities = _asked(model, found.x)
    if odd := _not_finite(probabilities, found.names):
        raise TaskError(
            f"{odd} cannot be predicted: the model's scores are not numbers. Its weights have "
            "diverged, or the values of the sample are too large for it."
        )
    return Answers(card, classes, probabilities, labels, found, task.classes)


def whole(card: Card, task: Task, weights: Model) -> torch.nn.Module:
    """A kept model's arrays in the task's model, which has what is frozen.

    Raises:
        TaskError: the arrays are of another model, or trained on top of another frozen part.
    """
    model = model_of(task)
    if card.frozen != (frozen := frozen_digest(model)):
        file = f": {task.weights[0]} has SHA-256 {task.weights[1]} today" if task.weights else ""
        raise TaskError(
            f"what is frozen of the model of task {task.name!r} is not what the kept model was "
            f"trained on (SHA-256 {frozen or 'of nothing'}, not {card.frozen or 'of nothing'})"
            f"{file}. Put the earlier file of weights, freeze and task back, or train again."
        )
    try:
        load_weights(model, {name: weights[name] for name in travelling(model)})
    except (KeyError, ValueError) as error:
        raise TaskError(f"the model does not fit task {task.name!r}: {error}") from None
    return model


def _check_declaration(card: Card, task: Task) -> None:
    """The same arrays may fit a task whose columns or classes are in another order."""
    today = str(getattr(task, "fingerprint", ""))
    if card.fingerprint is None and today:
        raise TaskError(
            "the model's card was written by an earlier version and does not say with which "
            f"declaration of task {task.name!r} it was trained: columns or classes may mean "
            "something else today. Train it again."
        )
    if card.fingerprint is not None and card.fingerprint != today:
        raise TaskError(
            f"task {task.name!r} has changed since the model was trained "
            f"(fingerprint {today or 'none'}, not {card.fingerprint or 'none'}): columns or "
            "classes may mean something else. Give the earlier declaration with --task, or "
            "train again."
        )


def _samples(
    task: Task, place: Path | None, options: Mapping[str, Option], card: Card
) -> tuple[Samples, NDArray[np.int64] | None]:
    if place is None:
        data = task.load(options)
        if card.data_hash in ("", hash_of(data)):
            return Samples(data.x_test), data.y_test
        note = (
            "Note: the training data is not what the model was trained on: the data, the share "
            "kept for testing or the options have changed since. The model may have been trained "
            "on some of these test samples, so the error may be too low; when the model was kept, "
            f"it was {100 * card.test_error:.2f} % of {card.test_examples}."
        )
        return Samples(data.x_test, notes=[note]), data.y_test
    if not place.exists():
        raise TaskError(f"there is no file or folder {place} to predict from.")
    samples = task.inputs(place, options)
    if len(samples.x) == 0:
        raise TaskError(f"{place} holds no samples.")
    return samples, None


def _not_finite(values: NDArray[np.float32], names: Sequence[str]) -> str:
    """Which samples have values that are no numbers, in words; empty if none has."""
    odd = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if not len(odd):
        return ""
    called = ", ".join(names[i] if names else f"{i} (the first is 0)" for i in odd[:3])
    return f"sample {called}" + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")


@torch.no_grad()
def _asked(
    model: torch.nn.Module, inputs: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    model.eval()
    try:
        parts = [model(batch) for batch in torch.from_numpy(inputs).split(MOST_AT_ONCE)]
    except RuntimeError as error:
        raise TaskError(
            f"the samples do not fit the model: they have shape {inputs.shape}: {error}"
        ) from None
    probabilities = torch.softmax(torch.cat(parts), dim=1)
    return probabilities.argmax(dim=1).numpy(), probabilities.numpy()


def write_csv(answers: Answers, file: TextIO) -> None:
    """A line per sample: its name or number, what is passed through, its class, each class's
    probability, its label."""
    writer = csv.writer(file, lineterminator="\n")
    names = answers.names or [str(i) for i in range(answers.probabilities.shape[1])]
    samples = answers.samples.names or [str(i) for i in range(len(answers.classes))]
    passed = answers.samples.passed
    before = "p_" if answers.names else "p"
    known = [] if answers.labels is None else [[names[label]] for label in answers.labels]
    writer.writerow(
        ["sample", *passed, "class", *(before + name for name in names)] + ["label"] * bool(known)
    )
    for i, (sample, chosen) in enumerate(zip(samples, answers.classes, strict=True)):
        chances = (f"{p:.6g}" for p in answers.probabilities[i])
        copied = (column[i] for column in passed.values())
        writer.writerow([sample, *copied, names[chosen], *chances, *(known[i] if known else [])])
