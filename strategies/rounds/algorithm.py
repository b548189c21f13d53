"""What an algorithm is: a frozen value, its options, with a few pure functions on a state.

    state = first(w⁰)
    each round:  state = welcome(state, who is new)           newcomers, and what silos state today
                 state = prepare(state)                        exchanges before the training, if any
                 state, orders = orders(state)                 what each silo does
                 state = absorb(state, updates)                the outcome

The engine (``coterie.strategies.strategy``) holds an algorithm and does everything else: it
looks who is here, lets newcomers in, sends orders, checks replies, keeps sizes and smallest groups
up to date, reports and commits. An algorithm inherits from no other and keeps nothing between two
calls; all that the next round depends on is in its state, a frozen value with ``members``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, cast

import numpy as np
from pydantic import BeforeValidator, InstanceOf

from coterie import wire
from coterie.strategies.rounds.handles import (
    Arrays,
    Change,
    Masked,
    Model,
    arrays_of,
    changed,
    is_seen,
)
from coterie.strategies.rounds.members import Members, Plain
from coterie.strategies.rounds.models import Aggregate, is_statistic
from coterie.strategies.rounds.options import Config, Options, Scalar
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo
from coterie.wire.updates import JOINT

State = TypeVar("State")

DEFAULT_BATCH = 32
"""Batch size of a silo that is told none."""


@dataclass(frozen=True)
class Round:
    """What an algorithm knows of the present round beside its state.

    Attributes:
        number: from 1.
        silos: who is here, sorted by name.
        config: entries of every training message of the run.
        announce: tells at once what cannot wait for the round's report: a word, and JSON values.
        unseen: silos' models are not seen here: what stands for them is ``Masked``.
    """

    number: int
    silos: tuple[Silo, ...]
    config: Config = field(default_factory=dict)
    announce: Callable[[str, Mapping[str, Any]], None] = lambda kind, fields: None
    unseen: bool = False

    @cached_property
    def here(self) -> dict[str, Silo]:
        """Name → silo."""
        return {silo.name: silo for silo in self.silos}

    @property
    def rounds(self) -> int:
        """How many the run has; 0 if that is not known."""
        return int(self.config.get(wire.ROUNDS, 0))

    @property
    def names(self) -> Group:
        """Who is here."""
        return tuple(self.here)


@dataclass(frozen=True)
class Compared:
    """What of their updates silos are compared by, in a secure run.

    Attributes:
        of: ``parameters``, or with running statistics ``parameters+buffers``.
        layers: ``all`` together, ``each`` module by itself, or those with a prefix.
    """

    of: str = "parameters"
    layers: str = "all"


@dataclass(frozen=True)
class Order:
    """One piece of work for one silo: train this model.

    Attributes:
        silo: who.
        model: what to start from.
        purpose: empty for the round's training; names any other, which ``absorb`` then finds
            under ``Update.purpose`` and which has its own randomness at the silo. In the round's
            own exchange, purposes that differ in a number at their end (``trial-3``) are reported
            as one.
        config: entries that replace the round's configuration.
        kind: message type: ``train``, or a phase, ``train.<phase>`` or ``evaluate.<phase>``.
        extras: further arrays that the work needs, by record name; never ``arrays``.
        rounded: the model travels in 16 bits a number; for the engine to say.
        sketches: where the silo keeps what it trains: name → numbers of each sketch that its reply
            has in the model's place; None: its reply has a model. For the engine to say.
    """

    silo: Silo
    model: Model
    purpose: str = ""
    config: Config = field(default_factory=dict)
    kind: str = wire.TRAIN
    extras: Mapping[str, Arrays] = field(default_factory=dict)
    rounded: bool = False
    sketches: Mapping[str, int] | None = None

    @property
    def evaluates(self) -> bool:
        """Whether the reply brings figures and no arrays."""
        return self.kind.split(".")[0] == wire.EVALUATE

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        if self.rounded:
            model = wire.num_rounded_bytes(arrays_of(self.model), exact=self.silo.buffers)
            return model + num_bytes(*self.extras.values())
        return num_bytes(self.model, *self.extras.values())


@dataclass(frozen=True)
class Update:
    """A reply that passed every check.

    Attributes:
        silo: who trained.
        start: the model it was sent.
        model: what came back; same names, shapes and types, all finite. Of an evaluation,
            ``start``.
        num_examples: its weight, > 0.
        metrics: the other scalars of the reply.
        figures: what its app measured beyond what the conversation itself has.
        purpose, kind: of the order.
        extras: further arrays of the reply, by record name, all finite; their names and shapes
            are for the algorithm to check.
        bytes_sent, bytes_received: of arrays.
        aggregate: how it is put together with others.
    """

    silo: Silo
    start: Model
    model: Model
    num_examples: float
    metrics: Mapping[str, float]
    purpose: str = ""
    kind: str = wire.TRAIN
    extras: Mapping[str, Arrays] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0
    figures: Mapping[str, wire.Value] = field(default_factory=dict)
    aggregate: Aggregate = "mean"

    def noise_in(self, compared: Arrays | None = None) -> float:
        """Expected squared norm of the noise in what is compared of the update, as its silo states
        it; 0 if it states none.

        Args:
            compared: some of the update's arrays, or sketches of them: the share of the parameters
                that these are has that share of the noise. None: the whole update.
        """
        stated = self.metrics.get(wire.UPDATE_NOISE, 0.0)
        if not 0 < stated < inf:
            return 0.0
        if compared is None:
            return stated
        model = self.model.origin if isinstance(self.model, Masked) else arrays_of(self.model)
        sizes = {
            name: array.size
            for name, array in model.items()
            if array.dtype.kind == "f" and not is_statistic(name, self.silo.buffers)
        }
        if model is not self.model:  # a sketch is called by the beginning of its arrays' names
            begins = tuple(name.removesuffix(JOINT) for name in compared)
            among = [size for name, size in sizes.items() if name.startswith(begins)]
        else:
            among = [sizes.get(name, 0) for name in compared]
        return stated * sum(among) / max(sum(sizes.values()), 1)


Updates = Sequence[Update]


class Answers(list[Update]):
    """The updates of an exchange that passed the checks, sorted by silo, and the other silos.

    Attributes:
        missing: silo → why its answer does not count.
        refused: those of them that will not do what was asked, by their own conditions.
    """

    def __init__(
        self,
        updates: Iterable[Update] = (),
        missing: Mapping[str, str] | None = None,
        refused: Iterable[str] = (),
    ) -> None:
        super().__init__(updates)
        self.missing = dict(missing or {})
        self.refused = frozenset(refused)


Exchanges = Generator[Sequence[Order], Answers, State]
"""Sets of orders, each answered by what the silos reply to it; returns a state."""


class Algorithm(Options, Generic[State]):
    """An algorithm; see the module. Its fields are its options."""

    # ---------------------------------------------------------------- the rounds

    remembers: ClassVar[type[Any]] = Plain
    """The first state, made of members alone; by default one that remembers nothing else."""
    alone: ClassVar[bool] = False
    """Whether no silo ever gets anything of another's, so that no influence is to be bounded."""
    hands_on: ClassVar[bool] = False
    """Whether a group's model may be given to newcomers, that of a silo alone in it too."""

    outdated: ClassVar[str] = ""
    """What it goes on to use of a silo that comes with other data than before, in words: what it
    knows of silos and does not find out again (``renew``); empty: nothing."""

    works_unseen: ClassVar[bool] = False
    """Whether it can do without seeing silos' models: it only takes means of them, whose weights
    are the silos' samples or equal, and compares their updates by ``models.difference``."""

    models_in: ClassVar[tuple[str, ...]] = ()
    """Fields of its state, beside its members, that are mappings or tuples of models."""

    def insecure(self) -> str:
        """Why these options cannot be had in a secure run, although others can; empty: they can."""
        return ""

    def compared(self, state: State) -> Compared | None:
        """What silos are to sketch of the updates that they make next; None compares none."""
        return None

    @property
    def averages(self) -> bool:
        """Whether every group's model is ``kit.average`` of updates, which other means may replace;
        not if silos are alone, or weigh by what the algorithm finds."""
        return True

    @property
    def crosses(self) -> bool:
        """Whether it averages models that began apart: then nobody has more than its share of all,
        too, where others bound it among those that trained the same model."""
        return False

    def first(self, initial: Arrays) -> State:
        """The state before round 1."""
        return cast(State, self.remembers(Members(initial)))

    def newcomer_model(self, state: State) -> Model:
        """The model that a silo holds when it comes for the first time; w⁰ by default."""
        return self.members(state).initial

    def welcome(self, state: State, new: frozenset[str], now: Round) -> State:
        """The state with these silos in it, of those here, which were never in it before."""
        return state

    def renew(self, state: State, changed: frozenset[str], now: Round) -> State:
        """The state without what it knew of the data of these silos, of those here, which come with
        other data than before."""
        return state

    def prepare(self, state: State, now: Round) -> Exchanges[State]:
        """Exchanges before the round's training. By default there are none.

        It yields orders, each with a purpose of its own, and is sent the updates that passed the
        checks; who is missing did not answer in time or wrongly: ``Answers`` and the log say why.
        """
        return state
        yield

    def orders(self, state: State, now: Round) -> tuple[State, list[Order]]:
        """What each silo that is here does in this round."""
        raise NotImplementedError

    def absorb(self, state: State, updates: Updates, now: Round) -> State:
        """The state after the training; ``updates`` sorted by silo, possibly none."""
        raise NotImplementedError

    def finish(self, state: State, now: Round) -> Exchanges[State]:
        """Exchanges after the last round, as in ``prepare``. By default there are none."""
        return state
        yield

    # ---------------------------------------------------------------- views of a state

    def members(self, state: Any) -> Members:
        """Every silo that ever took part: its model, its size, and the groups of the last round."""
        members: Members = state.members
        return members

    def with_members(self, state: Any, members: Members) -> Any:
        """The state with other members."""
        return replace(state, members=members)

    def with_models(self, state: Any, change: Change) -> Any:
        """Return the state with ``change`` of every model in it: ``members`` and ``models_in``."""
        members = self.members(state)
        own = {name: getattr(state, name) for name in self.models_in}
        new = {name: changed(models, change) for name, models in own.items()}
        models = changed(members.models, change)
        if models is not members.models:
            state = self.with_members(state, replace(members, models=models))
        moved = {name: models for name, models in new.items() if models is not own[name]}
        return replace(state, **moved) if moved else state

    def models(self, state: State) -> Mapping[str, Model]:
        """Silo → the model that it owns: the outcome of its group's last round."""
        return self.members(state).models

    def common(self, state: State) -> Model | None:
        """What a silo keeps at the end that has no model of its own (``models``), where there is
        something."""
        return None

    def next_models(self, state: State) -> Mapping[str, Model]:
        """Silo → the model that it will start the next round from, if that is another one."""
        return self.models(state)

    def groups(self, state: State) -> Sequence[Group]:
        """Who trained together in the last round."""
        return self.members(state).groups

    def sharing(self, state: State) -> Sequence[Group]:
        """Silos whose updates made one model in the last round.

        The update of a silo does not count, and the report says so, if each of those that it is
        in is smaller than the silo accepts. By default the groups of several: who is alone trains
        its own model, unless others may get it later (``hands_on``).
        """
        return [group for group in self.groups(state) if len(group) > 1 or self.hands_on]

    def comparing(self, state: State, now: Round) -> bool:
        """Whether partitions are compared in this round, or are to be: all are to train alike."""
        return False

    def details(self, state: State) -> Mapping[str, Any]:
        """What the record of a round should hold beside the groups; JSON values."""
        return {}

    # ---------------------------------------------------------------- what silos are told

    def entries(self, training: Config) -> Config:
        """What every training message has beside the run's own entries ``training``."""
        return {}

    def demands(self) -> Config:
        """What a run may ask of a silo beside its training messages, by keys of the wire.

        Told to silos before they join, so that one that would refuse it later does so then.
        """
        return {}


def algorithm_of(value: Any) -> Any:
    """The algorithm of a strategy; an algorithm as it is."""
    return getattr(value, "algorithm", value)


if TYPE_CHECKING:
    Base = Algorithm[Any]
else:
    Base = Annotated[InstanceOf[Algorithm[Any]], BeforeValidator(algorithm_of)]
"""An algorithm that another goes around, or the strategy that holds it."""


class Around(Algorithm[State]):
    """An algorithm that goes around another, ``base``; its state has the other's as ``base``.

    What is not said here or in a subclass is the base's.
    """

    if TYPE_CHECKING:  # a field, with its default, of every subclass
        base: Algorithm[Any]

    def problems(self, training: Config) -> Iterator[str]:
        return self.base.problems(training)

    def entries(self, training: Config) -> Config:
        return self.base.entries(training)

    def demands(self) -> Config:
        return self.base.demands()

    @property
    def averages(self) -> bool:
        return self.base.averages

    @property
    def crosses(self) -> bool:
        return self.base.crosses

    def newcomer_model(self, state: Any) -> Model:
        return self.base.newcomer_model(state.base)

    def welcome(self, state: Any, new: frozenset[str], now: Round) -> Any:
        return replace(state, base=self.base.welcome(state.base, new, now))

    def renew(self, state: Any, changed: frozenset[str], now: Round) -> Any:
        return replace(state, base=self.base.renew(state.base, changed, now))

    def members(self, state: Any) -> Members:
        return self.base.members(state.base)

    def with_models(self, state: Any, change: Change) -> Any:
        state = super().with_models(state, change)
        return replace(state, base=self.base.with_models(state.base, change))

    def with_members(self, state: Any, members: Members) -> Any:
        return replace(state, base=self.base.with_members(state.base, members))

    def models(self, state: Any) -> Mapping[str, Model]:
        return self.base.models(state.base)

    def common(self, state: Any) -> Model | None:
        return self.base.common(state.base)

    def next_models(self, state: Any) -> Mapping[str, Model]:
        return self.base.next_models(state.base)

    def groups(self, state: Any) -> Sequence[Group]:
        return self.base.groups(state.base)

    def sharing(self, state: Any) -> Sequence[Group]:
        return self.base.sharing(state.base)


def orders_from(
    models: Mapping[str, Model], silos: Iterable[Silo], kind: str = wire.TRAIN
) -> list[Order]:
    """Everybody trains from the model that it holds."""
    return [Order(silo, models[silo.name], kind=kind) for silo in silos]


def drawn(names: Sequence[str], count: int, rng: np.random.Generator) -> frozenset[str]:
    """``count`` of these silos at random; all of them if there are no more, or ``count`` is 0."""
    if not count or count >= len(names):
        return frozenset(names)
    return frozenset(rng.choice(list(names), size=count, replace=False).tolist())


def drawn_silos(now: Round, count: int, *, seed: int) -> list[Silo]:
    """Whose turn it is in a round: ``drawn`` by seed and round."""
    turn = drawn(sorted(now.names), count, np.random.default_rng([seed, now.number]))
    return [silo for silo in now.silos if silo.name in turn]


def num_batches(silo: Silo, config: Config) -> int:
    """Mini-batches of one epoch at a silo that described itself."""
    return ceil(silo.num_examples / int(config.get(wire.BATCH_SIZE, DEFAULT_BATCH)))


def catch_up(silo: Silo, now: Round, *, most: int) -> dict[str, Scalar]:
    """A newcomer's training by itself: as long as that of the rounds it missed, within reason.

    Within what the silo allows, too: it has agreed to as much as a round.

    Args:
        silo: the newcomer.
        now: the round in which it comes.
        most: rounds' worth of epochs.
    """
    times = min(now.number, most)
    epochs = int(now.config.get(wire.LOCAL_EPOCHS, 1))
    steps = int(now.config.get(wire.LOCAL_STEPS, 0))
    if silo.max_local_epochs:
        batches = silo.max_local_epochs * num_batches(silo, now.config)
        times = max(1, min(times, batches // steps if steps else silo.max_local_epochs // epochs))
    longer: dict[str, Scalar] = {wire.LOCAL_EPOCHS: epochs * times}
    return longer | ({wire.LOCAL_STEPS: steps * times} if steps else {})


def num_bytes(*models: Model) -> int:
    """Bytes of all their arrays; of one that is not seen here, none."""
    return sum(array.nbytes for model in filter(is_seen, models) for array in model.values())
