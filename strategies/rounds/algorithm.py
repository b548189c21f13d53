"""Algorithms: frozen values, their options, with a few pure functions on a state.

    state = first(w⁰)
    each round:  state = welcome(state, newcomers)       add newcomers
                 state = prepare(state)                  exchanges before the training, if any
                 state, orders = orders(state)           what each silo does
                 state = absorb(state, updates)          the outcome

The engine (``coterie.strategies.strategy``) does everything else: it finds the connected silos,
admits newcomers, sends orders, checks replies, keeps sizes up to date, reports and commits. An
algorithm inherits from no other one and keeps nothing between two calls: its state, a frozen value
with ``members``, holds everything that the next round depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, cast

from flwr.app import RecordDict
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
from coterie.wire.updates import JOINT, sketch_noise

State = TypeVar("State")


@dataclass(frozen=True)
class Round:
    """The current round as an algorithm sees it.

    Attributes:
        number: from 1.
        silos: the silos that take part, sorted by name.
        config: entries of every training message of the run.
        announce: reports what cannot wait for the round's report: a kind, and JSON values.
        unseen: the coordinator does not see silos' models; ``Masked`` stands in for them.
        max_share: the most that one silo counts where samples weigh, as a share.
    """

    number: int
    silos: tuple[Silo, ...]
    config: Config = field(default_factory=dict)
    announce: Callable[[str, Mapping[str, Any]], None] = lambda kind, fields: None
    unseen: bool = False
    max_share: float = 1.0

    @cached_property
    def here(self) -> dict[str, Silo]:
        """The silos by name."""
        return {silo.name: silo for silo in self.silos}

    @property
    def rounds(self) -> int:
        """The run's number of rounds; 0 if unknown."""
        return int(self.config.get(wire.ROUNDS, 0))

    @property
    def names(self) -> Group:
        """The silos' names."""
        return tuple(self.here)


@dataclass(frozen=True)
class Compared:
    """The part of their updates that silos sketch for comparison in a secure run.

    ``layers`` is ``all`` together, ``each`` module separately, or a prefix of array names.
    """

    of: str = "parameters"
    layers: str = "all"


@dataclass(frozen=True)
class Order:
    """One piece of work for one silo: to train or evaluate a model.

    Attributes:
        purpose: empty for the round's training; otherwise ``absorb`` finds it under
            ``Update.purpose``, and the work has its own randomness at the silo. In the round's own
            exchange those that differ only in a final number (``trial-3``) are reported as one.
        config: entries that replace the round's configuration.
        kind: message type: ``train``, or a phase, ``train.<phase>`` or ``evaluate.<phase>``.
        extras: further arrays that the work needs, by record name; never ``arrays``.
        beside: in a secure run, round and purpose of an earlier training with whose update this
            one is compared; None: with those of the same round and purpose.
        content: the message, as a strategy of someone else's made it; its reply stays whole.
        rounded, sketches: set by the engine: send the model as 16-bit numbers; sketch name →
            numbers of each sketch that the reply has instead of a model, or None.
    """

    silo: Silo
    model: Model
    purpose: str = ""
    config: Config = field(default_factory=dict)
    kind: str = wire.TRAIN
    extras: Mapping[str, Arrays] = field(default_factory=dict)
    beside: tuple[int, str] | None = None
    content: RecordDict | None = None
    rounded: bool = False
    sketches: Mapping[str, int] | None = None

    @property
    def evaluates(self) -> bool:
        """Whether the reply has metrics and no arrays."""
        return self.kind.split(".")[0] == wire.EVALUATE

    @property
    def num_bytes(self) -> int:
        """The size of the order's arrays in bytes."""
        if self.rounded:
            model = wire.num_rounded_bytes(arrays_of(self.model), exact=self.silo.buffers)
            return model + num_bytes(*self.extras.values())
        return num_bytes(self.model, *self.extras.values())


@dataclass(frozen=True)
class Update:
    """A reply that passed every check.

    Attributes:
        model: same names, shapes and types as ``start``, all finite; ``start`` after an evaluation.
        num_examples: its weight, > 0.
        metrics: the other scalars of the reply.
        figures: the app's own metrics, beyond those that the strategies use.
        extras: further arrays by record name, all finite; the algorithm checks names and shapes.
        bytes_sent, bytes_received: of arrays.
        reply: to an order with ``content``; its ``model`` is ``start``.
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
    reply: RecordDict | None = None

    def held_out(self, share: float) -> float:
        """Return the number of samples that the silo measured the received model on.

        It counts up to the ``share`` that it was asked to hold out, of the training samples that it
        stated when it joined (or with its first update); 0 if it states none.
        """
        most = ceil(share * (self.silo.num_examples or self.num_examples))
        return min(self.metrics.get(wire.HOLDOUT_EXAMPLES, 0.0), most)

    def noise_in(self, compared: Arrays | None = None) -> float:
        """Return the expected squared norm of the noise in an update, as its silo states it, or 0.

        Args:
            compared: some of the update's arrays; their share of the noise is their share of the
                parameters. Or sketches of them, which contain noise as well. None: the whole
                update.
        """
        own = sketch_noise(compared) if compared and isinstance(self.model, Masked) else 0.0
        stated = self.metrics.get(wire.UPDATE_NOISE, 0.0)
        if not 0 < stated < inf:
            return own
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
        return own + stated * sum(among) / max(sum(sizes.values()), 1)


Updates = Sequence[Update]


class Answers(list[Update]):
    """The updates of an exchange that passed the checks, sorted by silo, and the missing silos.

    ``missing`` is silo → why its answer does not count; those in ``refused`` declined because of
    their own conditions.
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
"""Yields sets of orders, receives the silos' answers to each, and returns a state."""


SUMS_BEFORE_GROUPS = (
    "the strategy averages all silos before it forms groups, and in a secure run a silo stays in "
    "the block of its first sum: use hcct, fedgroup or auto"
)
"""Why a strategy that starts with one group is refused in a secure run."""


class Algorithm(Options, Generic[State]):
    """The base class of algorithms; see the module. Its fields are the algorithm's options."""

    # ---------------------------------------------------------------- the rounds

    remembers: ClassVar[type[Any]] = Plain
    """Type of the first state, made from members only; the default remembers nothing else."""
    whole: ClassVar[bool] = False
    """Whether replies go whole to strategies of someone else's: no influence can be bounded."""
    alone: ClassVar[bool] = False
    """Whether no silo ever gets anything from another, so that no influence needs bounds."""
    hands_on: ClassVar[bool] = False
    """Whether a group's model may be given to newcomers, even if one silo alone trained it."""

    outdated: ClassVar[str] = ""
    """Log text: what the algorithm keeps using of a silo that returns with different data, because
    it does not measure it again (``renew``); empty if nothing."""

    works_unseen: ClassVar[bool] = False
    """Whether it works without seeing silos' models: it only takes means of them, weighted by
    samples or equally, and compares their updates with ``models.difference``."""

    takes_steps: ClassVar[bool] = False
    """Whether a server optimiser may move its groups' models: each is a mean of what silos made of
    one model, and the next round starts from it, or from means of such."""

    models_in: ClassVar[tuple[str, ...]] = ()
    """Fields of its state, in addition to its members, that are mappings or tuples of models."""

    def insecure(self) -> str:
        """Return why these options rule out a secure run although others allow it; empty if not."""
        return ""

    def compared(self, state: State) -> Compared | None:
        """Return what silos sketch of their next updates, or None to compare nothing."""
        return None

    @property
    def averages(self) -> bool:
        """Whether groups' models are ``policy.average``; not of silos alone or computed weights."""
        return True

    @property
    def crosses(self) -> bool:
        """Whether it averages models that started differently; shares are then capped over all."""
        return False

    def check(self, initial: Arrays, rounds: int) -> None:
        """Raise ``FederationError`` if a run of so many rounds cannot train this model."""

    def first(self, initial: Arrays) -> State:
        """Return the state before round 1."""
        return cast(State, self.remembers(Members(initial)))

    def newcomer_model(self, state: State) -> Model:
        """Return the model that a newcomer starts with; w⁰ by default."""
        return self.members(state).initial

    def welcome(self, state: State, new: frozenset[str], now: Round) -> State:
        """Return the state with the silos ``new``, which take part for the first time."""
        return state

    def renew(self, state: State, changed: frozenset[str], now: Round) -> State:
        """Return the state without what it knew about the silos whose data have changed."""
        return state

    def prepare(self, state: State, now: Round) -> Exchanges[State]:
        """Run exchanges before the round's training, none by default, and return the state.

        It yields orders, each with a purpose, and receives the updates that passed the checks.
        ``Answers`` and the log give the reason for every silo that is missing.
        """
        return state
        yield

    def orders(self, state: State, now: Round) -> tuple[State, list[Order]]:
        """Return the state, and what each silo does in this round."""
        raise NotImplementedError

    def absorb(self, state: State, updates: Updates, now: Round) -> State:
        """Return the state after the training; ``updates`` are sorted by silo, possibly none."""
        raise NotImplementedError

    def finish(self, state: State, now: Round) -> Exchanges[State]:
        """Run exchanges after the last round, as in ``prepare``; none by default."""
        return state
        yield

    # ---------------------------------------------------------------- views of a state

    def members(self, state: Any) -> Members:
        """Return all silos that ever took part, with their models, sizes and last groups."""
        return cast(Members, state.members)

    def with_members(self, state: Any, members: Members) -> Any:
        """Return the state with other members."""
        return replace(state, members=members)

    def with_models(self, state: Any, change: Change) -> Any:
        """Return the state with ``change`` of every model in it: ``members`` and ``models_in``."""
        members = self.members(state)
        if (models := changed(members.models, change)) is not members.models:
            state = self.with_members(state, replace(members, models=models))
        held = {name: getattr(state, name) for name in self.models_in}
        moved = {n: new for n, own in held.items() if (new := changed(own, change)) is not own}
        return replace(state, **moved) if moved else state

    def models(self, state: State) -> Mapping[str, Model]:
        """Return silo → its own model: the outcome of its group's last round."""
        return self.members(state).models

    def global_model(self, state: State) -> Model | None:
        """Return the model kept at the end by silos without one in ``models``, or None."""
        return None

    def next_models(self, state: State) -> Mapping[str, Model]:
        """Return silo → the model that it starts the next round from; ``models`` by default."""
        return self.models(state)

    def groups(self, state: State) -> Sequence[Group]:
        """Return the groups that trained together in the last round."""
        return self.members(state).groups

    def sharing(self, state: State) -> Sequence[Group]:
        """Return the groups of silos whose updates made one model in the last round.

        An update does not count, and the report says so, if its silo accepts none of its groups'
        sizes. By default a silo alone is in none, unless others may get its model (``hands_on``).
        """
        return [group for group in self.groups(state) if len(group) > 1 or self.hands_on]

    def own_entries(self, state: State) -> Mapping[str, Config]:
        """Return silo → entries of messages to make its own of the model that it holds."""
        return {}

    def boosted_on_trial(self, state: State) -> Mapping[str, Model] | None:
        """Return silo → trees without the rows that choose λ, once complete; None: no trees."""
        return None

    def comparing(self, state: State, now: Round) -> bool:
        """Return whether partitions are or will be compared, so that all silos must train alike."""
        return False

    def complete(self, state: State) -> str:
        """Return why further rounds would change no model; empty if they may."""
        return ""

    def details(self, state: State) -> Mapping[str, Any]:
        """Return what a round's record holds in addition to the groups; JSON values."""
        return {}

    def by_choice(self, state: State) -> str:
        """Return a sentence if a key's value leaves every silo alone, or puts all together."""
        return ""

    # ---------------------------------------------------------------- what silos are sent

    def entries(self, training: Config) -> Config:
        """Return what every training message has in addition to the run's entries ``training``."""
        return {}

    def demands(self) -> Config:
        """Return what a run may require of a silo later, by wire key: one may refuse at once."""
        return {}


def algorithm_of(value: Any) -> Any:
    """Return the algorithm of a strategy, or the algorithm itself."""
    return getattr(value, "algorithm", value)


if TYPE_CHECKING:
    Base = Algorithm[Any]
else:
    Base = Annotated[InstanceOf[Algorithm[Any]], BeforeValidator(algorithm_of)]
"""An algorithm that another goes around, or the strategy that holds it."""


class Around(Algorithm[State]):
    """An algorithm around another, ``base``, whose is all that is not overridden; so its state."""

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
        return replace(state, base=self.base.with_models(state.base, change))

    def with_members(self, state: Any, members: Members) -> Any:
        return replace(state, base=self.base.with_members(state.base, members))

    def models(self, state: Any) -> Mapping[str, Model]:
        return self.base.models(state.base)

    def global_model(self, state: Any) -> Model | None:
        return self.base.global_model(state.base)

    def next_models(self, state: Any) -> Mapping[str, Model]:
        return self.base.next_models(state.base)

    def groups(self, state: Any) -> Sequence[Group]:
        return self.base.groups(state.base)

    def sharing(self, state: Any) -> Sequence[Group]:
        return self.base.sharing(state.base)

    def by_choice(self, state: Any) -> str:
        return self.base.by_choice(state.base)


def orders_from(
    models: Mapping[str, Model], silos: Iterable[Silo], kind: str = wire.TRAIN
) -> list[Order]:
    """Return orders for every silo to train the model that it holds."""
    return [Order(silo, models[silo.name], kind=kind) for silo in silos]


def num_batches(silo: Silo, config: Config) -> int:
    """Return the mini-batches of one epoch at a silo that described itself; 32 by default."""
    return ceil(silo.num_examples / int(config.get(wire.BATCH_SIZE, 32)))


def catch_up(silo: Silo, now: Round, *, most: int) -> dict[str, Scalar]:
    """Return entries for a newcomer's training alone, as long as in the rounds that it missed.

    At most ``most`` rounds' worth, and no more than the silo allows in a round.
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
    """Return the bytes of all arrays; a model that is not seen here counts as 0."""
    return sum(array.nbytes for model in filter(is_seen, models) for array in model.values())
