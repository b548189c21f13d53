"""Output of ``coterie silo predict``: a table or masks, and messages for a person."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from coterie.client.work.card import Card, figure_texts, lead_of
from coterie.client.work.figures import Figure
from coterie.system.files import explained, replacing
from coterie.tasks import Task
from coterie.tasks.base import Samples, TaskError
from coterie.tasks.problems import Classes, Labels, Masks, Numbers, Survival
from coterie.wire import KNOWN_METRICS

Array = NDArray[Any]


@dataclass(frozen=True)
class Answers:
    """The predictions of a model.

    Attributes:
        values: (n, …), one per sample, see ``predict.answer_of``.
        labels: (n, …) the targets, or None if unknown.
        figures: the problem's metrics with their intervals; empty without targets.
        measured: the data behind the figures, for people.
    """

    card: Card
    task: Task
    values: Array
    labels: Array | None
    samples: Samples
    figures: Mapping[str, Figure] = field(default_factory=dict)
    measured: str = ""

    @property
    def classes(self) -> NDArray[np.int64]:
        """The class of each sample, (n,): the most likely, or by the calibration's threshold."""
        calibration = self.card.calibration
        if calibration is not None and calibration.thresholds:
            above = self.values[:, 1] > calibration.thresholds[0]
            return above.astype(np.int64)
        likeliest: NDArray[np.int64] = self.values.argmax(axis=1)
        return likeliest


def write_csv(answers: Answers, file: TextIO) -> None:
    """Write one line per sample: name or number, passed-through columns, answers, known target.

    The answers are, for classes: the class and each class's probability; for labels: each one's
    probability and, if the model is calibrated, whether it is positive; for numbers: each target;
    for survival: the log risk.

    Raises:
        TaskError: the answers are masks.
    """
    writer = csv.writer(file, lineterminator="\n")
    problem, values, known = answers.task.problem, answers.values, answers.labels
    called = names_of(answers.task, values.shape[1] if values.ndim > 1 else 1)
    samples = answers.samples.names or [str(i) for i in range(len(values))]
    calibration = answers.card.calibration
    if isinstance(problem, Masks):
        raise TaskError("masks are written into a folder, not as CSV: name a folder with --output.")
    if isinstance(problem, Classes):
        p = "p_" if answers.task.classes else "p"
        names, before = called, [[called[chosen]] for chosen in answers.classes]
        columns, after = ["class", *(p + name for name in names)], ["label"]
        label = [] if known is None else [[called[number]] for number in known]
    elif isinstance(problem, Labels):
        yes = () if calibration is None else calibration.thresholds
        before = [[int(v) for v in row] for row in values > yes] if yes else [[] for _ in values]
        columns = [f"yes_{name}" for name in called] * bool(yes) + [f"p_{n}" for n in called]
        after = [f"label_{name}" for name in called]
        label = [] if known is None else known.astype(int).tolist()
    else:
        survival = isinstance(problem, Survival)
        before = [[] for _ in values]
        columns = ["log_risk"] if survival else called
        after = ["time", "event"] if survival else [f"label_{name}" for name in called]
        label = [] if known is None else [[_text(v) for v in row] for row in known]
    passed = answers.samples.passed
    writer.writerow(["sample", *passed, *columns, *(after if label else [])])
    for i, (sample, said) in enumerate(zip(samples, values.reshape(len(values), -1), strict=True)):
        numbers = map(_text, said)
        copied = (column[i] for column in passed.values())
        writer.writerow([sample, *copied, *before[i], *numbers, *(label[i] if label else [])])


def _text(value: np.floating[Any]) -> str:
    """Return a number as text that reads back as the same float32: 0.1, not 0.100000001."""
    return f"{float(str(value)):.9g}"


def write_masks(answers: Answers, folder: Path) -> list[Path]:
    """Write one file per sample with the class number of every pixel, named after the sample.

    Flat masks of at most 256 classes are PNG files, whose grey values are the numbers; others are
    ``.npz`` files with an array ``mask``.

    Raises:
        TaskError: the folder is a file, or cannot be written.
    """
    from PIL import Image

    values, names = answers.values, answers.samples.names
    flat = values.ndim == 3 and values.dtype == np.uint8
    width = len(str(len(values) - 1))
    places = [Path(name) for name in names] or [Path(f"{i:0{width}}") for i in range(len(values))]
    bare = [place.with_suffix("") for place in places]
    # Where two differ in their endings alone, the ending stays.
    called = bare if len(set(bare)) == len(bare) else places
    files = []
    try:
        for place, mask in zip(called, values, strict=True):
            file = folder / place.with_name(place.name + (".png" if flat else ".npz"))
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, synced=False) as unfinished, unfinished.open("wb") as out:
                if flat:
                    Image.fromarray(mask).save(out, "png")
                else:
                    np.savez_compressed(out, mask=mask)
            files.append(file)
    except OSError as error:
        raise TaskError(
            f"the masks cannot be written into {folder}: {explained(error)} {len(files)} of "
            f"{len(values)} were written."
        ) from None
    return files


def names_of(task: Task, width: int) -> list[str]:
    """Return the names of a model's output columns; numbers if they have no names."""
    own = list(task.classes)
    if len(own) == width:
        return own
    numbered = [str(i) for i in range(width)]
    if isinstance(task.problem, Numbers):
        return ["value"] if width == 1 else [f"value_{i}" for i in numbered]
    return numbered


def summary(answers: Answers) -> list[str]:
    """Return the lines for a person: calibration, metrics, notes."""
    said = []
    card = answers.card
    if card.calibration is not None:
        said.append(f"calibrated: {card.calibration.text()}")
    said += figure_lines(card, answers.figures)
    return [*said, *answers.samples.notes]


def figure_lines(card: Card, figures: Mapping[str, Figure]) -> list[str]:
    """Return one line per metric, with its interval if known."""
    lines = []
    for name, figure in figures.items():
        three = (figure.value, figure.low, figure.high)
        title, value, interval = figure_texts(card, name, three)
        known = bool(np.isfinite(figure.low))
        lines.append(f"  {title:<20} {value}" + f"  (95%: {interval})" * known)
    return lines


def headline(answers: Answers) -> str:
    """Return the primary metric as text; empty without targets."""
    leading = lead_of(answers.card).name
    name = leading if leading in answers.figures else next(iter(answers.figures), "")
    if not name:
        return ""
    metric, figure = KNOWN_METRICS[name], answers.figures[name]
    shown = (
        f"{100 * figure.value:.2f}%"
        if name == "error"
        else figure_texts(answers.card, name, (figure.value,) * 3)[1]
    )
    return f"{metric.title} on {answers.measured} {shown}"
