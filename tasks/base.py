"""The contract between the silo's training loop and what is being learned.

A task says four things: how a model is made, how that model splits into a representation and a
head, how *one* silo's data is loaded, and what kind of answer is learned. It knows nothing of
federation. Data is plain numpy, or datasets of torch's.
"""

from __future__ import annotations

import json
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

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from coterie.tasks.problems import Problem

Option = str | int | float | bool
Nest = Any
"""An array or a tensor, or a dict, list or tuple of nests."""
ColumnScale = Sequence[Sequence[float]]
"""(columns, 2) Mean and width by which the numbers of a table, and then real targets, were
standardised."""
Persons = NDArray[np.int64]
"""(n,) Whose each sample is: samples with the same number are one person's. It means no more."""


class TaskError(ValueError):
    """A task that cannot be loaded, or data that cannot be trained on. The text is for the user."""


@dataclass(frozen=True)
class SiloData:
    """One silo's data as arrays, which are kept on the device as a whole.

    Inputs and targets are nests of arrays: an array, or a dict, list or tuple of nests. The first
    axis of every array counts samples.

    Attributes:
        x_train, x_test: inputs, n and m samples alike in all but their number. Numbers are finite.
        y_train, y_test: targets; of classes int64 (n,) in [0, num_classes).
        num_classes: of the task, also those that this silo has none of; None: targets are no
            classes, and the task's problem says what they must be.
        scale: of a table and of real targets; the silo keeps it with its models (``Task.scale``).
        x_val, y_val: samples that are never trained on, for runs that hold some out of the training
            data; None: such runs draw them from it.
        persons: of training and of test samples whose they are, in the same numbers, where one
            person may have several: then whole persons are held out. None: each is of another one.
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

    def __post_init__(self) -> None:
        parts = [
            ("training", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
        ]
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
            if not all(np.isfinite(leaf).all() for leaf in leaves(x)):
                raise TaskError(f"{part} data holds NaN or infinite values. Clean it first.")
        shapes = [[leaf.shape[1:] for leaf in leaves(x)] for _, x, _ in parts]
        if other := [i for i, shape in enumerate(shapes) if shape != shapes[0]]:
            got = [own[0] if len(own) == 1 else own for own in shapes]
            raise TaskError(
                f"training and {parts[other[0]][0]} samples must have one shape. Got {got[0]} and "
                f"{got[other[0]]}."
            )
        _check_persons(self.persons, *(len(leaves(x)[0]) for x in (self.x_train, self.x_test)))


def _check_persons(persons: tuple[Persons, Persons] | None, *sizes: int) -> None:
    """Check that there is a whole number for every sample.

    Raises:
        TaskError: there is not.
    """
    if persons is None:
        return
    own = [np.asarray(part) for part in persons]
    fits = [part.shape for part in own] == [(size,) for size in sizes]
    if not fits or any(part.dtype.kind not in "iu" for part in own):
        raise TaskError(
            f"persons must be two arrays of whole numbers, {sizes[0]} for the training and "
            f"{sizes[1]} for the test samples."
        )


def leaves(nest: Nest) -> list[Any]:
    """The arrays or tensors of a nest, in order."""
    if isinstance(nest, Mapping):
        return [leaf for value in nest.values() for leaf in leaves(value)]
    if isinstance(nest, list | tuple):
        return [leaf for value in nest for leaf in leaves(value)]
    return [nest]


@dataclass(frozen=True)
class StreamedData:
    """One silo's data as datasets that are read sample by sample, for what memory does not hold.

    Attributes:
        train, test: map-style ``torch.utils.data.Dataset``s of (inputs, targets), tensors or nests
            of them. One with an attribute ``targets`` (n, …), as torchvision's have, need not be
            read to know them. With worker processes they must be picklable.
        scale, persons: see ``SiloData``.
        val: the same as ``SiloData.x_val`` and ``y_val``.
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
        _check_persons(self.persons, len(self.train), len(self.test))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Samples:
    """Samples that somebody wants an answer to.

    Attributes:
        x: a nest of arrays (n, ...), prepared as those that were trained on.
        names: (n,) what each is called where it came from; empty: they are only numbered.
        notes: what a person should know of them.
        passed: name → (n,) texts that are copied to the answers as they are.
        scale: of a table, by which it was standardised.
    """

    x: Nest
    names: Sequence[str] = ()
    notes: Sequence[str] = ()
    passed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scale: ColumnScale | None = None


@dataclass(frozen=True)
class Column:
    """One column of a silo's training samples, for its statistics.

    Attributes:
        name: for people.
        values: (n,) numbers, NaN where there is none; of categories their numbers from 0 on, −1
            where there is none.
        categories: their names; empty: the values are numbers.
        odd: (n,) whether there is a value that the task does not take; None: nowhere.
    """

    name: str
    values: NDArray[np.float64]
    categories: Sequence[str] = ()
    odd: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class RunKey:
    """A key of a run that a task understands: ``task.<name>``, the same at every silo.

    Attributes:
        default: its value where the run says nothing. Its type is the key's: true or false, whole
            number, number or text.
        low, high: bounds of a number, inclusive.
        choices: of a text; empty allows any of at most 200 characters.
        help: what it does, for people.
    """

    default: Option
    low: float = -1e9
    high: float = 1e9
    choices: Sequence[str] = ()
    help: str = ""

    def objection(self, value: object) -> str:
        """What it must be instead of this value; empty: it may be this one."""
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
    """The passes over a silo's training data that one training is made of.

    ``for batches in passes: for x, y in batches: …``. Batches are on the device, shuffled by the
    run's seed, the silo and the round, and as many as the run asks for.
    """

    def __iter__(self) -> Iterator[Iterator[tuple[Nest, Nest]]]:
        """(inputs, targets) of every mini-batch, pass by pass."""

    @property
    def lr(self) -> float:
        """The learning rate of the mini-batch given last, by the run's schedule."""


class Task(ABC):
    """What a federation learns. Subclass it.

    Attributes:
        name: the task's name on the wire. Server and silos must name the same one.
        num_classes: number of classes, of tasks that have them.
        metric: the metric that leads; empty: the first of the problem's.
        head: prefix of the names of the head's parameters (``"head."`` by default). What is not
            the head is the representation. Models whose ``forward`` is ``head(representation(x))``
            can also be trained in latent space.
        classes: their names, for people; empty: they are only numbered.
        weights: name and SHA-256 of the file that its models begin from, if there is one; known
            when a model has been made.
        run_keys: the keys of a run that the task understands, by name; ``run_values`` has what the
            present run gives them. They are for the model and its training: the data are loaded
            before a run is known.
        scale: of the data that a kept model was trained on, for ``load`` and ``inputs`` of those
            tasks whose ``load`` gave one; None: that of the training data as it is now.
        pooled_columns: numeric columns, and then real targets, whose scale is one of all silos of a
            run: the run brings it.
        scaled_targets: real targets that are scaled for training, the last ones of ``scale``.
    """

    name: str
    num_classes: int = 0
    metric: str = ""
    head: str = "head."
    classes: Sequence[str] = ()
    weights: tuple[str, str] | None = None
    scale: ColumnScale | None = None
    run_keys: Mapping[str, RunKey] = MappingProxyType({})
    pooled_columns: int = 0
    scaled_targets: int = 0
    _given: Mapping[str, Option] = MappingProxyType({})

    @property
    def run_values(self) -> Mapping[str, Any]:
        """Value of every one of ``run_keys``: the run's, or the default."""
        return {name: key.default for name, key in self.run_keys.items()} | dict(self._given)

    def of_run(self, values: Mapping[str, Any]) -> Self:
        """The task as a run makes it, which shares everything else with this one.

        Args:
            values: by name, without ``task.``; they come from elsewhere and may be anything.

        Raises:
            TaskError: a key that the task does not have, or a value that it does not allow.
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
        """The task of a silo whose data have this scale, which answers in the unit of its targets.

        Here: itself, as no targets are scaled.
        """
        return self

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """Return a freshly initialised model; the caller has seeded torch.

        Parameters that are not to be trained have ``requires_grad = False``: they stay at the silo,
        and must be the same at all silos.
        """

    @property
    def problem(self) -> Problem:
        """What kind of answer is learned; here: one of ``num_classes`` classes."""
        from coterie.tasks.problems import Classes

        return Classes(self.num_classes)

    @abstractmethod
    def load(self, options: Mapping[str, Option]) -> SiloData | StreamedData:
        """Load one silo's data.

        Args:
            options: the silo's own settings, e.g. ``{"data": "/folder", "rotation": 90}``.

        Raises:
            TaskError: the data is missing, empty or unreadable, or an option is unknown.
        """

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """Samples to predict from a file, prepared as ``load`` prepares those to train on.

        Here: an ``.npy`` file, or the array ``x`` of an ``.npz`` file, taken as it is.

        Args:
            file: what somebody at the silo wants an answer to.
            options: the silo's own settings, as for ``load``.

        Raises:
            TaskError: the file is missing or holds something else.
        """
        return Samples(np.asarray(read_array(file), dtype=np.float32))

    def passed_through(self, options: Mapping[str, Option]) -> Mapping[str, Sequence[str]]:
        """Of the test samples of ``load`` what ``Samples.passed`` is of ``inputs``."""
        return {}

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        """How ``inputs`` makes a sample of what a person has, for who uses the model elsewhere.

        Words, numbers, and lists of rows (dicts), as JSON has them; empty: the task does not say.
        Where ``scale`` is set, it is part of it.

        Args:
            options: the silo's own settings, as for ``load``.
        """
        return {}

    def load_all(
        self, options: Mapping[str, Option], silos: Sequence[int] | None = None
    ) -> Sequence[SiloData | StreamedData]:
        """Load several silos that share one data set, for simulations in one process.

        Item k equals ``load({**options, "silo": silos[k]})``. Override it to read the data once.

        Args:
            options: with ``silos``, the number of silos in all.
            silos: numbers in [0, options["silos"]); None means all.

        Raises:
            TaskError: as ``load``.
        """
        wanted = range(int(options["silos"])) if silos is None else silos
        return [self.load({**options, "silo": silo}) for silo in wanted]

    def column_sums(self, options: Mapping[str, Option]) -> NDArray[np.float64]:
        """(``pooled_columns``, 3) Of the training samples: numbers that are there, their mean, and
        the sum of the squares of their deviations from it; perhaps, as a fourth, how many persons
        the numbers are of."""
        raise NotImplementedError

    def columns(self, options: Mapping[str, Option]) -> Sequence[Column]:
        """The training samples column by column, as a person knows them, before they are scaled.

        Here: none; statistics are then of the arrays as the model sees them.

        Args:
            options: the silo's own settings, as for ``load``.

        Raises:
            TaskError: as ``load``.
        """
        return ()

    def says(self) -> Mapping[str, Any]:
        """What all silos must have in common, by the name that a person knows it by, as JSON has
        it: where two differ, they are told in what. Digests of it leave the silo.

        Here: the code of the task.
        """
        module = sys.modules.get(type(self).__module__)
        file = getattr(module, "__file__", None)
        if file is None or type(self).__module__.startswith("coterie."):
            return {}
        return {"the code of the task": Path(file).read_text(encoding="utf-8", errors="replace")}

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch: the problem's, unless the task says otherwise."""
        return self.problem.loss(outputs, targets)

    def training_step(self, model: torch.nn.Module, x: Nest, y: Nest) -> torch.Tensor:
        """The loss of a mini-batch, whose gradient training follows. Here: ``loss`` of the outputs.

        Override it for a loss that needs more than outputs and targets (mixup, a contrastive loss,
        a second call of the model). Randomness is torch's, which the caller has seeded.

        Args:
            model: in training mode.
            x: inputs of the mini-batch, on the model's device.
            y: its targets.
        """
        return self.loss(model(x), y)

    def train(self, model: torch.nn.Module, passes: Passes) -> float:
        """A whole training of the task's own, in place of the run's loop. Override it to have one.

        The model is in training mode and changed in place; torch is seeded. What a run asks of the
        loop that it replaces (another optimiser, clipping, a proximal term, …) is refused.

        Args:
            model: train those of its parameters that require gradients.
            passes: over the training data; each is to be taken once.

        Returns:
            The mean loss over the samples of the last pass.
        """
        raise NotImplementedError

    def lr_factor(self, done: float) -> float:
        """A factor on the learning rate, beside the run's ``schedule`` and ``lr-decay``; here: 1.

        Args:
            done: share of the whole run, in [0, 1].
        """
        return 1.0

    def optimiser(self, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer | None:
        """An optimiser of the task's own, in place of the run's; None: there is none.

        Args:
            model: train those of its parameters that require gradients.
            lr: the run's learning rate in this round.
        """
        return None

    def discriminator_features(self, x: torch.Tensor) -> torch.Tensor:
        """What a client discriminator sees of samples, shape (n, ...) to (n, features).

        Fixed, the same at every silo, not trained. By default the values themselves; images of more
        than 28 pixels a side are averaged down first. A task may return the output of a network
        that it has (FedCollab: of a pre-trained one).
        """
        from torch.nn.functional import adaptive_avg_pool2d

        if x.ndim == 4 and max(x.shape[2:]) > 28:
            factor = -(-max(x.shape[2:]) // 28)
            x = adaptive_avg_pool2d(x, (-(-x.shape[2] // factor), -(-x.shape[3] // factor)))
        return x.flatten(1)

    def discriminator(self, num_features: int) -> torch.nn.Module:
        """A freshly initialised client discriminator; the caller has seeded torch.

        A module without buffers whose ``forward(features, labels)`` takes ``(n, num_features)`` and
        one-hot labels ``(n, num_classes)`` and returns n logits; a task without classes has one
        label. By default FedCollab's.
        """
        from coterie.tasks.models import Discriminator

        return Discriminator(num_features, max(self.num_classes, 1))


def _shown(value: object) -> str:
    """A value of somebody else's, in an error."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def with_task_keys(keys: Any) -> Any:
    """Keys of a run as a file has them, with ``[run.task]`` written as ``task.<name>``."""
    if not isinstance(keys, Mapping) or not isinstance(keys.get("task"), Mapping):
        return keys
    own = {f"task.{name}": value for name, value in keys["task"].items()}
    return {**{key: value for key, value in keys.items() if key != "task"}, **own}


def has_own(task: Task, hook: str) -> bool:
    """Whether a task has its own ``train``, ``training_step``, ``loss``, ``optimiser`` …"""
    return getattr(type(task), hook) is not getattr(Task, hook)


def place_of(text: str) -> Path:
    """The file or folder that a user's text names.

    Raises:
        TaskError: it begins with ``~`` and somebody who has no home here.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise TaskError(
            f"{text!r} names no place: nobody on this machine has the home folder "
            f"{Path(text).parts[0]}. Write the whole path."
        ) from None


def read_array(file: Path) -> NDArray[Any]:
    """The numbers in an ``.npy`` file, or those of the array ``x`` of an ``.npz`` file.

    Raises:
        TaskError: the file is missing or holds something else.
    """
    try:
        found = np.load(file, allow_pickle=False)
        array: NDArray[Any] = found if isinstance(found, np.ndarray) else found["x"]
        if array.dtype.kind not in "fiub":
            raise ValueError(f"it holds {array.dtype}, not numbers")
        return array
    except Exception as error:  # of a damaged file numpy and zipfile raise all sorts of things
        raise TaskError(
            f"{file} must be an .npy file of samples, or an .npz file with an array x: {error}"
        ) from None


def as_option(value: Any) -> Any:
    """An option as it travels: a table or a list of a TOML file becomes text, in JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def read_options(
    task: str, options: Mapping[str, Option], defaults: Mapping[str, Option]
) -> dict[str, Any]:
    """Fill in defaults, convert to the defaults' types and refuse unknown options.

    Raises:
        TaskError: an option that the task does not have, or a value of the wrong type.
    """
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise TaskError(
            f"task {task!r} has no option {unknown[0]!r}. It has: {', '.join(sorted(defaults))}."
        )
    filled: dict[str, Any] = dict(defaults)
    for key, value in options.items():
        kind = type(defaults[key])
        try:
            filled[key] = _flag(value) if kind is bool else kind(as_option(value))
        except (TypeError, ValueError, OverflowError):
            must = "true or false" if kind is bool else f"of type {kind.__name__}"
            raise TaskError(
                f"option {key!r} of task {task!r} must be {must}. Got {value!r}."
            ) from None
    return filled


def _flag(value: Option) -> bool:
    """A command line or an environment gives texts, and ``bool("false")`` is true."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError from None
