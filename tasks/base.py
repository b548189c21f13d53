"""The interface between a silo's training loop and a learning task.

A task defines how to create a model, how the model splits into a representation and a head, how to
load *one* silo's data, and what kind of answer is learned. It does not depend on federated
learning. Data are NumPy arrays or torch datasets.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.errors import TaskError as TaskError
from coterie.tasks.npy import read_npy

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from coterie.tasks.problems import Problem

Option = str | int | float | bool
Nest = Any
"""An array or a tensor, or a dict, list or tuple of nests."""
ColumnScale = Sequence[Sequence[float]]
"""(columns, 2) Mean and width that standardise numeric columns, then real targets."""
Persons = NDArray[np.int64]
"""(n,) Person numbers: samples with the same number belong to the same person."""


@dataclass(frozen=True)
class SiloData:
    """One silo's data as arrays, kept on the device as a whole.

    Inputs and targets are nests: an array, or a dict, list or tuple of nests. The first axis of
    every array counts samples.

    Attributes:
        x_train, x_test: finite inputs, with the same shape per sample.
        y_train, y_test: targets. Class targets are int64 (n,) in [0, num_classes).
        num_classes: the task's number of classes, including those that this silo lacks. None:
            targets are not classes; the task's problem defines them.
        scale: scale of a table and of real targets; the silo keeps it with its models
            (``Task.scale``).
        x_val, y_val: validation samples, never trained on. None: runs that need them hold out
            training samples.
        persons: person numbers of the training and test samples; whole persons are then held out.
            None: every sample is a different person.
        blocks: block numbers of the training samples, such as the month of each; whole blocks are
            then held out. Unlike persons they do not count for smallest counts. None with persons.
        missing: NaN among inputs is a missing value.
    """

    x_train: Nest
    y_train: Nest
    x_test: Nest
    y_test: Nest
    num_classes: int | None = None
    scale: ColumnScale | None = None
    x_val: Nest | None = None
    y_val: Nest | None = None
    persons: tuple[Persons, Persons] | None = None
    missing: bool = False
    blocks: Persons | None = None

    def __post_init__(self) -> None:
        finite = (lambda leaf: ~np.isinf(leaf)) if self.missing else np.isfinite
        parts = [("training", self.x_train, self.y_train), ("test", self.x_test, self.y_test)]
        if self.x_val is not None:
            parts.append(("validation", self.x_val, self.y_val))
        for part, x, y in parts:
            sizes = sorted({len(leaf) for leaf in leaves(x)})
            if len(sizes) > 1:
                raise TaskError(
                    f"all arrays of {part} data must have one row per sample. "
                    f"Got {' and '.join(map(str, sizes))} rows."
                )
            if any(len(leaf) != sizes[0] for leaf in leaves(y)):
                raise TaskError(
                    f"{part} data must have one label per sample. "
                    f"Got {sizes[0]} samples and {len(leaves(y)[0])} labels."
                )
            if sizes[0] == 0:
                raise TaskError(
                    f"{part} data is empty. A silo must have at least one {part} sample: "
                    "check the data folder and the silo's options."
                )
            if self.num_classes is not None and (y.min() < 0 or y.max() >= self.num_classes):
                raise TaskError(
                    f"{part} labels must be in [0, {self.num_classes - 1}]. "
                    f"Got labels from {y.min()} to {y.max()}."
                )
            if not all(finite(leaf).all() for leaf in leaves(x)):
                raise TaskError(f"{part} data contains NaN or infinite values. Clean it first.")
        shapes = [[leaf.shape[1:] for leaf in leaves(x)] for _, x, _ in parts]
        if other := [i for i, shape in enumerate(shapes) if shape != shapes[0]]:
            got = [own[0] if len(own) == 1 else own for own in shapes]
            raise TaskError(
                f"training and {parts[other[0]][0]} samples must have the same shape. Got "
                f"{got[0]} and {got[other[0]]}."
            )
        sizes = [len(leaves(x)[0]) for x in (self.x_train, self.x_test)]
        _check_whose("persons", self.persons, *sizes)
        _check_whose("blocks", None if self.blocks is None else [self.blocks], sizes[0])


def _check_whose(named: str, whose: Sequence[Persons] | None, *sizes: int) -> None:
    """Raise ``TaskError`` unless every sample has a whole number."""
    own = [np.asarray(part) for part in (() if whose is None else whose)]
    fits = [part.shape for part in own] == [(size,) for size in sizes]
    if whose is not None and not (fits and all(part.dtype.kind in "iu" for part in own)):
        wanted = " and ".join(map("{} for the {}".format, sizes, ("training", "test")))
        raise TaskError(f"{named} must be arrays of whole numbers, {wanted} samples.")


def leaves(nest: Nest) -> list[Any]:
    """Return the arrays or tensors of a nest, in order."""
    if isinstance(nest, Mapping):
        return [leaf for value in nest.values() for leaf in leaves(value)]
    if isinstance(nest, list | tuple):
        return [leaf for value in nest for leaf in leaves(value)]
    return [nest]


@dataclass(frozen=True)
class StreamedData:
    """One silo's data as datasets read sample by sample, for data that do not fit in memory.

    Attributes:
        train, test: map-style ``torch.utils.data.Dataset``s of (inputs, targets), tensors or nests
            of them. An attribute ``targets`` (n, …), as in torchvision, saves reading the samples
            to get the targets. Must be picklable with worker processes.
        scale, persons: see ``SiloData``.
        val: validation samples, as ``SiloData.x_val`` and ``y_val``.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    scale: ColumnScale | None = None
    val: Dataset[Any] | None = None
    persons: tuple[Persons, Persons] | None = None

    def __post_init__(self) -> None:
        for part, dataset in (("training", self.train), ("test", self.test)):
            if not hasattr(dataset, "__len__"):
                raise TaskError(
                    f"the {part} dataset must have a length: a map-style dataset, not an iterable."
                )
            if len(dataset) == 0:
                raise TaskError(
                    f"{part} data is empty. A silo must have at least one {part} sample: "
                    "check the data folder and the silo's options."
                )
        _check_whose("persons", self.persons, len(self.train), len(self.test))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Samples:
    """Samples to predict from.

    Attributes:
        x: a nest of arrays (n, ...), prepared like the training inputs.
        names: (n,) names of the samples; empty: they are only numbered.
        notes: remarks for the user.
        passed: name → (n,) texts, copied unchanged to the answers.
        scale: the scale by which a table was standardised.
    """

    x: Nest
    names: Sequence[str] = ()
    notes: Sequence[str] = ()
    passed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scale: ColumnScale | None = None


@dataclass(frozen=True)
class Column:
    """One column of a silo's training samples, for its statistics.

    ``values`` (n,) are numbers, or indices into ``categories`` if there are any; NaN marks a
    missing number, −1 a missing category. ``odd`` (n,), if any, marks values not accepted.
    """

    name: str
    values: NDArray[np.float64]
    categories: Sequence[str] = ()
    odd: NDArray[np.bool_] | None = None

    @property
    def present(self) -> NDArray[np.bool_]:
        """Whether each sample has a value that the task accepts (n,)."""
        there = self.values >= 0 if self.categories else np.isfinite(self.values)
        return there if self.odd is None else there & ~self.odd


@dataclass(frozen=True)
class RunKey:
    """A run key that a task defines: ``task.<name>``, the same at every silo.

    Attributes:
        default: value if the run sets none. Its type, bool, int, float or str, is the key's.
        low, high: bounds of a number, inclusive.
        choices: allowed texts; empty allows any text of at most 200 characters.
    """

    default: Option
    low: float = -1e9
    high: float = 1e9
    choices: Sequence[str] = ()
    help: str = ""

    def objection(self, value: object) -> str:
        """Return what the value must be instead; empty if the value is allowed."""
        kind = type(self.default)
        if kind is bool:
            return "" if isinstance(value, bool) else "true or false"
        if kind is str and self.choices:
            return "" if value in self.choices else f"one of {', '.join(self.choices)}"
        if kind is str:
            short = isinstance(value, str) and len(value) <= 200
            return "" if short else "a text of at most 200 characters"
        right = isinstance(value, int | float) if kind is float else isinstance(value, int)
        if right and not isinstance(value, bool) and self.low <= value <= self.high:  # type: ignore[operator]
            return ""
        what = "a whole number" if kind is int else "a number"
        return f"{what} from {self.low:g} to {self.high:g}"


class Passes(Protocol):
    """The passes over a silo's training data in one training.

    ``for batches in passes: for x, y in batches: …``. Batches are on the device. They are shuffled
    by the run's seed, the silo and the round; the run sets their number.
    """

    def __iter__(self) -> Iterator[Iterator[tuple[Nest, Nest]]]:
        """Yield, for each pass, an iterator over the (inputs, targets) of its mini-batches."""

    @property
    def lr(self) -> float:
        """The scheduled learning rate of the latest mini-batch."""


class Task(ABC):
    """A learning task. Subclass it.

    Attributes:
        name: the task's name on the wire. Server and silos must use the same one.
        num_classes: number of classes, if the task has classes.
        metric: the primary metric; empty: the first of the problem's.
        head: prefix of the head's parameter names. All other parameters form the representation.
            Models whose ``forward`` is ``head(representation(x))`` can also be trained in latent
            space.
        classes: class names for display; empty: classes are only numbered.
        class_column: name of the classes' column, in data summaries and regressions.
        weights: name and SHA-256 of the file with the initial weights, if any; known once a model
            has been made.
        run_keys: run keys of the task, by name; ``run_values`` holds the current run's values. Use
            them for the model and its training only: data are loaded before a run is known.
        scale: scale of the data that a kept model was trained on, for ``load`` and ``inputs``, if
            ``load`` returned one; None: use the current training data.
        pooled_columns: number of numeric columns, then real targets, that share one scale across
            the silos of a run; the run supplies it.
        scaled_targets: number of real targets scaled for training, the last ones of ``scale``.
    """

    name: str
    num_classes: int = 0
    metric: str = ""
    head: str = "head."
    classes: Sequence[str] = ()
    class_column: str = "class"
    weights: tuple[str, str] | None = None
    scale: ColumnScale | None = None
    run_keys: Mapping[str, RunKey] = MappingProxyType({})
    pooled_columns: int = 0
    scaled_targets: int = 0
    _given: Mapping[str, Option] = MappingProxyType({})

    @property
    def run_values(self) -> Mapping[str, Any]:
        """The value of each of ``run_keys``: the run's, or the default."""
        return {name: key.default for name, key in self.run_keys.items()} | dict(self._given)

    def of_run(self, values: Mapping[str, Any]) -> Self:
        """Return the task with a run's values, sharing everything else with this one.

        ``values`` are by name, without ``task.``, and not trusted. Raises ``TaskError`` for an
        unknown key or a value that is not allowed.
        """
        for name, value in values.items():
            if name not in self.run_keys:
                has = ", ".join(f"task.{known}" for known in sorted(self.run_keys)) or "none"
                raise TaskError(
                    f"task {self.name!r} has no run key {_shown(f'task.{name}')}. It has: {has}."
                )
            if must := self.run_keys[name].objection(value):
                raise TaskError(
                    f"task.{name} of task {self.name!r} must be {must}. Got {_shown(value)}."
                )
        made = copy(self)
        object.__setattr__(made, "_given", dict(values))  # also where a task is a frozen dataclass
        return made

    def of_scale(self, scale: ColumnScale | None) -> Self:
        """Return the task for data of this scale; it answers in the unit of its targets.

        By default the task itself, because no targets are scaled.
        """
        return self

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """Return a freshly initialised model; the caller has seeded torch.

        Parameters with ``requires_grad = False`` are not trained. They stay at the silo and must be
        the same at all silos.
        """

    @property
    def problem(self) -> Problem:
        """The kind of answer to learn. By default one of ``num_classes`` classes."""
        from coterie.tasks.problems import Classes

        return Classes(self.num_classes)

    @abstractmethod
    def load(self, options: Mapping[str, Option]) -> SiloData | StreamedData:
        """Load one silo's data.

        Args:
            options: the silo's own settings, e.g. ``{"data": "/folder", "rotation": 90}``.

        Raises:
            TaskError: the data are missing, empty or unreadable, or an option is unknown.
        """

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """Read samples to predict from, prepared as ``load`` prepares training samples.

        By default reads an ``.npy`` file, or the array ``x`` of an ``.npz`` file, unchanged. Raises
        ``TaskError`` if the file is missing or has unsuitable content.
        """
        return Samples(np.asarray(read_array(file), dtype=np.float32))

    def persons_in(self, file: Path, options: Mapping[str, Option]) -> Persons | None:
        """Return the person numbers (n,) of the samples of ``inputs``, or None if unknown.

        By default None. Raises ``TaskError`` if a sample has no person.
        """
        return None

    def passed_through(self, options: Mapping[str, Option]) -> Mapping[str, Sequence[str]]:
        """Return what ``Samples.passed`` is for ``inputs``, for the test samples of ``load``."""
        return {}

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        """Describe how ``inputs`` prepares a sample, for using the model elsewhere.

        The result holds text, numbers, and lists of rows (dicts), as in JSON. It includes ``scale``
        if set. Empty: the task gives no description.
        """
        return {}

    def load_all(
        self, options: Mapping[str, Option], silos: Sequence[int] | None = None
    ) -> Sequence[SiloData | StreamedData]:
        """Load several silos that share one data set, for simulations; raises as ``load``.

        Item k equals ``load({**options, "silo": silos[k]})``; ``options["silos"]`` is their total.
        ``silos`` are in [0, options["silos"]); None: all. Override it to read the data once.
        """
        wanted = range(int(options["silos"])) if silos is None else silos
        return [self.load({**options, "silo": silo}) for silo in wanted]

    def column_sums(self, options: Mapping[str, Option]) -> NDArray[np.float64]:
        """Return sums over the training samples, shape (``pooled_columns``, 3).

        The sums are the number of values present, their mean, and the sum of squared deviations
        from it. A fourth, optional, is the number of persons with a value.
        """
        raise NotImplementedError

    def columns(self, options: Mapping[str, Option], file: Path | None = None) -> Sequence[Column]:
        """Return the training samples column by column, before scaling; raises as ``load``.

        With ``file``, return those samples instead, which need no labels. By default empty:
        statistics then describe the arrays as the model sees them.
        """
        return ()

    def test_columns(self, options: Mapping[str, Option]) -> Sequence[Column]:
        """Return the test samples as ``columns`` those for training; by default empty."""
        return ()

    def says(self) -> Mapping[str, Any]:
        """Return what all silos must have in common, by display name, as JSON values.

        If two silos differ, they learn in which entries. Digests of the values leave the silo. By
        default the source code of a task that is not part of coterie.
        """
        module = sys.modules.get(type(self).__module__)
        file = getattr(module, "__file__", None)
        if file is None or type(self).__module__.startswith("coterie."):
            return {}
        return {"the code of the task": Path(file).read_text(encoding="utf-8", errors="replace")}

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch. By default the problem's."""
        return self.problem.loss(outputs, targets)

    def training_step(self, model: torch.nn.Module, x: Nest, y: Nest) -> torch.Tensor:
        """Return the loss of a mini-batch to minimise. By default ``loss`` of the outputs.

        Override it for a loss that needs more than outputs and targets (mixup, a contrastive loss,
        a second call of the model). Draw random numbers with torch, which the caller has seeded.
        The model is in training mode; the batch is on its device.
        """
        return self.loss(model(x), y)

    def train(self, model: torch.nn.Module, passes: Passes) -> float:
        """Train the model with the task's own loop, and return the mean loss over the last pass.

        Override it to replace the run's loop. The model is in training mode and changed in place;
        torch is seeded. Train only parameters that require gradients, and use each pass over the
        training data once. Run settings of the replaced loop (another optimiser, clipping, a
        proximal term, …) are refused.
        """
        raise NotImplementedError

    def lr_factor(self, done: float) -> float:
        """Return a learning-rate factor on top of ``schedule`` and ``lr-decay``; default 1.

        ``done`` is the completed share of the run, in [0, 1].
        """
        return 1.0

    def optimiser(self, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer | None:
        """Return the task's own optimiser, or None to use the run's.

        Optimise only parameters that require gradients. ``lr`` is the run's rate in this round.
        """
        return None

    def discriminator_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a client discriminator sees of samples: shape (n, ...) to (n, features).

        The mapping is fixed, not trained, and the same at every silo. By default the values
        themselves; images of more than 28 pixels a side are averaged down first. A task may return
        a network's output (FedCollab: a pre-trained one).
        """
        from torch.nn.functional import adaptive_avg_pool2d

        if x.ndim == 4 and max(x.shape[2:]) > 28:
            factor = -(-max(x.shape[2:]) // 28)
            x = adaptive_avg_pool2d(x, (-(-x.shape[2] // factor), -(-x.shape[3] // factor)))
        return x.flatten(1)

    def discriminator(self, num_features: int) -> torch.nn.Module:
        """Return a freshly initialised client discriminator; the caller has seeded torch.

        It has no buffers. ``forward(features, labels)`` takes ``(n, num_features)`` and one-hot
        labels ``(n, num_classes)``, or one label without classes, and returns n logits. By default
        FedCollab's.
        """
        from coterie.tasks.models import Discriminator

        return Discriminator(num_features, max(self.num_classes, 1))


def _shown(value: object) -> str:
    return (text := repr(value))[:60] + "…" * (len(text) > 60)


def has_own(task: Task, hook: str) -> bool:
    """Return whether a task overrides ``train``, ``training_step``, ``loss``, ``optimiser`` …."""
    return getattr(type(task), hook) is not getattr(Task, hook)


def read_array(file: Path) -> NDArray[Any]:
    """Read an ``.npy`` file, or ``x`` of an ``.npz`` file; raise ``TaskError`` on failure."""
    try:
        found = read_npy(file)
        array: NDArray[Any] = found if isinstance(found, np.ndarray) else found["x"]
        if array.dtype.kind not in "fiub":
            raise ValueError(f"it contains {array.dtype}, not numbers")
        return array
    except Exception as error:  # of a damaged file numpy and zipfile raise all sorts of things
        raise TaskError(
            f"{file} must be an .npy file of samples, or an .npz file with an array x: {error}"
        ) from None
