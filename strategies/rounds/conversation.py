"""Orders out, checked updates in: the only way to silos, for algorithms and stages alike."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message

from coterie import wire
from coterie.engine.port import Engine
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.strategies.rounds.algorithm import Algorithm, Answers, Order, Round, Updates
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.messages import evaluation_messages, membership, training_messages
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.replies import (
    Checked,
    add_costs,
    check_replies,
    costs_beside_training,
    costs_by_kind,
    read_evaluations,
    read_own_metrics,
)
from coterie.strategies.rounds.reports import Evaluation, Figures, Group, PhaseReport
from coterie.strategies.rounds.roster import Roster, Silo
from coterie.strategies.rounds.stage import Came, Held, Room, Scene, Stage, Stages

log = logging.getLogger("coterie.run")

SIZED = (wire.TRAIN, wire.COLD_START)
"""Kinds of work outside the round's own whose replies state the silo's training samples."""


class NobodyAnsweredError(Exception):
    """No training of this round counts; the text gives the reason for each silo."""


class AllSpentError(Exception):
    """No connected silo has any privacy budget left; the text gives the reason for each silo."""


class Line:
    """The connection to the silos of a run.

    Attributes:
        deadline_s: seconds, for every exchange.
        seconds: for each exchange since the stages last read this, silo → seconds until it answered
            or was given up.
        silent: silos that did not answer in this round while others waited.
    """

    def __init__(self, engine: Engine, deadline_s: float) -> None:
        self.engine, self.deadline_s = engine, deadline_s
        self.seconds: list[Mapping[str, float]] = []
        self.silent: set[str] = set()
        self._names: dict[int, str] = {}

    def present(self, roster: Roster, number: int) -> tuple[Silo, ...]:
        """Return the silos that are connected in a round."""
        here = roster.present(self.engine, number=number)
        self._names = {silo.node_id: silo.name for silo in here}
        self.silent.clear()
        return tuple(here)

    def exchange(
        self, messages: Sequence[Message], deadline_s: float | None = None
    ) -> list[Message | None]:
        """Return the reply to every message, or None if none came in time."""
        seconds: dict[int, float] = {}
        within = self.deadline_s if deadline_s is None else deadline_s
        replies = exchange(self.engine, messages, deadline_s=within, seconds=seconds)
        self.seconds.append({self._names[n]: s for n, s in seconds.items() if n in self._names})
        return replies


@dataclass(frozen=True)
class Run:
    """The constants of a run.

    Attributes:
        config, evaluate_config: entries of every training message, and of every evaluation.
        names: a metric's name in an app → its name here.
        on_event: called with what cannot wait for the round's report.
        unseen: the coordinator does not see silos' models.
        max_share: largest share of a group's weight that one silo has.
        keep_every: rounds after which silos keep their model each time; 0 = only after the last.
        name_members: silos receive the names of their group's members.
        action: ``train.<action>`` and ``evaluate.<action>`` take the places of ``train`` and
            ``evaluate``.
    """

    line: Line
    roster: Roster
    algorithm: Algorithm[Any]
    stages: tuple[Stage, ...]
    rounds: int
    config: Config
    evaluate_config: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    on_event: Callable[[str, Mapping[str, Any]], None] = lambda kind, fields: None
    unseen: bool = False
    max_share: float = 1.0
    evaluate: bool = True
    evaluate_every: int = 1
    keep_every: int = 0
    name_members: bool = False
    action: str = ""

    @property
    def wire_format(self) -> str:
        """The format in which silos send their updates."""
        return str(self.config.get(wire.WIRE_FORMAT, wire.FLOAT32))


def stated_sizes(updates: Updates) -> dict[str, float]:
    """Return silo → the samples that it states with its own training, or else with other work."""
    own_last = sorted(updates, key=lambda u: not u.purpose)
    return {u.silo.name: u.num_examples for u in own_last if not u.purpose or u.kind in SIZED}


class Clock:
    """Wall-clock seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self.seconds[phase] = round(now - self._last, 6)
        self._last = now


class Conversation:
    """A round's exchanges with the connected silos.

    Attributes:
        now: the round as the algorithm sees it, without the silos that are apart.
        apart: silo → its own model, for silos that train outside all groups.
        costs: kind of work, in addition to the training → its cost.
        left_out: silo → why its training does not count after all, found when sums were made.
        sizes: silo → the training samples that it stated with an answer.
        tested: silo that only tests → what it measured of the model that it was given.
    """

    def __init__(self, run: Run, stages: Stages, room: Room, clock: Clock) -> None:
        self.run, self.stages, self.room, self.clock = run, stages, room, clock
        if not (room.playing or room.final):
            raise NobodyAnsweredError(wire.reasons(dict(room.resting)))
        self.number = room.number - room.final
        self.apart: Mapping[str, Model] = room.apart
        self.now = self._round()
        self.costs: dict[str, PhaseReport] = {}
        self.left_out: dict[str, str] = {}
        self.sizes: dict[str, float] = {}
        self.tested: dict[str, Mapping[str, Any]] = {}

    def _round(self, without: Sequence[str] = ()) -> Round:
        away = {*self.apart, *without}
        silos = tuple(silo for silo in self.room.playing if silo.name not in away)
        more = self.run.on_event, self.run.unseen, self.run.max_share
        return Round(self.number, silos, self.run.config, *more)

    def scene(self, state: Any, *, training: bool = False) -> Scene:
        """Return what stages see now."""
        return Scene(self.now, self.room, self.run.algorithm, state, training)

    # ---------------------------------------------------------------- exchanges

    def hold(self, steps: Generator[Sequence[Order], Answers, Any], state: Any) -> Any:
        """Run a generator of questions to its end, and return its result.

        Every set of orders that it yields is one exchange.
        """
        answers: Answers | None = None
        while True:  # as often as it asks; every exchange has its deadline
            try:
                orders = next(steps) if answers is None else steps.send(answers)
            except StopIteration as end:
                return end.value
            assert all(order.purpose for order in orders), "the round's training comes later"
            answers = None  # need not be there beside those to come
            answers = self._answered(orders, state)

    def _answered(self, orders: Sequence[Order], state: Any) -> Answers:
        started = time.perf_counter()
        came = self._say(orders, state)
        answers = replace(came.checked, updates=list(came.updates)).answers
        seconds = time.perf_counter() - started
        self._add(costs_by_kind(came.orders, answers, seconds))
        self.sizes |= stated_sizes(answers)
        return answers

    def ask(self, state: Any) -> None:
        """Ask the stages' own questions."""
        for stage in self.stages.all:
            mine = self.stages.kept[stage.name]
            self.stages.kept[stage.name] = self.hold(stage.ask(mine, self.scene(state)), state)

    def train(self, orders: Sequence[Order], state: Any) -> Came:
        """Run the round's training.

        Raises:
            NobodyAnsweredError, AllSpentError: no silo's training counts.
        """
        came = self._say(orders, state, training=True)
        checked = came.checked
        if checked.left_out and all(u.purpose for u in checked.updates):
            why = wire.reasons(checked.left_out)
            spent = all(error.spent for order, error in checked.failed if not order.purpose)
            raise AllSpentError(why) if spent else NobodyAnsweredError(why)
        self._add(costs_beside_training(came.orders, checked.updates))
        self.apart = came.apart
        self.now = replace(self.now, silos=self._round(tuple(came.diverged)).silos)
        self.clock.lap("train")
        return came

    def settled(self, state: Any) -> Any:
        """Return the state after the last exchanges that it needs."""
        done = self.stages.settle(self.scene(state))
        self._add(done.costs)
        self.left_out |= done.left_out
        return done.state

    def _say(self, orders: Sequence[Order], state: Any, *, training: bool = False) -> Came:
        run, scene = self.run, self.scene(state, training=training)
        orders = self.stages.outgoing(scene, orders)
        messages = training_messages(
            orders,
            number=self.number,
            config=run.config,
            groups=run.algorithm.groups(state) if training else (),
            evaluate=training and run.evaluate and (self.number - 1) % run.evaluate_every == 0,
            action=run.action,
        )
        if training:
            self.clock.lap("prepare")
        replies = run.line.exchange(messages)
        del messages  # their models, encoded, need not be there beside the mean
        checked = check_replies(
            orders, replies, run.names, number=self.number, wire_format=run.wire_format
        )
        del replies
        require_understood(orders, checked, type(run.algorithm).__name__)
        came = Came(orders, checked, state, checked.updates, self.apart, checked.left_out)
        if training:
            came = replace(came, state=_without(run.algorithm, state, came.diverged))
        return self.stages.incoming(replace(scene, state=came.state), came)

    def _add(self, costs: Mapping[str, PhaseReport]) -> None:
        self.costs = add_costs(self.costs, costs)

    # ---------------------------------------------------------------- models that silos hold

    def groups(self, state: Any, silos: Sequence[Silo]) -> tuple[Group, ...]:
        """Return the groups of these silos that trained together; each silo apart is alone."""
        out = self.apart.keys() & {silo.name for silo in silos}
        groups = tuple(self.run.algorithm.groups(state)) if self.now.silos else ()
        if not out:
            return groups
        kept = [tuple(n for n in group if n not in out) for group in groups]
        return tuple(group for group in kept if group) + tuple((name,) for name in sorted(out))

    def held(self, state: Any) -> Held:
        """Return the model that each connected silo is given."""
        algorithm = self.run.algorithm
        models = {**algorithm.models(state), **self.apart}
        shared = algorithm.global_model(state)
        if shared is not None:
            models = {**dict.fromkeys((s.name for s in self.room.labelled), shared), **models}
        return self.stages.held(self.scene(state), Held(models))

    def evaluate(self, state: Any) -> tuple[dict[str, Evaluation], dict[str, Figures]]:
        """Evaluate the models of silos that do not report on them with their next training."""
        run = self.run
        models = {**run.algorithm.next_models(state), **self.apart}
        plain = [s for s in self.room.playing if not s.described and s.name in models]
        if not run.evaluate or not plain or self.number % run.evaluate_every:
            return {}, {}
        return self._evaluated(plain, models)

    def hand_over(
        self, state: Any, held: Held, silos: Sequence[Silo], *, ended_early: bool = False
    ) -> tuple[dict[str, Evaluation], dict[str, Figures]]:
        """Send silos their own models to keep, and return what they measure.

        Args:
            silos: those that trained; silos that only receive a model are added.
            ended_early: the run is over before its last round.
        """
        own = [silo for silo in silos if silo.name in held.models]
        own += [s for s in self.room.here if s.name in held.placed and s.name in held.models]
        entries = membership(
            own,
            self.groups(state, silos),
            placed=held.placed,
            name_members=self.run.name_members,
        )
        for name in entries:
            entries[name] |= held.entries.get(name, {})
        more = {wire.ENDED_EARLY: True} if ended_early else {}
        return self._evaluated(own, held.models, more, entries)

    def _evaluated(
        self,
        silos: Sequence[Silo],
        models: Mapping[str, Model],
        more: Mapping[str, Any] | None = None,
        own: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> tuple[dict[str, Evaluation], dict[str, Figures]]:
        run = self.run
        messages = evaluation_messages(
            silos,
            models,
            number=self.number,
            config=run.config,
            more={**run.evaluate_config, **(more or {})},
            own=own,
            action=run.action,
        )
        replies = run.line.exchange(messages)
        said, train = [], {silo.name for silo in self.room.labelled}
        for silo, reply in zip(silos, replies, strict=True):
            if silo.name in train:
                said.append((silo, reply))
            elif reply is None or reply.has_error():
                why = "it did not answer in time" if reply is None else reply.error.reason
                log.warning(
                    "silo %s, which does not train, did not take its model: %s", silo.name, why
                )
            elif silo.tests:
                self.tested |= _figures(*self._read([silo], [reply]))
        return self._read([silo for silo, _ in said], [reply for _, reply in said])

    def _read(
        self, silos: Sequence[Silo], replies: Sequence[Message | None]
    ) -> tuple[dict[str, Evaluation], dict[str, Figures]]:
        evaluation = read_evaluations(silos, replies, self.run.names)
        return evaluation, read_own_metrics(silos, replies, evaluation)


def _figures(
    evaluation: Mapping[str, Evaluation], metrics: Mapping[str, Figures]
) -> dict[str, Mapping[str, Any]]:
    """Return silo → its figures as JSON values; those that it keeps back are missing."""
    return {
        name: {
            wire.NUM_EXAMPLES: count,
            **{
                key: value
                for key, value in ((wire.LOSS, loss), (wire.ERROR, error))
                if math.isfinite(value)
            },
            **metrics.get(name, {}),
        }
        for name, (loss, error, count) in evaluation.items()
    }


def _without(algorithm: Algorithm[Any], state: Any, gone: Mapping[str, Any]) -> Any:
    if not gone:
        return state
    members = algorithm.members(state)
    kept = [tuple(n for n in group if n not in gone) for group in members.groups]
    return algorithm.with_members(state, members.grouped(filter(None, kept)))


def require_understood(orders: Sequence[Order], checked: Checked, algorithm: str) -> None:
    """End a run whose ClientApps answer no message of one of this project's own types.

    Otherwise such a strategy would run to its end with every silo alone. The check passes if a silo
    answers the type, if a silo that described itself is asked, or if a silo did not answer in time.

    Raises:
        FederationError: names the message type.
    """
    answered = {update.kind for update in checked.updates}
    foreign = {o.kind for o in orders} - {wire.TRAIN, wire.EVALUATE} - answered
    for kind in sorted(foreign):
        asked = [order.silo for order in orders if order.kind == kind]
        failed = [error for order, error in checked.failed if order.kind == kind]
        if any(silo.described for silo in asked) or not all(error.raised for error in failed):
            continue
        raise FederationError(
            f"{algorithm} needs message type {kind!r}, which none of the {len(asked)} connected "
            "nodes handles: their ClientApp has no function for it. Run coterie's own silos "
            "(`coterie silo`), add such a function, or use a strategy that works with any "
            f"ClientApp (see {wire.page('Choose a strategy')}). {asked[0].name} answered: "
            f"{failed[0]}",
            exit_code=EXIT_CONFIG,
        )
