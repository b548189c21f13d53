"""Sessions: the task, data and model that a silo keeps loaded between messages.

A process opens one session per silo, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import Any

import numpy as np
import torch
from flwr.app import Context, MetricRecord
from torch import nn
from torch.nn.parameter import is_lazy

from coterie import wire
from coterie.client.home.fingerprints import mark_of
from coterie.client.home.policy import NAMES, permitted
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.home.studies import study_of, tasks_of
from coterie.client.work import sgd
from coterie.client.work.data import Data, Held, Part, to_device
from coterie.client.work.generators import describe_head
from coterie.client.work.measure import leading
from coterie.client.work.sgd import TrainPlan
from coterie.client.work.weights import frozen_digest, travelling
from coterie.system.device import device_of, seed_torch
from coterie.tasks import Task, load_task
from coterie.tasks.base import ColumnScale, Samples, SiloData, StreamedData, TaskError, leaves
from coterie.tasks.families import FAMILY, families_of, of_family
from coterie.tasks.options import place_of
from coterie.tasks.problems import Classes, Masks
from coterie.tasks.simulation import load_silos
from coterie.tasks.trees import takes_missing
from coterie.wire import IN_ORDER, Description, Parts
from coterie.wire.description import FOLLOWING

_sessions: dict[str, Session] = {}
_opening = Lock()
_of_runs: dict[tuple[int, str], tuple[Task, Task, nn.Module, str]] = {}
"""(id of a task, a run's keys) → that task, the run's task, its model, its ``frozen_digest``."""
MAX_OF_RUNS = 4
TESTED = 0.5
"""Share of its data on which a silo that only tests measures; on the rest its group is chosen."""


@dataclass(frozen=True)
class Loop:
    """How a silo trains; a feature may put another loop in place of the ordinary one.

    Attributes:
        train: with the arguments of ``sgd.train``, which None stands for.
        figures: what the cards of models say about how they were trained.
        staying: metrics that do not leave, whatever the policy says.
    """

    train: Callable[..., float] | None = None
    figures: Callable[[], dict[str, float]] = dict
    staying: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Session:
    """A silo ready to work: its task, data and model.

    ``model`` is scratch space: messages overwrite the arrays that travel. ``scale`` and
    ``data_hash`` cover all training data and go into the card of a saved model. ``frozen`` is
    the digest of the arrays that do not travel (``weights.frozen_digest``), ``shapes`` are the
    shapes of a sample's inputs. ``num_examples`` counts training samples, including those that a
    run holds out; ``work`` is the current run, round and purpose; ``loop`` trains the model. Where
    the task has several families of models, ``families`` has a session for each, in which the work
    is done, and this one describes them together, with the data as the network sees them.
    """

    settings: SiloSettings
    task: Task
    data: Data
    model: nn.Module
    device: torch.device
    schema: str
    parts: Parts
    scale: ColumnScale | None = None
    data_hash: str = ""
    frozen: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    num_examples: int = 0
    work: tuple[str, int, str] = ("", 0, "")
    loop: Loop = field(default_factory=Loop)
    families: Mapping[str, Session] = field(default_factory=dict)

    @property
    def whole(self) -> Sequence[Session]:
        """The sessions in which a model can be trained: those of the families, or this one."""
        return tuple(self.families.values()) or (self,)

    def train(self, part: Part, plan: TrainPlan, **how: Any) -> float:
        """Train the model in place by the silo's loop; arguments and result as ``sgd.train``."""
        train = self.loop.train or sgd.train
        return train(self.task, self.model, part, plan, **how)

    def permitted(self, metrics: Mapping[str, float | int]) -> MetricRecord:
        """Return the metrics that may leave this silo."""
        return permitted(metrics, self.settings.policy, staying=self.loop.staying)

    def describe(self) -> Description:
        """Return what the silo reports about itself."""
        parameters = {name for name, _ in self.model.named_parameters()}
        return Description(
            name=self.settings.name,
            num_examples=len(self.data.test if self.settings.tests else self.data.train),
            task=self.task.name,
            schema=self.schema,
            parts=self.parts,
            alpha=self.settings.alpha,
            device=str(self.device),
            versions={"coterie": _version("coterie"), "torch": torch.__version__},
            min_group_size=self.settings.policy.min_group_size,
            max_local_epochs=self.settings.policy.max_local_epochs,
            buffers=tuple(name for name in travelling(self.model) if name not in parameters),
            pooled_columns=self.task.pooled_columns,
            metric=leading(self.task).name,
            unit=getattr(self.task.problem, "unit", ""),
            head=describe_head(self.task, self.model),
            private=self.settings.privacy is not None,
            unlabelled=bool(self.settings.unlabelled),
            tests=self.settings.tests,
            mark="" if self.settings.privacy else mark_of(self.settings.home, self.data_digest()),
            tasks=tasks_of(self.settings) if self.settings.also else (self.task.name,),
        )

    def data_digest(self) -> str:
        """Hash training samples and targets; skip masks that would have to be read."""
        train, known = self.data.train, hashlib.sha256(self.data_hash.encode())
        if not self.data_hash or (
            isinstance(self.task.problem, Masks) and not isinstance(train, Held)
        ):
            return self.data_hash
        for leaf in leaves(train.targets()):
            known.update(np.ascontiguousarray(leaf.cpu().numpy()).data)
        return known.hexdigest()

    def describe_elsewhere(self) -> Description:
        """Return the description for a run whose task is not served: the tasks that are."""
        return Description(
            name=self.settings.name,
            num_examples=0,
            task=self.task.name,
            schema="",
            versions={"coterie": _version("coterie")},
            tasks=tasks_of(self.settings),
        )

    def fresh_model(self, seed: int) -> nn.Module:
        """Return a newly initialised model; the same seed gives the same model on every silo."""
        seed_torch(seed)
        return self.task.model().to(self.device)


def session_of(context: Context, task: str = "") -> Session:
    """Return the session for this node's settings, opened once per process.

    ``task`` names one of the silo's tasks; for any other name, the silo's first task is used.
    Raises as ``open_session``.
    """
    settings = SiloSettings.from_node_config(context.node_config, node_id=context.node_id)
    settings = study_of(settings, task)
    with _opening:
        key = _key(settings)
        if key not in _sessions:
            _sessions[key] = open_session(settings)
        return _sessions[key]


def keep_open(sessions: Sequence[Session]) -> None:
    """Register sessions for ``session_of``."""
    with _opening:
        _sessions.update({_key(session.settings): session for session in sessions})


def close_all() -> None:
    """Forget every session of this process."""
    with _opening:
        _sessions.clear()


def of_run(session: Session, values: Mapping[str, object]) -> Session:
    """Return the session with task and model configured by a run's keys (``Task.of_run``).

    Results for the latest runs are cached and shared by silos that share a task. Raises
    ``TaskError`` if a key or its value is not allowed, or no model can be made with it.
    """
    if not values:
        return session
    if own := session.families.get(str(values.get(FAMILY))):
        return own
    with _opening:
        task = session.task.of_run(values)
        key = (id(session.task), json.dumps(dict(values), sort_keys=True))
        if key not in _of_runs:
            model = _model_on(task, session.device)
            for old in list(_of_runs)[: -MAX_OF_RUNS + 1]:
                del _of_runs[old]
            _of_runs[key] = session.task, task, model, frozen_digest(model)
        _, task, model, frozen = _of_runs[key]
    schema = _schema(task, model, session.shapes, frozen)
    parts = _parts(task, model, session.shapes)
    return replace(session, task=task, model=model, schema=schema, parts=parts, frozen=frozen)


def _key(settings: SiloSettings) -> str:
    return json.dumps(settings.to_node_config(), sort_keys=True, default=str)


def open_session(settings: SiloSettings) -> Session:
    """Load task and data and put them on the device; errors as ``open_sessions``."""
    (session,) = open_sessions([settings])
    return session


def open_sessions(settings: Sequence[SiloSettings]) -> list[Session]:
    """Open sessions that share task, device and model, for silos that work one at a time.

    ``settings`` belong to one silo, or to several that differ only in their names and in the
    task option ``silo``; their common data is read once. Raises ``TaskError`` if task or data
    cannot be loaded, ``SettingsError`` if the device is not available.
    """
    common = settings[0]
    for own in settings:
        _check_metrics(own)
    if common.threads:
        torch.set_num_threads(common.threads)
    try:
        device = device_of(common.device)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    task = load_task(common.task)
    settings = [parted(task, own) for own in settings]
    if not (names := families_of(task)):
        return _opened(task, settings, device)
    opened = zip(*(_opened(of_family(task, n), settings, device) for n in names), strict=True)
    model = _model_on(task, device)
    return [_together(task, model, dict(zip(names, own, strict=True))) for own in opened]


def _together(task: Task, model: nn.Module, own: Mapping[str, Session]) -> Session:
    """Return a silo's session for a task with families, whose schema is that of all of them."""
    usual, frozen = own[wire.NETWORK], frozen_digest(model)
    schema, parts = _schema(task, model, usual.shapes, frozen), _parts(task, model, usual.shapes)
    families = {name: replace(one, schema=schema, parts=parts) for name, one in own.items()}
    task = task.of_scale(usual.scale)
    common = replace(usual, task=task, model=model, schema=schema, parts=parts, frozen=frozen)
    return replace(common, families=families)


def _opened(task: Task, settings: Sequence[SiloSettings], device: torch.device) -> list[Session]:
    loaded = _load(task, settings)
    model = _model_on(task, device)
    frozen = frozen_digest(model)
    on_device: dict[int, torch.Tensor] = {}
    sessions = []
    for own, data in zip(settings, loaded, strict=True):
        moved = to_device(data, device, on_device, workers=own.workers)
        if len(settings) == 1 and not own.unlabelled:
            _check_targets(task, moved)
        inputs = leaves(moved.train.at(torch.zeros(1).long())[0])
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in inputs)
        schema, parts = _schema(task, model, shapes, frozen), _parts(task, model, shapes)
        known = hash_of(data) if own.home else ""  # without a home no model is kept
        sessions.append(
            Session(
                settings=own,
                task=task.of_scale(data.scale),
                data=moved,
                model=model,
                device=device,
                schema=schema,
                parts=parts,
                scale=data.scale,
                data_hash=known,
                frozen=frozen,
                shapes=shapes,
                num_examples=len(moved.train),
            )
        )
    return sessions


def parted(task: Task, own: SiloSettings) -> SiloSettings:
    """Let a silo that only tests choose its group on half of its data, unless it says otherwise."""
    said = {"test-share", "test-data", "fold"} & own.options.keys()
    if not own.tests or said or "test-share" not in getattr(task, "options", ()):
        return own
    return replace(own, options={**own.options, "test-share": TESTED})


def _load(task: Task, settings: Sequence[SiloSettings]) -> list[SiloData | StreamedData | Samples]:
    have = [own.options for own in settings if not own.unlabelled]
    one = len(have) < 2
    loaded = iter([task.load(own) for own in have] if one else load_silos(task, have))
    return [read_unlabelled(task, own) if own.unlabelled else next(loaded) for own in settings]


def read_unlabelled(task: Task, settings: SiloSettings) -> Samples:
    """Load the samples of a silo that has no labels yet.

    Raises ``TaskError`` if they cannot be read, are empty or not finite, or if the task scales
    targets per silo.
    """
    place = place_of(settings.unlabelled)
    if not place.exists():
        raise TaskError(f"unlabelled: there is no file or folder {place}.")
    if task.scaled_targets and not task.pooled_columns:
        raise TaskError(
            f"unlabelled: task {task.name!r} scales its targets by each silo's mean and "
            "deviation, which a silo without labels lacks: its model's answers would have no "
            'unit. Declare scale = "federation" (of a table; of arrays, within target).'
        )
    found = task.inputs(place, settings.options)
    if not all(len(leaf) for leaf in leaves(found.x)):
        raise TaskError(f"unlabelled: {place} contains no samples.")
    odd = np.isinf if takes_missing(task) else lambda leaf: ~np.isfinite(leaf)
    if any(odd(leaf).any() for leaf in leaves(found.x)):
        raise TaskError(f"unlabelled: {place} contains NaN or infinite values. Clean it first.")
    return found


def _check_metrics(settings: SiloSettings) -> None:
    if unknown := settings.policy.unknown_metrics():
        raise SettingsError(
            f"share_metrics in [policy] names {unknown[0]!r}, which no task has. It may name "
            f"{', '.join(NAMES)}; only your own app (--app) may have others."
        )


def model_of(task: Task) -> nn.Module:
    """Return a model of the task whose frozen part is the same at every silo.

    Arrays from a file are loaded from it; arrays that the task draws at random use a fixed seed.
    """
    with torch.random.fork_rng(devices=[]):
        seed_torch(0)
        return task.model()


def _model_on(task: Task, device: torch.device) -> nn.Module:
    model = model_of(task)
    _check_travelling(task, model)
    return model.to(device)


def _check_travelling(task: Task, model: nn.Module) -> None:
    """Raise ``TaskError`` if nothing of the model is trained or an array cannot be sent."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TaskError(
                f"array {name!r} has no shape yet: its layer is lazy. Give the layer its sizes, "
                "or call the model on one sample before the task's model() returns."
            )
    travels = travelling(model)
    if not travels:
        raise TaskError(
            f"task {task.name!r} trains nothing: every parameter of its model is frozen "
            "(requires_grad = False). Leave at least its head trainable."
        )
    for name, tensor in travels.items():
        if why := _cannot_travel(tensor):
            raise TaskError(f"array {name!r} {why}")


def _cannot_travel(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be sent as an array; empty if it can."""
    if tensor.is_meta or tensor.layout != torch.strided:
        what = "on the meta device" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        return f"must be dense and have values. It is {what}."
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex():
        return (
            f"must contain real numbers. It is {kind}. Store its real and imaginary parts as "
            "two arrays, or register an auxiliary buffer with persistent=False."
        )
    if tensor.dtype == torch.bfloat16:
        return (
            "is of type bfloat16, which numpy lacks. Trained arrays must be float32, with "
            "precision = bfloat16 in the run; frozen arrays may have any type."
        )
    try:
        numbers = tensor.cpu().numpy()
    except TypeError:
        return f"is of type {kind}, which numpy lacks. Trained arrays must be float32."
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        return (
            "contains NaN or infinity before any training. Initialise it, or register an "
            "auxiliary buffer, such as a mask, with persistent=False."
        )
    return ""


def hash_of(data: SiloData | StreamedData | Samples) -> str:
    """Return the SHA-256 of the training samples as the model sees them.

    For a dataset only the number of samples and the first one are hashed: reading all would take
    as long as training. Samples without labels give an empty string: no model is trained on
    them. Persons and blocks are included if given, because they determine what is held out.
    """
    if isinstance(data, Samples):
        return ""
    known = hashlib.sha256()
    inputs = data.x_train if isinstance(data, SiloData) else [len(data.train), data.train[0][0]]  # type: ignore[arg-type]
    for leaf in leaves(inputs):
        known.update(np.ascontiguousarray(leaf).data)
    for whose in (*(data.persons or ()), getattr(data, "blocks", None)):
        if whose is not None:
            known.update(np.ascontiguousarray(whose, np.int64).data)
    return known.hexdigest()


def _check_targets(task: Task, data: Data) -> None:
    parts = {"training": data.train, "test": data.test, "validation": data.validation}
    for name, part in parts.items():
        if part is None or (isinstance(task.problem, Masks) and not isinstance(part, Held)):
            continue  # to read every mask of a dataset would take as long as training
        for leaf in leaves(part.targets()):
            task.problem.check(leaf.cpu().numpy(), name)


def _schema(task: Task, model: nn.Module, shapes: Sequence[Sequence[int]], frozen: str) -> str:
    """Return a fingerprint of what silos must have in common to share a model, without data.

    If there is a weights file, or a frozen part without one, its name and the start of its
    SHA-256 follow after a slash, so that the coordinator can report which silo differs.
    """
    described = _arrays_of(model)
    own = getattr(task, "fingerprint", "")  # of a declared task: columns, categories, classes
    inputs = [list(shape) for shape in shapes]
    shape = inputs[0] if len(inputs) == 1 else inputs
    common: list[object] = [task.name, task.num_classes, shape, described]
    if not isinstance(task.problem, Classes) or task.metric:
        scaled = ["targets scaled"] if task.scaled_targets else []
        common.append([task.problem.kind, leading(task).name, *scaled])
    if frozen:
        common.append({"frozen": frozen})
    text = json.dumps([*common, own] if own else common)
    schema = _digest(text)
    what, digest = task.weights or ("frozen-arrays", frozen)
    called = "".join(c if c.isascii() and (c.isalnum() or c in ".-") else "_" for c in what)[-64:]
    return f"{schema}/{called}:{digest[:16]}" if digest else schema


def _parts(task: Task, model: nn.Module, shapes: Sequence[Sequence[int]]) -> Parts:
    """Return a digest of each part of the schema; lists are sorted if their order may vary.

    The digests do not depend on the data: a task declares the same at all its silos.
    """
    arrays, shape = FOLLOWING
    parts: dict[str, Any] = {arrays: _arrays_of(model), shape: [list(one) for one in shapes]}
    for key, value in task.says().items():
        parts[key.replace("_", "-")] = _sorted(value)
        if isinstance(value, list | dict):
            parts[IN_ORDER + key.replace("_", "-")] = value
    return {key: _digest(json.dumps(value)) for key, value in parts.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sorted(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(map(_sorted, value), key=json.dumps)
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return value


def _arrays_of(model: nn.Module) -> list[object]:
    return [
        [name, list(tensor.shape), str(tensor.dtype)] for name, tensor in travelling(model).items()
    ]


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
