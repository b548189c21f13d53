"""Stages: concerns around a silo's training and evaluation, each in one place.

They mirror the coordinator's (``coterie.strategies.rounds.stage``). Every message calls all stages
in order before any work; a training when the model is received, before the training, after it,
and when the result leaves; an evaluation when the model is received, and before it is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flwr.app import RecordDict

from coterie.client.work.weights import read_weights
from coterie.wire import Model

if TYPE_CHECKING:
    from coterie.client.home.best import Best
    from coterie.client.work.data import Data, Part
    from coterie.client.work.request import Request
    from coterie.client.work.session import Session
    from coterie.client.work.sgd import TrainPlan


class Training(Protocol):
    """A function that trains the session's model in place on some data, and returns the loss."""

    def __call__(self, part: Part, plan: TrainPlan, *, seed: int, **how: Any) -> float:
        """Train on ``part`` by ``plan``; return the loss as ``sgd.train``."""
        ...


@dataclass(kw_only=True)
class Holding:
    """The model that a silo holds, in the session: the received one, or what the silo made of it.

    Attributes:
        session: with that model, and without validation data.
        after: the round after which the silo holds it.
        metric: primary metric; empty: the task's.
        ends: whether the run ends with it, so that the silo may keep an earlier one.
        metrics: of the reply.
        best: the result of the model to keep, if it is the best of several rounds.
    """

    request: Request
    session: Session
    after: int
    metric: str
    ends: bool = False
    metrics: dict[str, float | int] = field(default_factory=dict)
    best: Best | None = None


@dataclass(kw_only=True)
class Work(Holding):
    """A training, from the message to the reply.

    Attributes:
        data: the session's data, less what this training holds out.
        packed: whether the model came packed, and is returned packed.
        staying: names of the arrays that do not leave.
        received: a copy of the received model, if a stage has asked for it.
        leaving: name of a record of the reply → its arrays.
    """

    training: Training
    data: Data
    plan: TrainPlan
    packed: bool
    staying: tuple[str, ...]
    received: Model = field(default_factory=dict)
    trained: Model = field(default_factory=dict)
    leaving: dict[str, Model] = field(default_factory=dict)

    def keep_received(self) -> None:
        """Copy the received model, which the training overwrites."""
        self.received = self.received or read_weights(self.session.model)


class Stage:
    """One concern, named by its folder in ``features``; every method does nothing by default.

    The result of ``begin`` is passed to later methods as ``mine``.
    """

    name: str

    def admit(self, request: Request) -> Request:
        """Refuse a message, or return it with the session that the work on it takes.

        As a silo joins a run (``request.joins``), refuse also what later messages would ask.
        """
        return request

    def answer(self, request: Request, work: Callable[[Request], RecordDict]) -> RecordDict:
        """Return the reply to an admitted message; ``work`` makes it, with the later stages."""
        return work(request)

    def receive(self, request: Request, model: Model | None) -> Model | None:
        """Return the model that a message means; ``model`` is None if the message has none."""
        return model

    def begin(self, request: Request, *, before: int, packed: bool) -> Any:
        """Read and check what a message asks for, before any work; raise ``RefusedError``.

        The silo's saved state is from the last round before ``before``; ``packed``: the model
        came packed.
        """
        return None

    def before(self, mine: Any, work: Work) -> None:
        """Act before the training, with the received model in the session."""

    def personalise(self, mine: Any, session: Session) -> bool:
        """Turn the model in the session into the silo's own; return whether it has changed."""
        return False

    def held(self, mine: Any, holding: Holding) -> None:
        """Look at the model that the silo holds; at the run's end, load the one to keep instead."""

    def after(self, mine: Any, work: Work) -> None:
        """Train further models after the training; the session's model may be overwritten."""

    def leave(self, mine: Any, work: Work) -> None:
        """Change what leaves, in ``work.leaving`` and ``work.metrics``."""

    def end(self, request: Request) -> None:
        """Remove what further rounds of the run would not need."""


class Begun:
    """All stages of one message, each with the result of its ``begin``."""

    def __init__(self, request: Request, *, before: int, packed: bool) -> None:
        self.all = [
            (stage, stage.begin(request, before=before, packed=packed)) for stage in request.stages
        ]

    def before(self, work: Work) -> None:
        for stage, mine in self.all:
            stage.before(mine, work)

    def personalise(self, session: Session) -> bool:
        changed = [stage.personalise(mine, session) for stage, mine in self.all]
        return any(changed)

    def held(self, holding: Holding) -> None:
        for stage, mine in self.all:
            stage.held(mine, holding)

    def after(self, work: Work) -> None:
        for stage, mine in self.all:
            stage.after(mine, work)

    def leave(self, work: Work) -> None:
        for stage, mine in self.all:
            stage.leave(mine, work)
