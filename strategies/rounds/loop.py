"""The round loop that every strategy shares: several models, joins and leaves, checked replies.

An algorithm is four pure functions on a frozen state (``first``, ``admit``, ``orders``,
``absorb``) and two views of it (``models``, ``groups``). This module turns them into a Flower
strategy: it talks to the roster, makes the messages, exchanges them under a deadline, checks
every reply before any arithmetic, and reports each round. What an algorithm must ask before a
round's training (a cold start, discriminators) is a generator of exchanges, ``prepare``.

Evaluation. After round t every silo holds the model that it will start round t+1 from; the
record of round t has that model's error on the silo's own test data. Silos that described
themselves answer for it together with their next training, so it costs no message of its own;
other ClientApps are sent an ordinary ``evaluate``. After the last round it is the final model.
"""

from __future__ import annotations

import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from coterie import wire
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.roster import NodeRoster, Roster, Silo, minimums_of, staying
from coterie.wire import Model

log = logging.getLogger("coterie.run")

MAX_EXAMPLES = 1e15
"""More training samples than anybody has; sums of such counts are still exact numbers."""
MAX_VALUE = 1e15
"""Larger than any parameter, running statistic or counter of a model that can be trained further:
the float32 squares that training takes overflow at 1.8e19, and one such value spoils a mean."""

EVALUATION_KEYS = (
    *(wire.TASK, wire.STRATEGY, wire.ROUNDS, wire.RUN, wire.SEED, wire.PERSONAL, wire.GUARD),
    *(wire.ADAPT_STEPS, wire.ADAPT_LR, wire.ADAPT_MU),
)
"""Entries of the training configuration that an evaluation needs too."""

PERSONALISING_KEYS = (
    wire.PERSONALISE,
    wire.PERSONAL_EPOCHS,
    wire.PERSONAL_LR,
    wire.DITTO_LAMBDA,
    wire.BATCH_SIZE,
    wire.MOMENTUM,
    wire.WEIGHT_DECAY,
    wire.PRECISION,
)
"""And these, where silos make a model of their own first."""

GUARD_KEYS = (
    *(wire.ERROR, wire.ALONE_ERROR),
    *(wire.VALIDATION_ERROR, wire.ALONE_VALIDATION_ERROR),
)

Group = tuple[str, ...]
State = TypeVar("State")


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
    """

    silo: Silo
    model: Model
    purpose: str = ""
    config: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    kind: str = wire.TRAIN
    extras: Mapping[str, Model] = field(default_factory=dict)

    @property
    def evaluates(self) -> bool:
        """Whether the reply brings figures and no arrays."""
        return self.kind.split(".")[0] == wire.EVALUATE

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return _num_bytes(self.model, *self.extras.values())


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
        purpose, kind: of the order.
        extras: further arrays of the reply, by record name, all finite; their names and shapes
            are for the strategy to check.
        bytes_sent, bytes_received: of arrays.
    """

    silo: Silo
    start: Model
    model: Model
    num_examples: float
    metrics: Mapping[str, float]
    purpose: str = ""
    kind: str = wire.TRAIN
    extras: Mapping[str, Model] = field(default_factory=dict)
    bytes_sent: int = 0
    bytes_received: int = 0


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


@dataclass(frozen=True)
class PhaseReport:
    """What one kind of work beside the round's own training cost. Bytes are of arrays.

    Attributes:
        exchanges, seconds: of its own, wall seconds; 0 where it went with the round's training.
        messages: to silos.
        silo_seconds: the silos' own, added up, as far as they state them.
    """

    exchanges: int = 0
    messages: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    silo_seconds: float = 0.0


@dataclass(frozen=True)
class SiloReport:
    """One silo in one round. Bytes are of arrays; seconds are the silo's own."""

    num_examples: float
    train_loss: float
    seconds: float
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class GuardReport:
    """What a silo found that also trained alone. Errors in [0, 1].

    Attributes:
        error, alone_error: on its test data, of the federation's model and of its own.
        validation_error, alone_validation_error: on what it kept out of both trainings.
        kept_alone: it keeps its own.
    """

    error: float
    alone_error: float
    validation_error: float
    alone_validation_error: float
    kept_alone: bool


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round.

    Attributes:
        round: from 1; 0 for the evaluation of the initial model.
        groups: who trained together.
        joined, left: since the round before.
        left_out: silo → why its update does not count.
        silos: per silo that answered.
        evaluation: silo → (loss, error, number of test samples) of the model held after
            round ``evaluated_round``.
        personalised: silo → (loss, error) of the model as it trained it in this round, on the same
            test samples; of silos that were asked for it.
        seconds: phase → wall seconds.
        phases: message type → what was exchanged before the round's training; purpose → what
            silos did in the round's own exchange beside their training.
        details: what the algorithm adds for the record.
        guard: silo → what it found, after the last round of a run with ``guard``.
        final: this is the evaluation after the last round.
    """

    round: int
    groups: tuple[Group, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    silos: Mapping[str, SiloReport] = field(default_factory=dict)
    evaluated_round: int = 0
    evaluation: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    personalised: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, PhaseReport] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, GuardReport] = field(default_factory=dict)
    final: bool = False


@dataclass(frozen=True)
class Checkpoint(Generic[State]):
    """Where a run stands after a round: all that the next one depends on.

    Randomness is drawn from (seed, round) and needs no place here. Silos keep what is their own.

    Attributes:
        round: the last one that is over, from 1.
        state: the strategy's, a frozen value.
        silos: who was here in that round. Their nodes may have other ids after a restart.
    """

    round: int
    state: State
    silos: tuple[Silo, ...]


@dataclass
class RunResult(Result):
    """Flower's ``Result`` and more. ``arrays`` is the size-weighted mean of all silos' models.

    Attributes:
        models: silo → its own final model.
        groups: round → who trained together.
        rounds: one report per round, then the final evaluation. Those of a resumed run begin
            after its checkpoint.
    """

    models: dict[str, ArrayRecord] = field(default_factory=dict)
    groups: dict[int, list[list[str]]] = field(default_factory=dict)
    rounds: list[RoundReport] = field(default_factory=list)


class LoopOptions(TypedDict, total=False):
    """Arguments that every strategy passes on to ``GroupStrategy``, which explains them."""

    round_timeout: float
    train_config: Mapping[str, int | float | str | bool] | None
    evaluate: bool
    roster: Roster | None
    on_round: Callable[[RoundReport], None] | None
    on_event: Callable[[str, Mapping[str, Any]], None] | None
    keep_every: int
    name_members: bool


class GroupStrategy(Strategy, Generic[State]):
    """A Flower strategy in which silos may hold different models.

    Args:
        round_timeout: seconds after which a round goes on without the replies still missing.
        train_config: entries of every training message, e.g. ``{"lr": 0.1, "local-epochs": 5}``.
            A key ``lr-decay`` is applied here: silos get ``lr · lr-decay^(round−1)``.
        evaluate: whether silos evaluate their models after every round.
        roster: who takes part; by default every connected node.
        on_round: called with every report, as soon as it is known.
        on_event: called with what cannot wait for the round's report: a word for it, and JSON
            values. ``budget``: what an exchange before the round's training may cost at most.
        keep_every: silos write their own model to their disks after every so many rounds too; 0
            only after the last.
        name_members: silos are told who is in their group by name, not only how many.
    """

    def __init__(
        self,
        *,
        round_timeout: float = 3600.0,
        train_config: Mapping[str, int | float | str | bool] | None = None,
        evaluate: bool = True,
        roster: Roster | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
        keep_every: int = 0,
        name_members: bool = False,
    ) -> None:
        self.round_timeout = round_timeout
        self.train_config = dict(train_config or {})
        self.evaluate = evaluate
        self.roster: Roster = roster if roster is not None else NodeRoster()
        self.on_round, self.on_event = on_round, on_event
        self.keep_every, self.name_members = keep_every, name_members
        self._reset()

    def _reset(self) -> None:
        self._state: State | None = None
        self._silos: dict[str, Silo] = {}
        self._sent: list[tuple[Message, Order]] = []
        self._failed: list[tuple[Order, ReplyError]] = []
        self._deadline_s = self.round_timeout
        self._report = RoundReport(round=0)

    # ---------------------------------------------------------------- the algorithm

    @abstractmethod
    def first(self, initial: Model) -> State:
        """The state before round 1."""

    @abstractmethod
    def admit(self, state: State, silos: Sequence[Silo], *, round: int) -> State:
        """The state with these silos in it, which were never in it before."""

    def prepare(
        self, state: State, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], Answers, State]:
        """Exchanges before the round's training, with those who are here and admitted.

        A generator: it yields orders, each with a purpose of its own, is sent the updates that
        passed the checks (sorted by silo; who is missing did not answer in time or wrongly:
        ``Answers`` and the log say why), and returns the state. By default there are none.
        """
        return state
        yield

    def finish(
        self, state: State, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], Answers, State]:
        """Exchanges after the last round, as in ``prepare``. By default there are none."""
        return state
        yield

    @abstractmethod
    def orders(
        self, state: State, silos: Sequence[Silo], *, round: int
    ) -> tuple[State, list[Order]]:
        """What each silo that is here does in this round. At least one order per silo."""

    @abstractmethod
    def absorb(self, state: State, updates: Sequence[Update], *, round: int) -> State:
        """The state after a round; ``updates`` sorted by silo, possibly none."""

    @abstractmethod
    def models(self, state: State) -> Mapping[str, Model]:
        """Silo → the model that it owns: the outcome of its group's last round."""

    def next_models(self, state: State) -> Mapping[str, Model]:
        """Silo → the model that it will start the next round from, if that is another one."""
        return self.models(state)

    @abstractmethod
    def groups(self, state: State) -> Sequence[Group]:
        """Who trained together in the last round."""

    def comparing(self, state: State, *, round: int) -> bool:
        """Whether partitions are compared in this round, or are to be: all are to train alike."""
        return False

    def sharing(self, state: State) -> Sequence[Group]:
        """Silos whose updates made one model in the last round.

        The update of a silo does not count, and the report says so, if each of those that it is
        in is smaller than the silo accepts. By default the groups of several: who is alone trains
        its own model. A strategy whose groups have models that others may get later names those
        of one silo as well.
        """
        return [group for group in self.groups(state) if len(group) > 1]

    @abstractmethod
    def sizes(self, state: State) -> Mapping[str, float]:
        """Silo → number of training samples, as far as known."""

    def details(self, state: State) -> Mapping[str, Any]:
        """What the record of a round should hold beside the groups; JSON values."""
        return {}

    def demands(self) -> Mapping[str, int | float | str | bool]:
        """What a run may ask of a silo beside ``train_config``, by keys of the wire.

        Told to silos before they join, so that one that would refuse it later does so then.
        """
        return {}

    # ---------------------------------------------------------------- Flower's hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Look who is here and make the round's training messages."""
        if self._state is None:
            initial = wire.decode_arrays(arrays)
            check_finite(initial)
            self._state = self.first(initial)
        here = {silo.name: silo for silo in self.roster.present(grid, round=server_round)}
        known = self.sizes(self._state)
        joined = [name for name in here if name not in self._silos]
        left = tuple(name for name in self._silos if name not in here)
        new = [here[name] for name in joined if name not in known]
        self._silos = here
        self._report = RoundReport(round=server_round, joined=tuple(joined), left=left)
        self._state = self.admit(self._state, new, round=server_round)
        steps = self.prepare(self._state, list(here.values()), round=server_round)
        self._state = self._driven(steps, grid, server_round, config)
        self._state, orders = self.orders(self._state, list(here.values()), round=server_round)
        return self._messages(orders, server_round, config)

    def _driven(
        self,
        steps: Generator[Sequence[Order], Answers, State],
        grid: Grid,
        round: int,
        config: ConfigRecord,
    ) -> State:
        """Drive ``prepare`` or ``finish``: every set of orders that it yields is one exchange."""
        answer: Answers | None = None
        while True:
            try:
                orders = steps.send(answer) if answer is not None else next(steps)
            except StopIteration as end:
                state: State = end.value
                return state
            assert all(order.purpose for order in orders), "the round's training comes later"
            started = time.perf_counter()
            replies = self._exchange(grid, self._messages(orders, round, config), self._deadline_s)
            answer = self._answers(replies)
            self._add_cost(orders, answer, time.perf_counter() - started)

    def _add_cost(self, orders: Sequence[Order], updates: Sequence[Update], seconds: float) -> None:
        """Of an exchange before the round's training, by message type."""
        for kind in sorted({order.kind for order in orders}):
            sent = [o for o in orders if o.kind == kind]
            answered = [u for u in updates if u.kind == kind]
            self._add_to_phase(kind, sent, answered, exchanges=1, seconds=seconds)

    def _add_cost_beside(self, updates: Sequence[Update]) -> None:
        """Of what was asked for a purpose together with the round's training, by purpose."""
        beside = [order for _, order in self._sent if order.purpose]
        for purpose in sorted({_unnumbered(order.purpose) for order in beside}):
            sent = [o for o in beside if _unnumbered(o.purpose) == purpose]
            answered = [u for u in updates if _unnumbered(u.purpose) == purpose]
            self._add_to_phase(purpose, sent, answered)

    def _add_to_phase(
        self,
        key: str,
        sent: Sequence[Order],
        answered: Sequence[Update],
        *,
        exchanges: int = 0,
        seconds: float = 0.0,
    ) -> None:
        before = self._report.phases.get(key, PhaseReport())
        stated = [u.metrics.get(wire.SECONDS, 0.0) for u in answered]
        cost = PhaseReport(
            exchanges=before.exchanges + exchanges,
            messages=before.messages + len(sent),
            seconds=before.seconds + seconds,
            bytes_sent=before.bytes_sent + sum(o.num_bytes for o in sent),
            bytes_received=before.bytes_received + sum(u.bytes_received for u in answered),
            silo_seconds=before.silo_seconds + sum(s for s in stated if np.isfinite(s)),
        )
        self._report = replace(self._report, phases={**self._report.phases, key: cost})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, take those that hold, and form the next state."""
        assert self._state is not None, "configure_train comes first"
        updates, left_out = self._checked(replies)
        self._add_cost_beside(updates)
        updates = self._accepting(updates, left_out)
        self._state = self.absorb(self._state, updates, round=server_round)
        left_out |= _too_few(self.sharing(self._state), updates)  # in groups that are new, or alone
        rounds_own = [u for u in updates if not u.purpose]
        self._report = replace(
            self._report,
            groups=tuple(self.groups(self._state)),
            left_out=left_out,
            silos={u.silo.name: _silo_report(u) for u in rounds_own},
            evaluated_round=server_round - 1,
            evaluation=_received_evaluation(rounds_own),
            personalised=_trained_evaluation(rounds_own),
            details=self.details(self._state),
        )
        for name, reason in left_out.items():
            log.warning("round %d: %s is left out: %s", server_round, name, reason)
        if not rounds_own:
            return None, None
        metrics = {wire.TRAIN_LOSS: _mean_metric(rounds_own, wire.TRAIN_LOSS)}
        return self._mean_arrays(), MetricRecord({k: v for k, v in metrics.items() if v == v})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Evaluation messages to silos that do not answer for it with their next training."""
        if not self.evaluate or self._state is None:
            return []
        models = self.next_models(self._state)
        plain = [silo for silo in self._silos.values() if not silo.described]
        return self._evaluation_messages(plain, models, server_round, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Mean of the silos' metrics, weighted by their test samples."""
        evaluation = self._read_evaluation(replies)
        if not evaluation:
            return None
        self._report = replace(self._report, evaluated_round=server_round, evaluation=evaluation)
        return _evaluation_record(evaluation)

    def summary(self) -> None:
        """Log the configuration."""
        log.info("%s: %s", type(self).__name__, self.train_config or "the silos' own settings")

    # ---------------------------------------------------------------- the loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        commit: Callable[[Checkpoint[State]], None] | None = None,
        resume: Checkpoint[State] | None = None,
    ) -> RunResult:
        """Run the federation.

        Args:
            grid: Flower's connection to the nodes.
            initial_arrays: w⁰, from which every silo starts.
            num_rounds: ≥ 1.
            timeout: replaces ``round_timeout``.
            train_config: added to the configuration of training messages.
            evaluate_config: added to that of evaluation messages.
            evaluate_fn: evaluates the mean of all models on the server, as in Flower.
            commit: called with where the run stands when a round has been reported.
            resume: go on from here, with the same models as a run that was never interrupted;
                ``initial_arrays`` are not used then.

        Returns:
            Flower's result, with every silo's own model, the groups and a report per round.

        Raises:
            FederationError: no silos came, or none is left.
        """
        if num_rounds < 1:
            raise FederationError(f"num_rounds must be at least 1. Got {num_rounds}.")
        deadline_s = self.round_timeout if timeout is None else timeout
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        self._reset()
        self._deadline_s = deadline_s
        self.summary()
        result = RunResult(arrays=initial_arrays)
        if resume is None:
            _evaluate_on_server(evaluate_fn, 0, initial_arrays, result)
        else:
            self._restore(resume, grid, num_rounds, result)
        done = 0 if resume is None else resume.round
        for current in range(done + 1, num_rounds + 1):
            clock = _Clock()
            # 1. Who is here, and what does each of them do?
            messages = list(self.configure_train(current, result.arrays, train_config, grid))
            clock.lap("prepare")
            # 2. One exchange.
            replies = self._exchange(grid, messages, deadline_s)
            clock.lap("train")
            # 3. State and updates give the next state.
            arrays, metrics = self.aggregate_train(current, replies)
            clock.lap("aggregate")
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[current] = metrics
            if self._report.evaluation and current > 1:
                result.evaluate_metrics_clientapp[current - 1] = _evaluation_record(
                    self._report.evaluation
                )
            # 4. Silos that cannot answer for it on the way are asked for their error.
            if current < num_rounds:
                self._evaluate_plain(grid, current, evaluate_config, deadline_s, result)
                clock.lap("evaluate")
                if self.keep_every and current % self.keep_every == 0:
                    self._hand_over(grid, current, evaluate_config, deadline_s)
                    clock.lap("keep")
            _evaluate_on_server(evaluate_fn, current, result.arrays, result)
            # 5. The round is over.
            self._report = replace(self._report, seconds=clock.seconds)
            self._publish(result)
            if commit is not None:
                assert self._state is not None
                commit(Checkpoint(current, self._state, tuple(self._silos.values())))
        self._finish(grid, num_rounds, evaluate_config, deadline_s, result)
        return result

    def _restore(
        self, resume: Checkpoint[State], grid: Grid, num_rounds: int, result: RunResult
    ) -> None:
        """Stand where the checkpoint stands."""
        self._state = resume.state
        self._silos = {silo.name: silo for silo in resume.silos}
        result.arrays = self._mean_arrays() or result.arrays
        if resume.round >= num_rounds:  # only the end is missing; its nodes may have other ids
            here = {silo.name: silo for silo in self.roster.present(grid, round=num_rounds)}
            self._silos = {name: here[name] for name in self._silos if name in here}

    def _exchange(self, grid: Grid, messages: list[Message], deadline_s: float) -> list[Message]:
        replies = exchange(grid, messages, deadline_s=deadline_s)
        return [reply for reply in replies if reply is not None]

    def _evaluate_plain(
        self,
        grid: Grid,
        current: int,
        config: ConfigRecord,
        deadline_s: float,
        result: RunResult,
    ) -> None:
        messages = list(self.configure_evaluate(current, result.arrays, config, grid))
        metrics = self.aggregate_evaluate(current, self._exchange(grid, messages, deadline_s))
        if metrics is not None:
            result.evaluate_metrics_clientapp[current] = metrics

    def _finish(
        self,
        grid: Grid,
        num_rounds: int,
        config: ConfigRecord,
        deadline_s: float,
        result: RunResult,
    ) -> None:
        """Hand every silo that is here its own model, evaluated, and close the result."""
        assert self._state is not None
        clock = _Clock()
        self._report = RoundReport(round=num_rounds)
        steps = self.finish(self._state, list(self._silos.values()), round=num_rounds)
        self._state = self._driven(steps, grid, num_rounds, config)
        clock.lap("finish")
        models = self.models(self._state)
        self._report = replace(
            self._report,
            groups=tuple(self.groups(self._state)),
            details=self.details(self._state),
            evaluated_round=num_rounds,
            final=True,
        )
        if self.evaluate:
            replies = self._hand_over(grid, num_rounds, config, deadline_s)
            metrics = self.aggregate_evaluate(num_rounds, replies)
            if metrics is not None:
                result.evaluate_metrics_clientapp[num_rounds] = metrics
            self._report = replace(self._report, guard=self._read_guards(replies))
        clock.lap("evaluate")
        self._report = replace(self._report, seconds=clock.seconds)
        self._publish(result)
        result.models = {
            name: wire.encode_arrays(model, packed=False) for name, model in models.items()
        }

    def _hand_over(
        self, grid: Grid, round: int, config: ConfigRecord, deadline_s: float
    ) -> list[Message]:
        """Send every silo that is here its own model to keep; return what they say of it."""
        assert self._state is not None
        own: dict[str, dict[str, Any]] = {name: {wire.KEEP: True} for name in self._silos}
        for number, group in enumerate(self.groups(self._state), start=1):
            for name in own.keys() & set(group):
                own[name] |= {wire.GROUP: number, wire.GROUP_SIZE: len(group)}
                own[name] |= {wire.MEMBERS: list(group)} if self.name_members else {}
        messages = self._evaluation_messages(
            list(self._silos.values()), self.models(self._state), round, config, own=own
        )
        return self._exchange(grid, messages, deadline_s)

    def _publish(self, result: RunResult) -> None:
        report = self._report
        result.rounds.append(report)
        result.groups[report.round] = [list(group) for group in report.groups]
        if self.on_round is not None:
            self.on_round(report)

    # ---------------------------------------------------------------- messages

    def _messages(self, orders: Sequence[Order], round: int, config: ConfigRecord) -> list[Message]:
        records = _Records()
        messages = []
        for order in orders:
            packed = order.silo.described
            content = RecordDict({wire.CONFIG: self._round_config(order, round, config)})
            for name, part in {wire.ARRAYS: order.model, **order.extras}.items():
                content[name] = records.of(part, packed=packed)
            message = Message(
                content,
                dst_node_id=order.silo.node_id,
                message_type=order.kind,
                group_id=str(round),
            )
            messages.append(message)
        self._sent = list(zip(messages, orders, strict=True))
        return messages

    def _group_size(self, order: Order) -> int:
        """Silos whose updates will be averaged with the one ordered, that one included."""
        if order.purpose:
            return 1  # unless the order says otherwise
        assert self._state is not None
        group = [group for group in self.groups(self._state) if order.silo.name in group]
        return len(group[0]) if group else 1

    def _round_config(self, order: Order, round: int, config: ConfigRecord) -> ConfigRecord:
        entries: dict[str, Any] = {**self.train_config, **config, **order.config}
        decay = entries.pop(wire.LR_DECAY, 1.0)
        if wire.LR in entries:
            entries[wire.LR] = float(entries[wire.LR]) * float(decay) ** (round - 1)
        entries[wire.ROUND] = round
        if order.silo.described:
            entries[wire.PROTOCOL_KEY] = wire.PROTOCOL
            own_training = not order.evaluates and not order.purpose
            wanted = bool(order.config.get(wire.EVALUATE_RECEIVED, True))
            entries[wire.EVALUATE_RECEIVED] = self.evaluate and own_training and wanted
            entries.setdefault(wire.GROUP_SIZE, self._group_size(order))
        if order.purpose:
            entries[wire.PURPOSE] = order.purpose
        return ConfigRecord(entries)

    def _evaluation_messages(
        self,
        silos: Sequence[Silo],
        models: Mapping[str, Model],
        round: int,
        config: ConfigRecord,
        own: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[Message]:
        records = _Records()
        own = {} if own is None else own
        personalises = wire.PERSONALISE in self.train_config
        keys = EVALUATION_KEYS + (PERSONALISING_KEYS if personalises else ())
        entries: dict[str, Any] = {
            **{k: v for k, v in self.train_config.items() if k in keys},
            **config,
            wire.ROUND: round,
        }
        return [
            Message(
                RecordDict(
                    {
                        wire.ARRAYS: records.of(models[silo.name], packed=silo.described),
                        wire.CONFIG: ConfigRecord({**entries, **own.get(silo.name, {})}),
                    }
                ),
                dst_node_id=silo.node_id,
                message_type=wire.EVALUATE,
                group_id=str(round),
            )
            for silo in silos
            if silo.name in models
        ]

    # ---------------------------------------------------------------- replies

    def _answers(self, replies: Iterable[Message]) -> Answers:
        """Of an exchange beside the round's training."""
        updates, _ = self._checked(replies)
        return Answers(
            updates,
            missing={order.silo.name: str(error) for order, error in self._failed},
            refused=[order.silo.name for order, error in self._failed if error.refused],
        )

    def _checked(self, replies: Iterable[Message]) -> tuple[list[Update], dict[str, str]]:
        """Updates sorted by silo, and why the others are left out."""
        # Pushing a message gives it its id, which its reply names.
        pending = {message.metadata.message_id: order for message, order in self._sent}
        updates: list[Update] = []
        failed: list[tuple[Order, ReplyError]] = []
        for reply in replies:
            order = pending.pop(reply.metadata.reply_to_message_id, None)
            if order is None:
                continue  # a late reply to a round that is over
            try:
                updates.append(check_reply(order, reply))
            except ReplyError as error:
                failed.append((order, error))
        failed += [(order, ReplyError("it did not answer in time.")) for order in pending.values()]
        left_out: dict[str, str] = {}
        for order, why in failed:
            _leave_out(left_out, order, str(why))
        self._failed = failed
        return sorted(updates, key=lambda u: (u.silo.name, u.purpose)), left_out

    def _accepting(self, updates: list[Update], left_out: dict[str, str]) -> list[Update]:
        """Without the updates of silos that accept no group as small as what answered of theirs."""
        assert self._state is not None
        several = [group for group in self.groups(self._state) if len(group) > 1]
        left_out |= _too_few(several, updates)
        return [u for u in updates if u.purpose or u.silo.name not in left_out]

    def _read_evaluation(self, replies: Iterable[Message]) -> dict[str, tuple[float, float, int]]:
        names = {silo.node_id: silo.name for silo in self._silos.values()}
        evaluation = {}
        for reply in replies:
            name = names.get(reply.metadata.src_node_id)
            if name is None:
                continue
            if reply.has_error():
                log.warning("%s was not evaluated: %s", name, reply.error.reason)
                continue
            metrics = wire.read_metrics(reply.content)
            count = metrics.get(wire.NUM_EXAMPLES, 0)
            if not np.isfinite(count) or count <= 0:
                log.warning("%s was not evaluated: it states %s test samples", name, count)
                continue
            evaluation[name] = (
                metrics.get(wire.LOSS, float("nan")),
                error_of(metrics),
                int(count),
            )
        return dict(sorted(evaluation.items()))

    def _read_guards(self, replies: Iterable[Message]) -> dict[str, GuardReport]:
        """What silos with a guard found, of those whose evaluation counts."""
        names = {silo.node_id: silo.name for silo in self._silos.values()}
        found = {}
        for reply in replies:
            name = names.get(reply.metadata.src_node_id, "")
            if name not in self._report.evaluation or reply.has_error():
                continue
            metrics = wire.read_metrics(reply.content)
            error, alone, validation, alone_validation = (
                metrics.get(key, float("nan")) for key in GUARD_KEYS
            )
            if np.isfinite([error, alone, validation, alone_validation]).all():
                kept_alone = metrics.get(wire.KEPT_ALONE) == 1
                found[name] = GuardReport(error, alone, validation, alone_validation, kept_alone)
        return dict(sorted(found.items()))

    def _mean_arrays(self) -> ArrayRecord | None:
        """The size-weighted mean of all silos' models; None while no size is known."""
        assert self._state is not None
        models, sizes = self.models(self._state), self.sizes(self._state)
        held: dict[int, tuple[Model, float]] = {}  # one entry per model, however many share it
        for name in sorted(name for name in models if sizes.get(name, 0) > 0):
            model = models[name]
            held[id(model)] = (model, held.get(id(model), (model, 0.0))[1] + sizes[name])
        if not held:
            return None
        mean = weighted_mean([m for m, _ in held.values()], [size for _, size in held.values()])
        return wire.encode_arrays(mean, packed=False)


class ReplyError(ValueError):
    """Why a reply does not count; ``refused`` by the silo itself, or because it is wrong."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


def check_reply(order: Order, reply: Message) -> Update:
    """Check a training reply against what was sent.

    Raises:
        ReplyError: an error reply, missing or undecodable arrays, other names, shapes or types,
            NaN or infinity, or a sample count that is missing or not positive.
    """
    if reply.has_error():
        raise ReplyError(
            str(reply.error.reason or "it answered with an error."),
            refused=reply.error.code == wire.REFUSED,
        )
    try:
        arrays = {k: wire.decode_arrays(r) for k, r in reply.content.array_records.items()}
    except wire.WireError as error:
        raise ReplyError(str(error)) from None
    received = sum(_num_bytes(part) for part in arrays.values())
    model = order.model if order.evaluates else arrays.pop(wire.ARRAYS, None)
    if model is None:
        raise ReplyError(f"its reply has no arrays (expected a record {wire.ARRAYS!r}).")
    _check_like(model, order.model)
    for extra in arrays.values():
        for name, array in extra.items():
            if array.dtype.kind not in "biuf":
                raise ReplyError(f"array {name!r} must hold numbers. Got {array.dtype}.")
            _check_finite(name, array)
    metrics = wire.read_metrics(reply.content)
    count = metrics.get(wire.NUM_EXAMPLES)
    if count is None or not 0 < count <= MAX_EXAMPLES:
        raise ReplyError(f"{wire.NUM_EXAMPLES} must be a number above 0. Got {count}.")
    return Update(
        silo=order.silo,
        start=order.model,
        model={name: model[name] for name in order.model},
        num_examples=float(count),
        metrics=metrics,
        purpose=order.purpose,
        kind=order.kind,
        extras=arrays,
        bytes_sent=order.num_bytes,
        bytes_received=received,
    )


def _too_few(sharing: Sequence[Group], updates: Sequence[Update]) -> dict[str, str]:
    """Silos that accept none of their groups as small as what answered of it, and why."""
    silos = {u.silo.name: u.silo for u in updates if not u.purpose}
    if not minimums_of(silos.values()):
        return {}
    refused: dict[str, str] = {}
    accepted: set[str] = set()
    for group in sharing:
        own = [silos[name] for name in group if name in silos]
        stay = staying([silo.name for silo in own], minimums_of(own))
        accepted.update(stay)
        for silo in own:
            if silo.name not in stay:
                refused[silo.name] = (
                    f"it accepts groups of at least {silo.min_group_size} silos, of its group "
                    f"{len(own)} answered."
                )
    return {name: reason for name, reason in refused.items() if name not in accepted}


def _unnumbered(purpose: str) -> str:
    """``trial-3`` → ``trial``."""
    return re.sub(r"-\d+$", "", purpose)


def _leave_out(left_out: dict[str, str], order: Order, reason: str) -> None:
    """A silo is left out when its own training is; what else was asked of it is only logged."""
    if order.purpose:
        log.warning("%s: its %s is left out: %s", order.silo.name, order.purpose, reason)
    else:
        left_out[order.silo.name] = reason


def _check_like(model: Model, sent: Model) -> None:
    if set(model) != set(sent):
        odd = sorted(set(model) ^ set(sent))[:3]
        raise ReplyError(f"its arrays differ from those sent: {', '.join(odd)}.")
    for name, array in sent.items():
        got = model[name]
        if got.shape != array.shape or got.dtype != array.dtype:
            raise ReplyError(
                f"array {name!r} must be {array.dtype} of shape {array.shape}. "
                f"Got {got.dtype} of shape {got.shape}."
            )
        _check_finite(name, got)


def _check_finite(name: str, array: NDArray[np.generic]) -> None:
    if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
        raise ReplyError(f"array {name!r} holds NaN or infinity. A smaller lr may help.")
    if array.size and max(float(array.max()), -float(array.min())) > MAX_VALUE:
        raise ReplyError(f"array {name!r} holds values beyond ±{MAX_VALUE:g}.")


def check_finite(model: Model) -> None:
    """Refuse a model to start from that holds NaN or infinity.

    Raises:
        FederationError: names the first such array.
    """
    for name, array in model.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise FederationError(f"the initial model's array {name!r} holds NaN or infinity.")


class _Records:
    """Encodes each model once, so that Flower stores and hashes what is shared once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool], tuple[Model, ArrayRecord]] = {}

    def of(self, model: Model, *, packed: bool) -> ArrayRecord:
        key = (id(model), packed)
        if key not in self._made:  # the model is kept, so that its id stays its own
            self._made[key] = (model, wire.encode_arrays(model, packed=packed))
        return self._made[key][1]


class _Clock:
    """Wall seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = round(now - self._last, 6)
        self._last = now


def _silo_report(update: Update) -> SiloReport:
    return SiloReport(
        num_examples=update.num_examples,
        train_loss=update.metrics.get(wire.TRAIN_LOSS, float("nan")),
        seconds=update.metrics.get(wire.SECONDS, float("nan")),
        bytes_sent=update.bytes_sent,
        bytes_received=update.bytes_received,
    )


def _num_bytes(*models: Model) -> int:
    return sum(array.nbytes for model in models for array in model.values())


def _received_evaluation(updates: Sequence[Update]) -> dict[str, tuple[float, float, int]]:
    return {
        u.silo.name: (
            u.metrics.get(wire.RECEIVED_LOSS, float("nan")),
            u.metrics[wire.RECEIVED_ERROR],
            int(u.metrics.get(wire.RECEIVED_EXAMPLES, 0)),
        )
        for u in updates
        if wire.RECEIVED_ERROR in u.metrics
        and np.isfinite(u.metrics.get(wire.RECEIVED_EXAMPLES, 0))
        and u.metrics.get(wire.RECEIVED_EXAMPLES, 0) > 0
    }


def _trained_evaluation(updates: Sequence[Update]) -> dict[str, tuple[float, float]]:
    return {
        u.silo.name: (u.metrics.get(wire.TRAINED_LOSS, float("nan")), u.metrics[wire.TRAINED_ERROR])
        for u in updates
        if wire.TRAINED_ERROR in u.metrics
    }


def error_of(metrics: Mapping[str, float]) -> float:
    """A silo's error; a plain ClientApp may state an accuracy instead."""
    if wire.ERROR in metrics:
        return metrics[wire.ERROR]
    for key in ("accuracy", "eval_acc", "eval-accuracy", "acc"):
        if key in metrics:
            return 1.0 - metrics[key]
    return float("nan")


def _evaluation_record(evaluation: Mapping[str, tuple[float, float, int]]) -> MetricRecord:
    weights = np.array([count for _, _, count in evaluation.values()], dtype=np.float64)
    record = {wire.NUM_EXAMPLES: int(weights.sum())}
    means: dict[str, float] = {}
    for i, key in enumerate((wire.LOSS, wire.ERROR)):
        values = np.array([entry[i] for entry in evaluation.values()], dtype=np.float64)
        if np.isfinite(values).all():
            means[key] = float((values * weights).sum() / weights.sum())
    return MetricRecord({**record, **means})


def _mean_metric(updates: Sequence[Update], key: str) -> float:
    pairs = [(u.metrics[key], u.num_examples) for u in updates if key in u.metrics]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else float("nan")


def _evaluate_on_server(
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    round: int,
    arrays: ArrayRecord,
    result: RunResult,
) -> None:
    metrics = evaluate_fn(round, arrays) if evaluate_fn is not None else None
    if metrics is not None:
        result.evaluate_metrics_serverapp[round] = metrics
