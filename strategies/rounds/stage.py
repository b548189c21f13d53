"""Stages: concerns around every round, such as stragglers, each in one place.

The engine (``coterie.strategies.rounds.play``) calls all stages of a run in order at seven points
of a round: when it decides who takes part, for questions before the training, when orders go out,
when checked replies come in, when the algorithm has a new state, when silos are given their models,
and when the round is over. Stages do not know each other. A stage remembers a frozen value, which
the run's checkpoints keep under the stage's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coterie.strategies.rounds.algorithm import Algorithm, Exchanges, Order, Round, Update
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.replies import Checked, add_costs
from coterie.strategies.rounds.reports import Group, PhaseReport
from coterie.strategies.rounds.roster import Silo


@dataclass(frozen=True)
class Room:
    """The silos connected in a round, and which of them train in it.

    Attributes:
        state: the algorithm's, before the round.
        resting: silo → why it is not asked to train.
        apart: silo → its own model, for silos that train outside all groups.
        final: the last round is over, and no silo trains any more.
    """

    number: int
    here: tuple[Silo, ...]
    algorithm: Algorithm[Any]
    state: Any
    resting: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, Model] = field(default_factory=dict)
    final: bool = False

    @property
    def labelled(self) -> tuple[Silo, ...]:
        """Silos that can train."""
        return tuple(silo for silo in self.here if silo.trains)

    @property
    def playing(self) -> tuple[Silo, ...]:
        """Silos that are asked to train."""
        return tuple(silo for silo in self.labelled if silo.name not in self.resting)


@dataclass(frozen=True)
class Scene:
    """An exchange as stages see it; ``now`` has no silos that are apart.

    ``training`` is True for the round's own training, and False for a question before it.
    """

    now: Round
    room: Room
    algorithm: Algorithm[Any]
    state: Any
    training: bool = False


@dataclass(frozen=True)
class Came:
    """The outcome of an exchange.

    Attributes:
        state: the algorithm's, before it absorbs the updates.
        updates: those that count.
        apart: silo → its own model, for silos that train outside all groups from now on.
        left_out: silo → why its training does not count.
        notes: entries of the round's record.
    """

    orders: Sequence[Order]
    checked: Checked
    state: Any
    updates: Sequence[Update]
    apart: Mapping[str, Model]
    left_out: Mapping[str, str]
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def diverged(self) -> dict[str, Model]:
        """Silo → the model from which the round's own training ended in NaN or infinity."""
        failed = self.checked.failed
        return {o.silo.name: o.model for o, why in failed if why.diverged and not o.purpose}

    @property
    def trained(self) -> list[Update]:
        """The updates of the round's own training, from silos that count or are apart."""
        own = [u for u in self.updates if not u.purpose]
        own += [u for u in self.checked.updates if u.silo.name in self.apart and not u.purpose]
        return sorted(own, key=lambda u: u.silo.name)


@dataclass(frozen=True)
class Settled:
    """A state after a stage's last exchanges for it; ``costs`` are by kind of work.

    ``mine`` is what the stage remembers from now on, if that changed.
    """

    state: Any
    left_out: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, PhaseReport] = field(default_factory=dict)
    mine: Any = None


@dataclass(frozen=True)
class Held:
    """The models that silos are given.

    Attributes:
        entries: silo → further entries of its message.
        placed: silo that trains in no group → the group whose model it gets.
        notes: entries of the last round's record.
    """

    models: Mapping[str, Model]
    entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    placed: Mapping[str, Group] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Played:
    """The outcome of a round's training.

    Attributes:
        state: the algorithm's, after the training.
        silent: silos that did not answer another question of this round.
        seconds: for each exchange since the previous round's training, silo → seconds until it
            answered or was given up.
        deadline_s: seconds, for every exchange.
    """

    now: Round
    room: Room
    algorithm: Algorithm[Any]
    state: Any
    came: Came
    silent: frozenset[str]
    seconds: Sequence[Mapping[str, float]]
    deadline_s: float


@dataclass(frozen=True)
class Outcome:
    """A stage's report when a round is over; ``ended_early`` is why the run ends here, or empty."""

    notes: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    ended_early: str = ""


class Stage:
    """One concern; every method does nothing by default.

    Methods take what the stage remembers as ``mine``; those that may change it return it first.

    Attributes:
        name: its folder in ``features``.
        first: what it remembers before round 1.
    """

    name: ClassVar[str]
    first: ClassVar[Any] = None

    def admit(self, mine: Any, room: Room) -> tuple[Any, Room]:
        """Return the room with the silos that rest or are apart."""
        return mine, room

    def ask(self, mine: Any, scene: Scene) -> Exchanges[Any]:
        """Yield questions before the training; return what the stage remembers from now on."""
        return mine
        yield

    def outgoing(self, mine: Any, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Return the orders to send."""
        return list(orders)

    def incoming(self, mine: Any, scene: Scene, came: Came) -> tuple[Any, Came]:
        """Return the outcome of an exchange, with what counts."""
        return mine, came

    def settle(self, mine: Any, scene: Scene, state: Any) -> Settled:
        """Return the state after the last exchanges that it needs."""
        return Settled(state)

    def held(self, mine: Any, scene: Scene, held: Held) -> Held:
        """Return the models that silos are given, with this stage's changes."""
        return held

    def after(self, mine: Any, played: Played) -> tuple[Any, Outcome]:
        """Return what the stage remembers from now on, and its report on the round."""
        return mine, Outcome()


class Stages:
    """All stages of a run during a round, called in order.

    ``kept``: name → what the stage remembers, from the previous checkpoint.
    """

    def __init__(self, stages: Sequence[Stage], kept: Mapping[str, Any]) -> None:
        self.all = tuple(stages)
        self.kept = {stage.name: kept.get(stage.name, stage.first) for stage in self.all}

    def admit(self, room: Room) -> Room:
        for stage in self.all:
            self.kept[stage.name], room = stage.admit(self.kept[stage.name], room)
        return room

    def outgoing(self, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        for stage in self.all:
            orders = stage.outgoing(self.kept[stage.name], scene, orders)
        return list(orders)

    def incoming(self, scene: Scene, came: Came) -> Came:
        for stage in self.all:
            self.kept[stage.name], came = stage.incoming(self.kept[stage.name], scene, came)
        return came

    def settle(self, scene: Scene) -> Settled:
        done = Settled(scene.state)
        for stage in self.all:
            more = stage.settle(self.kept[stage.name], scene, done.state)
            if more.mine is not None:
                self.kept[stage.name] = more.mine
            left_out = {**done.left_out, **more.left_out}
            done = Settled(more.state, left_out, add_costs(done.costs, more.costs))
        return done

    def held(self, scene: Scene, held: Held) -> Held:
        for stage in self.all:
            held = stage.held(self.kept[stage.name], scene, held)
        return held

    def after(self, played: Played) -> Outcome:
        said = Outcome()
        for stage in self.all:
            self.kept[stage.name], more = stage.after(self.kept[stage.name], played)
            said = Outcome(
                {**said.notes, **more.notes},
                {**said.left_out, **more.left_out},
                said.ended_early or more.ended_early,
            )
        return said
