"""Own data without programming: a task declared in a TOML file, the same at every silo.

The file holds what all silos must have in common (classes, columns, image size, network); each silo
sets its data location and test share itself. Three kinds: ``image-folder``, ``table`` and ``npz``.
The server never reads the file: it knows the task's name, and every silo's schema includes the
fingerprint of the file's content.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from coterie.tasks import families
from coterie.tasks.base import ColumnScale, Option, Persons, SiloData, StreamedData, Task, TaskError
from coterie.tasks.draws import num_persons, number_persons, split_by_class, split_by_fold
from coterie.tasks.options import place_of, read_options
from coterie.tasks.own.targets import Target
from coterie.tasks.problems import Classes, Masks, Numbers, Problem, Survival
from coterie.tasks.toml import checked, read_table

if TYPE_CHECKING:
    import torch


OPTIONS: dict[str, Option] = {
    "data": "",
    "test-data": "",
    "test-share": 0.2,
    "fold": "",
    "seed": 0,
    "group": "",
}

TREES = "trees"
"""Beginning of the names of networks that are boosted trees."""
ANY, USUAL = "any", "mlp-64"
"""Beginning of the names that leave the choice to ``auto``, and the network that it may choose."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Size = Annotated[int, Field(ge=1, le=1_000_000)]


class Declaration(BaseModel):
    """The settings of every declared task. ``classes`` are in the order of the model's outputs.

    ``weights`` is a safetensors file, relative to the declaration, ``checksum`` its SHA-256;
    ``freeze`` is ``all-but-head``, or prefixes of parameter names. ``metric`` replaces the
    problem's first metric as primary. A ``target`` with a kind defines a problem that is not
    classification.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    name: Name
    classes: tuple[str, ...] = ()
    network: str
    weights: str = ""
    checksum: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    freeze: Literal["all-but-head"] | tuple[Annotated[str, Field(min_length=1)], ...] = ()
    metric: str = ""

    @property
    def answer(self) -> Target | None:
        """The target, or None if it is one of several classes."""
        return None

    def problem(self) -> Problem:
        """Return the learning problem."""
        count = len(self.classes)
        return Classes(count) if self.answer is None else self.answer.problem(count)

    def fingerprint(self) -> str:
        """Return a fingerprint of the content, 16 hexadecimal digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _classes_and_metric_fit(self) -> Declaration:
        problem = self.problem()
        if not isinstance(problem, Classes | Masks):
            if self.classes:
                raise ValueError(f"a target of kind {problem.kind} has no classes")
        elif len(self.classes) < 2:
            raise ValueError("classes must name at least two")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes must differ from each other")
        if self.checksum and not self.weights:
            raise ValueError("checksum needs a file of weights: name it as weights")
        if self.metric and self.metric not in (*problem.metrics, "loss"):
            raise ValueError(
                f"metric must be one of {', '.join(problem.metrics)} or loss for a target of kind "
                f"{problem.kind}. Got {self.metric!r}"
            )
        return self


class DeclaredTask(Task):
    """A task defined by a declaration.

    Options of a silo:
        data: the folder or file. Required.
        test-data: folder or file for testing; default: ``test-share`` of ``data``.
        test-share: share held out for testing, in (0, 1): of every class, or of samples with and
            without the event, or of all samples if there are neither.
        fold: instead of ``test-share``, for cross-validation: "2/5" tests on the second of five
            disjoint parts with the same share of every class.
        seed: of the test split.
        group: the column, array, or pattern on image paths that identifies the person of a sample.
            All samples of a person then lie on one side of every split.

    Attributes:
        folder: where the declaration is.
        head: known once a model has been made.
    """

    options: Mapping[str, Option] = OPTIONS
    folder: Path = Path()
    scaled_inputs: int = 0
    """Number of scaled numeric columns, the first ones of ``scale``."""
    answering: Numbers | None = None
    """The problem of a silo whose targets are scaled."""
    families: tuple[str, ...] = ()
    """Of models, if it leaves the choice between them to ``auto``."""

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.name = declaration.name
        self.metric = declaration.metric
        self.classes = declaration.classes or (declaration.answer or Target()).labels()
        self.num_classes = len(declaration.classes)
        self.fingerprint = declaration.fingerprint()
        if declaration.network.partition("-")[0] == ANY:
            self.families, self.run_keys = families.FAMILIES, families.KEYS
        self._notes: list[str] = []
        self._warnings: list[str] = []

    @property
    def problem(self) -> Problem:
        return self.declaration.problem() if self.answering is None else self.answering

    @property
    def boosted(self) -> bool:
        """Whether the network is trees: they need no scale, and take missing values."""
        return self.declaration.network.partition("-")[0] == TREES

    @property
    def scaled_targets(self) -> int:  # type: ignore[override]
        problem = self.problem
        if not isinstance(problem, Numbers) or self.boosted:
            return 0
        return problem.num_targets

    def of_run(self, values: Mapping[str, Any]) -> Self:
        made = super().of_run(values)
        if family := values.get(families.FAMILY):
            trees = TREES + self.declaration.network.removeprefix(ANY)
            network = trees if family == TREES else USUAL
            made.declaration = self.declaration.model_copy(update={"network": network})
            made.families = ()
        return made

    def of_scale(self, scale: ColumnScale | None) -> Self:
        """Return the task for this scale, which may have none of the targets."""
        problem, own = self.declaration.problem(), list(scale or ())[self.scaled_inputs :]
        if not isinstance(problem, Numbers):
            return self
        made = copy(self)
        made.answering = replace(problem, scale=own) if own else None
        return made

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample as the model sees it."""

    @abstractmethod
    def read(self, place: Path, options: Mapping[str, Any]) -> Any:
        """Return a dataclass with ``y``, ``persons``, and the attributes that ``samples`` needs."""

    @abstractmethod
    def keys(self, of: Any, place: Path, options: Mapping[str, Any], which: str) -> Sequence[str]:
        """Return the key of each sample's person, as ``options["group"]`` defines it.

        ``of`` is the result of ``read`` from ``place``, or its part ``which`` (``train`` or
        ``test``; empty: all). Raises ``TaskError``, without showing any key, if a sample has none.
        """

    def look_for_persons(self, options: Mapping[str, Option]) -> list[str]:
        """Return hints on data that may identify persons, without ``group``; raises as ``load``."""
        return []

    @abstractmethod
    def samples(self, train: Any, test: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return both parts as the model sees them; parameters are learned from ``train`` only."""

    def scale_of(self, train: Any) -> ColumnScale | None:
        """Return the scale that ``samples`` learns from ``train``, or None."""
        return None

    def model(self) -> torch.nn.Module:
        """Return the declared network with its file's weights, frozen as declared."""
        from coterie.tasks import networks, trees

        says = self.declaration
        if self.families:
            return families.of_all(self)
        if self.boosted:
            self.head = "leaf"
            return trees.named(says.network, shape=self.shape, problem=self.problem)
        model, self.head = networks.make(
            says.network, shape=self.shape, num_classes=self._outputs()
        )
        self._check_outputs(model)
        if says.weights:
            known = says.checksum or (self.weights[1] if self.weights else "")
            file = self.folder / says.weights
            self.weights = networks.load_file(model, file, head=self.head, expected=known)
        networks.freeze(model, says.freeze, head=self.head)
        return model

    def _outputs(self) -> int:
        """Return the number of network outputs per sample or per pixel."""
        problem = self.problem
        sizes = ("num_classes", "num_labels", "num_targets")
        return next((getattr(problem, size) for size in sizes if hasattr(problem, size)), 1)

    def _check_outputs(self, model: torch.nn.Module) -> None:
        """Refuse a mask network for other problems, and other networks for masks."""
        from torch import nn

        from coterie.tasks.models import SplitModel

        name, masks = self.declaration.network, isinstance(self.problem, Masks)
        if not isinstance(model, SplitModel):
            if masks:
                raise TaskError(
                    f"network {name!r} gives one answer per sample; for masks use unet."
                )
            return
        if masks != isinstance(model.head, nn.Conv2d):
            raise TaskError(
                f"network {name!r} gives one answer per sample; for masks use unet."
                if masks
                else f"network {name!r} gives an answer per pixel; use it only for masks."
            )

    def says(self) -> Mapping[str, Any]:
        """Return the declaration's keys, and that targets are scaled."""
        scaled = {"scale of targets": "standard"} if self.scaled_targets else {}
        return {**self.declaration.model_dump(mode="json"), **scaled}

    def prepared_targets(self) -> Mapping[str, Any]:
        """Describe for ``prepared`` how the file turns the network's numbers into real targets."""
        scale = list(self.scale or ())[self.scaled_inputs :]
        if not scale:
            return {}
        targets = [
            {"target": name, "mean": mean, "deviation": width}
            for name, (mean, width) in zip(self.target_names(), scale, strict=True)
        ]
        what = "the network's numbers × deviation + mean; the file has done this"
        return {"answers": what, "targets": targets}

    def target_names(self) -> Sequence[str]:
        """Return the names of the real targets, or their numbers if they have none."""
        return self.classes or [str(i) for i in range(self.scaled_targets)]

    def load(self, options: Mapping[str, Option]) -> SiloData | StreamedData:
        """Load this silo's data; the class lists the options.

        Raises:
            TaskError: names the file, and what was expected in it.
        """
        train, test = self.read_both(read_options(self.name, options, self.options))
        return self.held(train, test)

    def held(self, train: Any, test: Any) -> SiloData:
        """Return both parts as arrays."""
        x_train, x_test = self.samples(train, test)
        classes = self.num_classes if isinstance(self.problem, Classes) else None
        scale, persons = self.scale_of(train), persons_of(train, test)
        return SiloData(
            *(x_train, train.y, x_test, test.y, classes, scale),
            persons=persons,
            missing=self.boosted,
        )

    def read_both(self, chosen: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the training and test parts as ``read`` gives them."""
        if chosen["seed"] < 0:
            raise TaskError(f"seed must be at least 0. Got {chosen['seed']}.")
        if not chosen["data"]:
            raise TaskError(f"task {self.name!r} needs option data: {self.expected()}.")
        self._notes, self._warnings = [], []
        place = _place(chosen["data"], self.expected())
        whole = self.read(place, chosen)
        if chosen["test-data"]:
            elsewhere = _place(chosen["test-data"], self.expected())
            test = self.read(elsewhere, chosen)
            return self.numbered(chosen, (whole, place, ""), (test, elsewhere, ""))
        if (both := self.parts(whole)) is not None:
            return self.numbered(chosen, (both[0], place, "train"), (both[1], place, "test"))
        (whole,) = self.numbered(chosen, (whole, place, ""))
        share, strata = chosen["test-share"], self._strata(whole.y)
        drawn = getattr(whole, "blocks", None) if whole.persons is None else whole.persons
        if not 0 < share < 1:
            raise TaskError(f"test-share must be above 0 and below 1. Got {share}.")
        if chosen["fold"]:
            fold = _fold(chosen["fold"])
            rows = split_by_fold(strata, *fold, seed=chosen["seed"], persons=drawn)
        else:
            rows = split_by_class(strata, share, seed=chosen["seed"], persons=drawn)
            if drawn is not None and not len(rows[1]):
                option, what = (
                    ("group", "persons") if whole.persons is not None else ("blocks",) * 2
                )
                raise TaskError(
                    f"no test samples can be held out of {str(place)!r}: by its {option}, they "
                    f"belong to {num_persons(drawn)} {what}, and training needs all of them, "
                    "because each is the only one with some class. Give separate data in "
                    "test-data."
                )
        return whole.take(rows[0]), whole.take(rows[1])

    def numbered(self, chosen: Mapping[str, Any], *read: tuple[Any, Path, str]) -> tuple[Any, ...]:
        """Return the parts, with person numbers if ``group`` is set.

        ``read`` has each part, where it was read from, and which part of that it is.
        """
        if not chosen["group"]:
            return tuple(part for part, _, _ in read)
        keys = [self.keys(part, place, chosen, which) for part, place, which in read]
        numbers = number_persons(*keys)
        return tuple(replace(one[0], persons=own) for one, own in zip(read, numbers, strict=True))

    def draws_test_part(self, options: Mapping[str, Option]) -> bool:
        """Return whether test samples are drawn from the data, by ``seed`` and ``fold``.

        They are not if ``test-data`` or ``data`` has separate test samples. Raises as ``load``.
        """
        chosen = read_options(self.name, options, self.options)
        if chosen["test-data"] or not chosen["data"]:
            return not chosen["test-data"]
        whole = self.read(_place(chosen["data"], self.expected()), chosen)
        return self.parts(whole) is None

    def _strata(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return (n,) strata; the test part gets the same share of each."""
        if isinstance(self.problem, Classes):
            return y
        if isinstance(self.problem, Survival):
            return y[:, 1].astype(np.int64)
        return np.zeros(len(y), np.int64)

    def parts(self, whole: Any) -> tuple[Any, Any] | None:
        """Return the training and test parts if the data distinguish them, else None."""
        return None

    @abstractmethod
    def expected(self) -> str:
        """Describe what ``data`` must be."""

    def notes(self) -> list[str]:
        """Return what the user should know about the data loaded last."""
        return self._notes

    def warnings(self) -> list[str]:
        """Return what is probably wrong with the data loaded last."""
        return self._warnings

    def counted(self) -> list[str]:
        """Return how much of the data loaded last is used and how much is left out.

        The text has numbers and reasons but no names, because it goes into a model's card.
        """
        return []

    def labels(self, found: Sequence[str], where: str) -> NDArray[np.int64]:
        """Convert class names to numbers; raise ``TaskError`` for an undeclared class."""
        numbers = {name: i for i, name in enumerate(self.classes)}
        number = {name: numbers.get(in_nfc(name), -1) for name in set(found)}
        unknown = sorted(name for name in number if number[name] < 0)
        if unknown:
            raise TaskError(
                f"{where} has class {unknown[0]!r}, which is not declared. Declared: "
                f"{', '.join(self.classes)}."
            )
        return np.array([number[name] for name in found], dtype=np.int64)


def in_nfc(text: str) -> str:
    """Return the text in Unicode NFC: in file names, macOS writes ö as o and two dots."""
    return unicodedata.normalize("NFC", text)


def load_declared(file: Path) -> DeclaredTask:
    """Read a task's declaration; raise ``TaskError`` naming every problem in it."""
    absent = f"there is no file {str(file)!r} that declares a task."
    fields = read_table(file, TaskError, absent=absent, tidy=in_nfc)
    kinds = _kinds()
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise TaskError(f"kind in {file.name} must be one of {', '.join(kinds)}. Got {kind!r}.")
    declaration, task = kinds[kind]
    made: DeclaredTask = task(checked(declaration, fields, file, TaskError))
    made.folder = file.parent
    return made


def persons_of(train: Any, test: Any) -> tuple[Persons, Persons] | None:
    """Return the person numbers of both parts, if known."""
    return None if train.persons is None else (train.persons, test.persons)


def _fold(text: str) -> tuple[int, int]:
    """Parse ``"2/5"`` as (2, 5)."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count or count < 2:
        raise TaskError(f'fold must be one of at least two folds, such as "2/5". Got {text!r}.')
    return number, count


def _place(text: str, expected: str) -> Path:
    place = place_of(text)
    try:
        there = place.exists()
    except OSError as error:
        raise TaskError(f"{str(place)!r} cannot be reached: {error.strerror}.") from None
    if not there:
        raise TaskError(f"there is no {str(place)!r}. Expected {expected}.")
    return place


def _kinds() -> dict[str, tuple[type[Declaration], type[Any]]]:
    from coterie.tasks.own.arrays import ArrayDeclaration, ArrayTask
    from coterie.tasks.own.image_folder import ImageFolder, ImageFolderDeclaration
    from coterie.tasks.own.table import Table
    from coterie.tasks.own.table_declaration import TableDeclaration

    return {
        "image-folder": (ImageFolderDeclaration, ImageFolder),
        "table": (TableDeclaration, Table),
        "npz": (ArrayDeclaration, ArrayTask),
    }
