"""Predictions of a saved model: ``coterie silo predict``.

``coterie silo calibrate`` and ``coterie silo export`` use the same inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from coterie.client.cli.answers import Answers, Array
from coterie.client.home.in_use import file_in_use
from coterie.client.home.settings import SettingsError
from coterie.client.work.card import PERSONALISED, Card, lead_of, read_card, value_text
from coterie.client.work.data import Held, Part, map_nest, to_device
from coterie.client.work.measure import batch_size, figures_of, join
from coterie.client.work.session import hash_of, model_of
from coterie.client.work.weights import frozen_digest, load_weights, travelling
from coterie.tasks import BUILT_IN, Task, load_task
from coterie.tasks.base import Nest, Option, Persons, Samples, TaskError, leaves
from coterie.tasks.draws import num_persons, split_by_class
from coterie.tasks.problems import Classes, Evidence, Labels, Masks, Problem
from coterie.tasks.trees import takes_missing
from coterie.wire import Model, model_hash, some


def find_model(home: Path, run: str) -> Path:
    """Return a saved model by its file or its run's name, else the one in use, or the newest.

    The model as the silo itself last trained it in a run is called ``personalised/RUN``.

    Raises:
        SettingsError: there is no such model.
    """
    if run and Path(run).is_file():
        return Path(run)
    by_run = {
        kind: {file.stem: file for file in sorted(home.glob(f"{kind}/*.safetensors"))}
        for kind in ("models", PERSONALISED)
    }
    called = by_run["models"] | {f"{PERSONALISED}/{n}": f for n, f in by_run[PERSONALISED].items()}
    if run.removesuffix(".safetensors") in called:
        return called[run.removesuffix(".safetensors")]
    if not run and (chosen := file_in_use(home)) is not None:
        return chosen
    if by_run["models"] and not run:
        return max(by_run["models"].values(), key=_kept)
    which = f"model {run!r}" if run else "model of a run"
    raise SettingsError(f"{home} has no {which}. Its models: {', '.join(called) or 'none'}.")


def _kept(file: Path) -> tuple[str, float]:
    """Return when a run kept a model: later changes to its card do not count."""
    try:
        return read_card(file).kept, file.stat().st_mtime
    except SettingsError:
        return "", 0.0


@dataclass(frozen=True)
class Kept:
    """A saved model, ready to predict."""

    card: Card
    task: Task
    model: torch.nn.Module


def require_built_in(card: Card) -> None:
    """Raise ``TaskError`` unless a model's card names a task of coterie's.

    A model may be from anyone, and loading a task runs the code that it names.
    """
    if card.source.partition("/")[0] not in BUILT_IN:
        raise TaskError(
            f"the model's card names the task {card.source!r}, which is not coterie's own, and "
            "there is no silo.toml here that names it. Loading it would run its code. If you know "
            "it, name it: --task NAME."
        )


def load_kept(file: Path, *, source: str = "") -> Kept:
    """Load a saved model; ``source`` is its task, if the name has changed since it was saved.

    Raises:
        SettingsError: the file is damaged, or not a saved model.
        TaskError: the task cannot be loaded, does not fit the model, or its declaration differs
            from that of the training.
    """
    card = read_card(file)
    weights = dict(load_file(file))
    if model_hash(weights) != card.sha256:
        raise SettingsError(f"{file} is damaged: its arrays do not match the SHA-256 of its card.")
    task = load_task(source or card.source).of_run(card.task_values)
    if task.name != card.task:
        raise TaskError(
            f"the model was trained for task {card.task!r}, but task {task.name!r} was loaded."
        )
    _check_declaration(card, task)
    if card.scale is not None:
        task.scale = card.scale
        task = task.of_scale(card.scale)
    model = whole(card, task, weights)
    return Kept(card, task, model.eval())


def predict(
    file: Path, samples: Path | None, *, source: str = "", options: Mapping[str, Option]
) -> Answers:
    """Load a saved model and predict with it. See ``load_kept`` and ``answer``."""
    return answer(load_kept(file, source=source), samples, options=options)


def answer(
    kept: Kept, samples: Path | None, *, options: Mapping[str, Option], workers: int = 0
) -> Answers:
    """Predict with a saved model.

    Args:
        samples: a file or folder that the task reads; None takes the silo's own test data.
        options: the silo's settings of the task.
        workers: processes that read a dataset.

    Raises:
        TaskError: the samples cannot be loaded, do not fit the model, or cannot be predicted.
    """
    card, task = kept.card, kept.task
    calibration = card.calibration
    if samples is None:
        part, notes = _own_samples(task, options, card, workers)
        found = Samples(None, notes=notes, passed=_passed(task, options, notes))
    else:
        if not samples.exists():
            raise TaskError(f"there is no file or folder {samples} to predict from.")
        found = task.inputs(samples, options)
        part = Held(map_nest(torch.as_tensor, found.x), ())
        if not len(part):
            raise TaskError(f"{samples} contains no samples.")
    values, evidence, targets = asked(kept, part, names=found.names)
    if samples is not None:
        return Answers(card, task, values, None, found)
    rows, measured = np.arange(len(part)), "this silo's own test data"
    if calibration is not None and calibration.part == "test":
        persons = 0 if part.persons is None else num_persons(part.persons)
        if (len(part), persons) == (calibration.part_examples, calibration.part_persons):
            _, rows = halves(len(part), part.persons)
            measured += f" (the {len(rows)} samples not used for calibration)"
        else:
            notes.append(
                "Note: the test data has changed since the model was calibrated on half of it. "
                "Some of these samples may belong to that half."
            )
    figures = figures_of(
        task.problem,
        tuple(array[rows] for array in evidence),
        thresholds=() if calibration is None else calibration.thresholds,
        persons=None if part.persons is None else part.persons[rows],
    )
    return Answers(card, task, values, targets, found, figures, measured)


def _passed(
    task: Task, options: Mapping[str, Option], notes: list[str]
) -> Mapping[str, Sequence[str]]:
    """Return the columns of the test data to copy; the silo's file need not have them."""
    try:
        return task.passed_through(options)
    except TaskError as error:
        notes.append(f"Note: no columns are copied into the predictions. {error}")
        return {}


def halves(
    num_samples: int, persons: Persons | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of test samples for calibration and for measurement; deterministic.

    If ``persons`` are given, all samples of one person are in the same half.
    """
    if persons is not None:
        alike = np.zeros(num_samples, np.int64)
        return split_by_class(alike, 0.5, seed=0, persons=persons)
    order = np.random.default_rng([0, num_samples]).permutation(num_samples)
    return np.sort(order[: num_samples // 2]), np.sort(order[num_samples // 2 :])


def asked(
    kept: Kept, part: Part, *, names: Sequence[str] = ()
) -> tuple[Array, Evidence, Array | None]:
    """Run the model, with its temperature, on samples, whose targets may be ``()``.

    ``names`` of the samples are for errors.

    Returns:
        ``answer_of`` every sample, the evidence, and the targets; without targets empty and None.

    Raises:
        TaskError: samples do not fit the model, or samples or answers are not finite.
    """
    problem, calibration = kept.task.problem, kept.card.calibration
    temperature = 1.0 if calibration is None else calibration.temperature
    missing = takes_missing(kept.task)
    values: list[Array] = []
    evidence: list[Evidence] = []
    targets: list[Array] = []
    odd_inputs: list[Array] = []
    odd_answers: list[Array] = []
    for x, y in part.batches(None, batch_size(part)):
        outputs = _outputs(kept.model, x)
        seen = [leaf.masked_fill(leaf.isnan() & missing, 0) for leaf in leaves(x)]
        odd_inputs.append(np.any([_odd_rows(leaf) for leaf in seen], axis=0))
        said = answer_of(problem, outputs, temperature)
        odd_answers.append(_odd_rows(outputs if isinstance(problem, Masks) else said))
        values.append(_small(said))
        if leaves(y):
            evidence.append(problem.evidence(tempered(problem, outputs, temperature), y))
            targets.append(leaves(y)[0].numpy())
    if odd := _called(np.concatenate(odd_inputs), names):
        raise TaskError(
            f"{odd} cannot be predicted: values that the model would receive are NaN, infinite "
            "or beyond 3e38. Correct them, or leave the sample out."
        )
    if odd := _called(np.concatenate(odd_answers), names):
        raise TaskError(
            f"{odd} cannot be predicted: the model's scores are not numbers. Its weights have "
            "diverged, or the values of the sample are too large for it."
        )
    known = np.concatenate(targets) if targets else None
    return np.concatenate(values), join(evidence), known


def tempered(problem: Problem, outputs: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return outputs divided by the temperature, if they are scores of classes or labels."""
    scores = isinstance(problem, Classes | Labels) and temperature != 1
    return outputs / temperature if scores else outputs


def answer_of(problem: Problem, outputs: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Convert a model's outputs to answers.

    Returns:
        Classes and labels: probabilities, (n, K). Numbers: the answers in their unit. Survival: log
        risks. Masks: the most likely class of every pixel, int64, (n, …).
    """
    outputs = tempered(problem, outputs, temperature)
    if isinstance(problem, Classes):
        return outputs.softmax(dim=1)
    if isinstance(problem, Labels):
        return outputs.sigmoid()
    return outputs.argmax(dim=1) if isinstance(problem, Masks) else problem.answers(outputs)


@torch.no_grad()
def _outputs(model: torch.nn.Module, x: Nest) -> torch.Tensor:
    try:
        outputs: torch.Tensor = model(x)
    except (RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
        shapes = [tuple(leaf.shape) for leaf in leaves(x)]
        shown = shapes[0] if len(shapes) == 1 else shapes
        raise TaskError(
            f"the samples do not fit the model: they have shape {shown}: {error}"
        ) from None
    return outputs


def _small(said: torch.Tensor) -> Array:
    """Return a numpy array; integers, which are class numbers, in the smallest type."""
    array: Array = said.numpy()
    if said.is_floating_point():
        return array
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def _odd_rows(values: torch.Tensor) -> Array:
    """Return which samples have values that are not finite, (n,)."""
    odd: Array = (~torch.isfinite(values))[..., None].flatten(1).any(dim=1).numpy()
    return odd


def _called(odd_rows: Array, names: Sequence[str]) -> str:
    rows = np.flatnonzero(odd_rows).tolist()
    odd = [names[i] if names else f"{i} (the first is 0)" for i in rows]
    return f"sample {some(odd, 3)}" if odd else ""


def whole(card: Card, task: Task, weights: Model) -> torch.nn.Module:
    """Return the task's model, including its frozen part, with a saved model's arrays.

    Raises:
        TaskError: the arrays are of another model, or trained on top of another frozen part.
    """
    model = model_of(task)
    if card.frozen != (frozen := frozen_digest(model)):
        file = f": {task.weights[0]} now has SHA-256 {task.weights[1]}" if task.weights else ""
        raise TaskError(
            f"the frozen part of task {task.name!r} is not the one that the saved model was "
            f"trained with (SHA-256 {frozen or 'of nothing'}, not "
            f"{card.frozen or 'of nothing'}){file}. Restore the earlier weights file, freeze "
            "setting and task, or train again."
        )
    try:
        load_weights(model, {name: weights[name] for name in travelling(model)})
    except (KeyError, ValueError) as error:
        raise TaskError(f"the model does not fit task {task.name!r}: {error}") from None
    return model


def _check_declaration(card: Card, task: Task) -> None:
    """Refuse a changed declaration: columns or classes may have changed order."""
    today = str(getattr(task, "fingerprint", ""))
    if card.fingerprint != today:
        raise TaskError(
            f"task {task.name!r} has changed since the model was trained (fingerprint "
            f"{today or 'none'}, not {card.fingerprint or 'none'}): the meaning of columns or "
            "classes may have changed. Give the earlier declaration with --task, or train "
            "again."
        )


def _own_samples(
    task: Task, options: Mapping[str, Option], card: Card, workers: int
) -> tuple[Part, list[str]]:
    data = task.load(options)
    part = to_device(data, torch.device("cpu"), workers=workers).test
    if card.data_hash in ("", hash_of(data)):
        return part, []
    note = (
        "Note: the training data is not what the model was trained on: the data, the share of "
        "test data or the options have changed since. The model may have been trained on some "
        f"of these test samples, so the {lead_of(card).title} may be too good; when the model "
        f"was saved, it was {value_text(card, card.test_error)} of {card.test_examples}."
    )
    return part, [note]
