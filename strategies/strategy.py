"""The engine: one loop of rounds for every algorithm, as a Flower strategy.

It holds an algorithm (``coterie.strategies.rounds.algorithm``) and does for all of them what is
not their own: it asks the roster who is here, lets newcomers in, sends orders under a deadline,
checks every reply before any arithmetic, leaves out whose group is too small for it, reports, and
commits.

Evaluation. After round t every silo holds the model that it will start round t+1 from; the
record of round t has that model's error on the silo's own test data. Silos that described
themselves answer for it together with their next training, so it costs no message of its own;
other ClientApps are sent an ordinary ``evaluate``. After the last round it is the final model.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NoReturn
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from coterie import wire
from coterie.features.compression.coordinator import Compression
from coterie.features.stopping.coordinator import Stopping
from coterie.features.stragglers.coordinator import Stragglers
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.strategies.rounds import guests as visiting
from coterie.strategies.rounds import kit, spoken
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.messages import evaluation_messages, membership, training_messages
from coterie.strategies.rounds.result import RunResult, mean_model
from coterie.strategies.rounds.secure import (
    Enrolled,
    SecureRun,
    insecure,
    own_or_origin,
    sendable,
    sketches_of,
    without,
)
from coterie.strategies.rounds.stage import ENDED_EARLY, Played, Stage, Stages
from coterie.wire.secure import FEWEST, sketch_sizes

MOST_TRIES = 3
"""How often a round is played in which no training counts, before the run is given up."""
TRY_AGAIN_S = 1.0
"""The pause before that, twice as long each time: a moment may heal what it was."""
SIZED = (wire.TRAIN, wire.COLD_START)
"""Kinds of work beside the round's own whose replies state the samples that a silo trains on."""


EvaluateGroup = Callable[[int, kit.Group, ArrayRecord], MetricRecord | None]
"""Called with the round, who is in the group and the group's model."""


@dataclass(frozen=True)
class _Run:
    """What stays the same during a run.

    Attributes:
        grid: Flower's connection to the nodes.
        rounds: how many.
        deadline_s: of every exchange.
        config: entries of every training message.
        evaluate_config: entries of every evaluation.
        strategy: its name, for silos that take part in some only.
        names: of metrics.
        secure: the keys of a secure run.
        minimums: silo → the smallest group that it accepts, of those that said so with an update.
        seconds: of each exchange since the stages were told last, silo → until it had answered or
            was given up.
        nodes: node → silo, of those that are here in this round.
        unaware: silo → why its last training did not count, until it has been told.
    """

    grid: Grid
    rounds: int
    deadline_s: float
    config: kit.Config
    evaluate_config: Mapping[str, Any]
    strategy: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    secure: SecureRun | None = None
    minimums: dict[str, int] = field(default_factory=dict)
    seconds: list[Mapping[str, float]] = field(default_factory=list)
    nodes: dict[int, str] = field(default_factory=dict)
    unaware: dict[str, str] = field(default_factory=dict)

    def tell(self, silo: kit.Silo) -> dict[str, Any]:
        """The entry that tells a silo why its last training did not count, if it cannot know."""
        if not silo.described or silo.name not in self.unaware:
            return {}
        return {wire.LEFT_OUT: self.unaware.pop(silo.name)}

    @property
    def told(self) -> dict[str, Any]:
        """What every message says of the run, unless its configuration does."""
        return {
            wire.ROUNDS: self.rounds,
            **({wire.STRATEGY: self.strategy} if self.strategy else {}),
        }

    def present(self, roster: kit.Roster, number: int) -> tuple[kit.Silo, ...]:
        """Who is here, with the smallest groups that they accept as far as they said so."""
        here = [
            replace(silo, min_group_size=self.minimums[silo.name])
            if silo.name in self.minimums and not silo.described
            else silo
            for silo in roster.present(self.grid, number=number)
        ]
        if self.secure is not None:  # the sum of one is that one's
            here = [replace(s, min_group_size=max(FEWEST, s.min_group_size)) for s in here]
        self.nodes.clear()
        self.nodes.update({silo.node_id: silo.name for silo in here})
        return tuple(here)

    def note_minimums(self, updates: kit.Updates) -> None:
        """What silos that did not describe themselves state today holds until they state another.

        Silos whose last update states none are as their roster has them.
        """
        for update in updates:
            self.minimums.pop(update.silo.name, None)
            if update.metrics.get(wire.MIN_GROUP_SIZE, 1) > 1:
                self.minimums[update.silo.name] = update.silo.min_group_size

    def exchange(
        self, messages: Sequence[Message], deadline_s: float | None = None
    ) -> list[Message | None]:
        """The reply to every message; None where none came in time."""
        seconds: dict[int, float] = {}
        within = self.deadline_s if deadline_s is None else deadline_s
        replies = exchange(self.grid, messages, deadline_s=within, seconds=seconds)
        named = {self.nodes[node]: s for node, s in seconds.items() if node in self.nodes}
        self.seconds.append(named)
        return replies


class _NobodyAnsweredError(Exception):
    """No training of this round counts. The text says why, silo by silo."""


class _AllSpentError(Exception):
    """No silo that is here has any privacy left to spend. The text says so, silo by silo."""


class GroupStrategy(Strategy):
    """A Flower strategy in which silos may hold different models: an algorithm, and its engine.

    Args:
        algorithm: what is done; a subclass such as ``HCCT`` makes its own from its options.
        round_timeout: seconds after which a round goes on without the replies still missing.
        train_config: entries of every training message, e.g. ``{"lr": 0.1, "local-epochs": 5}``.
            A key ``lr-decay`` is applied here: silos get ``lr · lr-decay^(round−1)``.
        evaluate: whether silos evaluate their models after every round.
        roster: who takes part; by default every connected node.
        on_round: called with every report, as soon as it is known. Without it, every round and
            its groups are logged through Flower's logger, ``flwr``.
        on_event: called with what cannot wait for the round's report: a word for it, and JSON
            values. ``budget``: what an exchange before the round's training may cost at most.
        keep_every: silos write their own model to their disks after every so many rounds too; 0
            only after the last.
        name_members: silos are told who is in their group by name, not only how many.
        evaluate_every: silos evaluate their model after every so many rounds, and the last.
        patience: the run ends when the silos' mean error on their validation data, which they keep
            out of training if ``train_config`` has ``validation``, has not improved for so many
            rounds; 0 plays all rounds.
        influence: how much one silo can do to the others; see ``coterie.strategies.Influence``.
        secure: nobody but a silo itself sees its updates: the coordinator compares sketches of
            them, and adds up what silos have masked. Of coterie's own silos.
        enrolled: with ``secure``: vouches for the silos' keys, where they are enrolled.
        metric_names: the ClientApp's name of a metric → ``num-examples``, ``train-loss``, ``loss``,
            ``error`` or ``accuracy``, for names that are not understood by themselves, as those of
            Flower's examples are.
        options: of the algorithm, in a subclass.

    Raises:
        FederationError: an option is out of bounds, or does not go with another.
    """

    kind: ClassVar[Callable[..., kit.Algorithm[Any]] | None] = None

    def __init__(
        self,
        algorithm: kit.Algorithm[Any] | None = None,
        *,
        round_timeout: float = 3600.0,
        train_config: kit.Config | None = None,
        evaluate: bool = True,
        roster: kit.Roster | None = None,
        on_round: Callable[[kit.RoundReport], None] | None = None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
        keep_every: int = 0,
        name_members: bool = False,
        evaluate_every: int = 1,
        patience: int = 0,
        influence: kit.Influence | None = None,
        metric_names: Mapping[str, str] | None = None,
        secure: bool = False,
        enrolled: Enrolled | None = None,
        **options: Any,
    ) -> None:
        if self.kind is not None and algorithm is not None:
            raise TypeError(
                f"options of {type(self).__name__} are given by name. Got {algorithm!r}"
            )
        if self.kind is not None:
            algorithm = self.kind(**options)
        elif options:
            raise TypeError(f"unknown arguments: {', '.join(sorted(options))}")
        if algorithm is None:
            raise TypeError("an algorithm is needed")
        training = dict(train_config or {})
        algorithm.require_consistency(training, spell=kit.underscored)
        self.algorithm, self._asked = algorithm, training
        self.influence = influence or kit.Influence()
        name = type(self if self.kind is not None else algorithm).__name__
        averages = algorithm.averages
        if why := kit.aggregate_problem(self.influence, averages=averages, strategy=name):
            raise kit.wrong_options([why])
        how = str(training.get(wire.WIRE_FORMAT, wire.FLOAT32))
        why = insecure(algorithm, self.influence, name=name, wire_format=how) if secure else ""
        if why:
            raise kit.wrong_options([why])
        self.secure, self.enrolled = secure, enrolled
        self.round_timeout = round_timeout
        self.train_config: kit.Config = {**training, **algorithm.entries(training)}
        if secure and wire.RUN not in self.train_config:  # silos keep what is of it apart by that
            self.train_config = {**self.train_config, wire.RUN: f"run-{uuid4().hex[:12]}"}
        self.evaluate = evaluate
        self.roster: kit.Roster = roster if roster is not None else kit.NodeRoster()
        self.on_round = on_round
        self.on_event = on_event or (lambda kind, fields: None)
        self.keep_every, self.name_members = keep_every, name_members
        self.evaluate_every = evaluate_every
        if evaluate_every < 1 or patience < 0:
            raise kit.wrong_options(
                [
                    "evaluate_every must be at least 1 and patience at least 0. "
                    f"Got {evaluate_every} and {patience}"
                ]
            )
        self.stages: tuple[Stage, ...] = (
            Stragglers(),
            Compression(),
            Stopping(patience, evaluate_every),
        )
        self.metric_names = dict(metric_names or {})
        if stray := sorted(set(self.metric_names.values()) - set(kit.MAPPED)):
            raise kit.wrong_options(
                [f"metric_names: must map to one of {', '.join(kit.MAPPED)}. Got {stray[0]!r}"]
            )

    def summary(self) -> None:
        """Log the configuration."""
        name = type(self.algorithm).__name__
        told = dict(self.train_config) or "the silos' own settings"
        kit.log.info("%s: %s", name, told)

    # ---------------------------------------------------------------- the run

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
        evaluate_group_fn: EvaluateGroup | None = None,
        commit: Callable[[Checkpoint[Any]], None] | None = None,
        resume: Checkpoint[Any] | None = None,
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
            evaluate_group_fn: evaluates every group's model on the server after every round:
                called with round, members and model.
            commit: called with where the run stands when a round has been reported.
            resume: go on from here, with the same models as a run that was never interrupted;
                ``initial_arrays`` are not used then.

        Returns:
            Flower's result, with every silo's own model, the groups and a report per round.

        Raises:
            FederationError: no silos came, none is left, or none of them understands what this
                strategy asks.
        """
        if num_rounds < 1:
            raise FederationError(f"num_rounds must be at least 1. Got {num_rounds}.")
        run = _Run(
            grid,
            num_rounds,
            self.round_timeout if timeout is None else timeout,
            {**self.train_config, **(train_config or {})},  # type: ignore[dict-item]
            dict(evaluate_config or {}),
            # Classes are called like strategies in files, but for capitals.
            type(self).__name__.lower() if self.kind is not None else "",
            self.metric_names,
        )
        if self.secure:
            run = replace(run, secure=self._secure_run(run))
        asked = {**run.told, **self._asked, **(train_config or {})}
        self.algorithm.require_consistency(asked, spell=kit.underscored)
        on_round = self.on_round or partial(spoken.say, rounds=num_rounds)
        with spoken.heard() if self.on_round is None else nullcontext():
            return self._run(
                run, initial_arrays, on_round, evaluate_fn, evaluate_group_fn, commit, resume
            )

    def _secure_run(self, run: _Run) -> SecureRun:
        known = (wire.TASK, wire.STRATEGY, wire.RUN, wire.SEED, wire.ROUNDS)
        said = {**run.told, **run.config}
        return SecureRun(
            run.exchange,
            {key: said[key] for key in known if key in said},
            run.deadline_s,
            self.enrolled,
        )

    def _run(
        self,
        run: _Run,
        initial_arrays: ArrayRecord,
        on_round: Callable[[kit.RoundReport], None],
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        evaluate_group_fn: EvaluateGroup | None,
        commit: Callable[[Checkpoint[Any]], None] | None,
        resume: Checkpoint[Any] | None,
    ) -> RunResult:
        self.summary()
        result = RunResult(initial_arrays)
        if resume is None:
            initial = wire.decode_arrays(initial_arrays)
            kit.check_finite(initial)
            standing = Checkpoint(0, self.algorithm.first(initial), ())
        else:
            standing = resume
        result.stand(self.algorithm, standing)
        if resume is None:
            _evaluate_on_server(evaluate_fn, 0, result)
        counted = resume is not None
        while standing.round < run.rounds and not standing.ended_early:
            try:
                standing, report, updates = self._play_until_answered(run, standing)
            except _AllSpentError as spent:
                standing = _ended_by(spent, standing)
                break
            counted = counted or bool(updates) or not report.left_out
            result.stand(self.algorithm, standing)
            _note(result, report, updates)
            del updates  # which are as large as the next round's
            _evaluate_on_server(evaluate_fn, standing.round, result)
            _evaluate_groups(evaluate_group_fn, report, result)
            on_round(report)
            if commit is not None:
                commit(standing)
        if not counted:
            raise FederationError(
                f"no update of any silo counted in {wire.counted(standing.round, 'round')}: "
                f"{wire.reasons(report.left_out)}",
                round_number=standing.round,
                phase="train",
            )
        standing, report = self._finish(run, standing, alone=resume is standing)
        if result.rounds and result.rounds[-1].ended_early != standing.ended_early:
            report = replace(report, ended_early=standing.ended_early)
        result.stand(self.algorithm, standing)
        _note(result, report, [])
        on_round(report)
        return result

    def _play_until_answered(
        self, run: _Run, before: Checkpoint[Any]
    ) -> tuple[Checkpoint[Any], kit.RoundReport, list[kit.Update]]:
        """The next round. One in which nobody answered does not count: it is played again."""
        number = before.round + 1
        for tries in range(1, MOST_TRIES + 1):
            try:
                return self._play_round(run, before)
            except _NobodyAnsweredError as nobody:
                why = str(nobody)
            if tries < MOST_TRIES:
                kit.log.warning(
                    "round %d: no silo's training counts, so the round is played again (%d of %d "
                    "tries): %s",
                    *(number, tries, MOST_TRIES, why),
                )
                time.sleep(TRY_AGAIN_S * 2 ** (tries - 1))
        raise FederationError(
            f"no silo's training counted in {MOST_TRIES} tries of round {number}: {why}",
            round_number=number,
            phase="train",
        )

    def _play_round(
        self, run: _Run, before: Checkpoint[Any]
    ) -> tuple[Checkpoint[Any], kit.RoundReport, list[kit.Update]]:
        """One round, from who is here to what the record says of it."""
        algorithm, clock, number = self.algorithm, _Clock(), before.round + 1
        stages = Stages(self.stages, before.kept)

        # 1. Who is here? Newcomers are let in; what silos state today holds from now on.
        here = run.present(self.roster, number)
        resting = stages.resting(here, number)
        resting |= self._greeted(run, [s for s in here if s.name not in resting], before.state)
        guests = [s for s in here if s.unlabelled]
        silos = tuple(s for s in here if s.name not in resting and not s.unlabelled)
        known = algorithm.members(before.state).sizes
        conduct = before.conduct.begin(number, [s.name for s in silos if s.name not in known])
        now = self._round(run, number, silos, conduct)
        state = welcome(algorithm, before.state, now)
        state, lost, summing = self._settled(run, state, now)

        # 2. What the algorithm must ask before the training, such as a cold start; and whose data
        #    those of silos without labels look like.
        state, phases, asked = self._ask(run, state, algorithm.prepare(state, now), now, conduct)
        known_guests, looking = self._looked(run, before.guests, guests, state, now, conduct)
        phases = kit.add_costs(phases, looking)
        state, more_lost, more = self._settled(run, state, now)
        phases = kit.add_costs(kit.add_costs(phases, summing), more)
        state = with_stated_sizes(algorithm, state, asked, self.influence)

        # 3. What does each of them do? One exchange, every reply checked.
        state, orders = algorithm.orders(state, now)
        orders += _orders_apart(silos, conduct)
        orders = stages.outgoing(sendable(orders), now)
        orders = [
            replace(o, config={**o.config, **told})
            if not o.purpose and (told := run.tell(o.silo))
            else o
            for o in orders
        ]
        messages = training_messages(
            orders,
            number=number,
            config=run.config,
            groups=algorithm.groups(state),
            evaluate=self.evaluate and before.round % self.evaluate_every == 0,
            told=run.told,
            secure=self._entries(run, state),
        )
        clock.lap("prepare")
        replies = run.exchange(messages)
        del messages  # their models, encoded, need not be there beside the mean
        checked = self._checked(run, orders, replies, state, number)
        del replies
        ours = {o.silo.name: str(why) for o, why in checked.failed if why.is_ours and not o.purpose}
        run.unaware.update(ours if run.secure is None else {})  # a sum is of who was told the same
        require_understood(orders, checked, number, type(algorithm).__name__)
        if checked.left_out and all(u.purpose for u in checked.updates):
            why = wire.reasons(checked.left_out)
            spent = all(error.spent for order, error in checked.failed if not order.purpose)
            raise _AllSpentError(why) if spent else _NobodyAnsweredError(why)
        run.note_minimums(checked.updates)
        diverged = {o.silo.name: o.model for o, why in checked.failed if why.diverged}
        state = _without_diverged(algorithm, state, diverged)
        bounded = self._bound(checked.updates, conduct, number, algorithm.groups(state))
        was_apart, conduct = conduct.apart, bounded.conduct.diverged(diverged, number)
        now = self._round(run, number, silos, conduct) if diverged else now
        phases = kit.add_costs(phases, kit.costs_beside_training(orders, checked.updates))
        clock.lap("train")

        # 4. State and updates give the next state. Who accepts no group as small as what answered
        #    of its own does not count: of the groups that trained, and of those that came of it.
        several = [group for group in algorithm.groups(state) if len(group) > 1]
        counting = [u for u in bounded.updates if u.silo.name not in was_apart]
        left_out = resting | checked.left_out | dict(bounded.moved_out)
        left_out |= kit.withdraw(several, counting)
        updates = [u for u in counting if u.purpose or u.silo.name not in left_out]
        state = with_stated_sizes(algorithm, state, updates, self.influence)
        state = algorithm.absorb(without(state, _not_kept(checked)), updates, now)
        state, still_lost, more = self._settled(run, state, now)
        phases = kit.add_costs(phases, more)
        left_out |= lost | more_lost | still_lost
        left_out |= kit.withdraw(algorithm.sharing(state), updates)
        conduct = conduct.trained_alone([u for u in checked.updates if u.silo.name in was_apart])
        trained = [u for u in updates if not u.purpose]
        trained += [u for u in checked.updates if u.silo.name in conduct.apart and not u.purpose]
        trained.sort(key=lambda u: u.silo.name)
        evaluated, evaluation = number - 1, kit.received_evaluations(trained)
        metrics: Mapping[str, kit.Figures] = {}
        clock.lap("aggregate")

        # 5. Silos that cannot answer for it on the way are asked for their error, and all keep
        #    their models where it is time to.
        silent = frozenset() if run.secure is None else frozenset(run.secure.silent)
        played = Played(
            *(now, algorithm, state, orders, checked, trained, silent, run.seconds, run.deadline_s)
        )
        stages, notes = stages.after(played)
        run.seconds.clear()
        ended_early = notes.pop(ENDED_EARLY, "")
        everybody = replace(now, silos=silos)
        places = self._places(known_guests, guests, state)
        if number < run.rounds and not ended_early:
            stated, metrics = self._evaluate_plain(run, state, everybody, conduct)
            evaluated, evaluation = (number, stated) if stated else (evaluated, evaluation)
            clock.lap("evaluate")
            if self.keep_every and number % self.keep_every == 0:
                self._hand_over(run, state, everybody, conduct, places=places, guests=guests)
                clock.lap("keep")

        # 6. The round is over.
        for name, reason in left_out.items():
            kit.log.warning("round %d: %s is left out: %s", number, name, reason)
        was_here = dict.fromkeys(silo.name for silo in before.silos)
        is_here = dict.fromkeys(silo.name for silo in here)
        report = kit.RoundReport(
            round=number,
            groups=self._groups(state, everybody, conduct),
            joined=tuple(name for name in is_here if name not in was_here),
            left=tuple(name for name in was_here if name not in is_here),
            left_out=left_out,
            silos=self._silo_reports(state, trained, several),
            evaluated_round=evaluated,
            evaluation=evaluation,
            train_metrics={u.silo.name: u.figures for u in trained if u.figures},
            metrics=metrics,
            personalised=kit.trained_evaluations(trained),
            seconds=clock.seconds,
            phases=phases,
            details={
                **algorithm.details(state),
                **_influence_entry(bounded),
                **_guests_entry(places),
                **notes,
            },
            ended_early=ended_early,
        )
        standing = replace(
            before,
            round=number,
            state=state,
            silos=here,
            ended_early=ended_early,
            conduct=conduct,
            guests=known_guests,
            kept=stages.kept,
        )
        return standing, report, trained

    def _silo_reports(
        self, state: Any, trained: kit.Updates, groups: Sequence[kit.Group]
    ) -> dict[str, kit.SiloReport]:
        """What the record keeps of each silo's training; ``groups`` of several trained together."""
        held, together = self.algorithm.models(state), {n for group in groups for n in group}
        reports = {u.silo.name: kit.silo_report(u) for u in trained}
        shared = [u for u in trained if u.silo.name in together and u.silo.name in held]
        apart = kit.each(
            lambda u: kit.distance(u.model, held[u.silo.name], u.silo.buffers),
            shared,
            num_bytes=max((kit.num_bytes(u.start) for u in shared), default=0),
        )
        for u, far in zip(shared, apart, strict=True):
            reports[u.silo.name] = replace(reports[u.silo.name], discrepancy=far)
        return reports

    def _finish(
        self, run: _Run, standing: Checkpoint[Any], *, alone: bool
    ) -> tuple[Checkpoint[Any], kit.RoundReport]:
        """Hand every silo that is here its own model, evaluated."""
        algorithm, clock, silos = self.algorithm, _Clock(), standing.silos
        if alone:  # only the end was missing: its nodes may have other ids now
            here = {s.name: s for s in run.present(self.roster, standing.round)}
            silos = tuple(here[silo.name] for silo in silos if silo.name in here)
        conduct = standing.conduct
        guests = [silo for silo in silos if silo.unlabelled]
        silos = tuple(silo for silo in silos if not silo.unlabelled)
        rests = Stages(self.stages, standing.kept).resting(silos, standing.round + 1)
        awake = [silo for silo in silos if silo.name not in rests]
        now = self._round(run, standing.round, awake, conduct)
        everybody = replace(now, silos=tuple(silos))  # who rested is given its model all the same
        self._greeted(run, awake, standing.state)
        finishing = algorithm.finish(standing.state, now)
        state, phases, _ = self._ask(run, standing.state, finishing, now, conduct)
        state, _, more = self._settled(run, state, now)
        phases = kit.add_costs(phases, more)
        known_guests, more = self._looked(run, standing.guests, guests, state, now, conduct)
        phases = kit.add_costs(phases, more)
        places = self._places(known_guests, guests, state)
        clock.lap("finish")
        early = bool(standing.ended_early)
        asked, replies = (
            self._hand_over(
                *(run, state, everybody, conduct), places=places, guests=guests, ended_early=early
            )
            if self.evaluate
            else ([], [])
        )
        evaluation = kit.read_evaluations(asked, replies, run.names)
        clock.lap("evaluate")
        report = kit.RoundReport(
            round=standing.round,
            groups=self._groups(state, everybody, conduct),
            evaluated_round=standing.round,
            evaluation=evaluation,
            metrics=kit.read_own_metrics(asked, replies, evaluation),
            seconds=clock.seconds,
            phases=phases,
            details={**algorithm.details(state), **_guests_entry(places)},
            final=True,
        )
        silos = tuple(sorted((*silos, *guests), key=lambda silo: silo.name))
        return replace(standing, state=state, silos=silos, guests=known_guests), report

    # ---------------------------------------------------------------- its steps

    def _round(
        self, run: _Run, number: int, silos: Sequence[kit.Silo], conduct: kit.Conduct
    ) -> kit.Round:
        """The round as the algorithm sees it: for it, who was moved out is away."""
        here = tuple(silo for silo in silos if silo.name not in conduct.apart)
        secure = run.secure is not None
        return kit.Round(number, here, {**run.told, **run.config}, self.on_event, secure)

    # ---------------------------------------------------------------- of silos without labels

    def _looked(
        self,
        run: _Run,
        known: visiting.Guests,
        guests: Sequence[kit.Silo],
        state: Any,
        now: kit.Round,
        conduct: kit.Conduct,
    ) -> tuple[visiting.Guests, dict[str, kit.PhaseReport]]:
        """What is known of guests by now, and what it cost to find out."""
        steps = visiting.look(known, guests, self._shown(state), now)
        found, costs, _ = self._ask(run, state, steps, now, conduct)
        return found, costs

    def _shown(self, state: Any) -> list[kit.Group]:
        """The groups whose models guests may have."""
        if self.algorithm.alone:
            return []
        return visiting.shown(self.algorithm.groups(state), self.algorithm.members(state).minimums)

    def _places(
        self, known: visiting.Guests, guests: Sequence[kit.Silo], state: Any
    ) -> dict[str, visiting.Place]:
        """Where each guest that is here belongs now."""
        shown, alone = self._shown(state), self.algorithm.alone
        found = {s.name: visiting.place(known.of[s.name], shown, alone=alone) for s in guests}
        for name, place in found.items():
            kit.log.debug("silo %s, without labels: %s", name, place.why)
        return found

    # ---------------------------------------------------------------- of a secure run

    def _compared(self, run: _Run, state: Any) -> tuple[kit.Compared | None, dict[str, int]]:
        """What silos sketch of their updates: what the algorithm compares, or at least what their
        influence is bounded by, where the model is large enough."""
        compared = self.algorithm.compared(state)
        initial = self.algorithm.members(state).initial
        if compared is not None:
            return compared, sketches_of(compared, initial)
        anyway = None if self.algorithm.alone else kit.Compared()
        sizes = {} if anyway is None else sketch_sizes(initial, anyway.layers)
        return (anyway, sizes) if sizes else (None, {})

    def _greeted(self, run: _Run, silos: Sequence[kit.Silo], state: Any) -> dict[str, str]:
        """Silo → why it cannot take part in a secure round."""
        if run.secure is None:
            return {}
        run.secure.require_own(silos)
        run.secure.silent.clear()
        compared, _ = self._compared(run, state)
        return run.secure.greet(silos, seed=compared is not None)

    def _entries(self, run: _Run, state: Any) -> Callable[[kit.Order], Mapping[str, Any]] | None:
        """What messages of a secure run say beside the others."""
        if run.secure is None:
            return None
        return partial(run.secure.entries, compared=self._compared(run, state)[0])

    def _checked(
        self,
        run: _Run,
        orders: Sequence[kit.Order],
        replies: Sequence[Message | None],
        state: Any,
        number: int,
    ) -> kit.Checked:
        """The replies to orders, checked; of who refused, the key is asked for anew."""
        sketches = None if run.secure is None else self._compared(run, state)[1]
        checked = kit.check_replies(
            orders,
            replies,
            run.names,
            sketches=sketches,
            number=number,
            wire_format=str(run.config.get(wire.WIRE_FORMAT, wire.FLOAT32)),
        )
        for order, why in checked.failed if run.secure is not None else ():
            if not (why.silent or why.diverged) and run.secure is not None:
                run.secure.forget(order.silo.name)
        return checked

    def _settled(
        self, run: _Run, state: Any, now: kit.Round
    ) -> tuple[Any, dict[str, str], dict[str, kit.PhaseReport]]:
        """The state with models where it has means of unseen ones, who was lost, and the cost."""
        if run.secure is None:
            return state, {}, {}
        settled = run.secure.settle(state, now)
        return settled.value, dict(settled.lost), dict(settled.phases)

    def _bound(
        self,
        updates: kit.Updates,
        conduct: kit.Conduct,
        number: int,
        groups: Sequence[kit.Group] = (),
    ) -> kit.Bounded:
        """What counts of an exchange's updates; of silos that learn nothing of others, all."""
        if self.algorithm.alone:
            return kit.Bounded(list(updates), conduct)
        shared = [u for u in updates if u.silo.name not in conduct.apart]
        crosses = self.algorithm.crosses
        return kit.bound(
            self.influence, conduct, shared, number=number, groups=groups, crosses=crosses
        )

    def _groups(
        self, state: Any, everybody: kit.Round, conduct: kit.Conduct
    ) -> tuple[kit.Group, ...]:
        """Who trained together; who was moved out is alone."""
        out = conduct.apart.keys() & set(everybody.names)
        if not out:
            return tuple(self.algorithm.groups(state))
        kept = [tuple(n for n in group if n not in out) for group in self.algorithm.groups(state)]
        return tuple(group for group in kept if group) + tuple((name,) for name in sorted(out))

    def _ask(
        self,
        run: _Run,
        state: Any,
        steps: Generator[Sequence[kit.Order], kit.Answers, Any],
        now: kit.Round,
        conduct: kit.Conduct,
    ) -> tuple[Any, dict[str, kit.PhaseReport], list[kit.Update]]:
        """Drive ``prepare`` or ``finish``: every set of orders that it yields is one exchange.

        ``state`` is the one before.
        """
        costs: dict[str, kit.PhaseReport] = {}
        asked: list[kit.Update] = []
        answers: kit.Answers | None = None
        while True:  # as often as the algorithm asks; every exchange has its deadline
            try:
                orders = next(steps) if answers is None else steps.send(answers)
            except StopIteration as end:
                return end.value, costs, asked
            assert all(order.purpose for order in orders), "the round's training comes later"
            orders = sendable(orders)
            started = time.perf_counter()
            messages = training_messages(
                orders,
                number=now.number,
                config=run.config,
                groups=(),
                evaluate=False,
                told=run.told,
                secure=self._entries(run, state),
            )
            checked = self._checked(run, orders, run.exchange(messages), state, now.number)
            require_understood(orders, checked, now.number, type(self.algorithm).__name__)
            bounded = self._bound(checked.updates, conduct, now.number)
            answers = replace(checked, updates=bounded.updates).answers
            seconds = time.perf_counter() - started
            costs = kit.add_costs(costs, kit.costs_by_kind(orders, answers, seconds))
            asked += answers

    def _evaluate_plain(
        self, run: _Run, state: Any, now: kit.Round, conduct: kit.Conduct
    ) -> tuple[dict[str, kit.Evaluation], dict[str, kit.Figures]]:
        """Of the silos that do not answer for it with their next training."""
        models = {**self.algorithm.next_models(state), **conduct.models}
        plain = [silo for silo in now.silos if not silo.described and silo.name in models]
        if not self.evaluate or not plain or now.number % self.evaluate_every:
            return {}, {}
        messages = evaluation_messages(
            plain,
            models,
            number=now.number,
            config=run.config,
            more=run.evaluate_config,
            told=run.told,
        )
        replies = run.exchange(messages)
        evaluation = kit.read_evaluations(plain, replies, run.names)
        return evaluation, kit.read_own_metrics(plain, replies, evaluation)

    def _hand_over(
        self,
        run: _Run,
        state: Any,
        now: kit.Round,
        conduct: kit.Conduct,
        *,
        places: Mapping[str, visiting.Place],
        guests: Sequence[kit.Silo],
        ended_early: bool = False,
    ) -> tuple[list[kit.Silo], list[Message | None]]:
        """Send every silo that is here its own model to keep; return what they say of it.

        Guests get their group's, and can say nothing of it.
        """
        models = own_or_origin({**self.algorithm.models(state), **conduct.models})
        common = self.algorithm.common(state)
        if common is not None:
            models = {**dict.fromkeys(now.names, common), **models}
        silos = [silo for silo in now.silos if silo.name in models]
        groups = self._groups(state, now, conduct)
        own = membership(silos, groups, name_members=self.name_members)
        for silo in silos:
            own[silo.name] |= run.tell(silo)
        placed = [silo for silo in guests if places[silo.name].found]
        for silo in placed:
            group = places[silo.name].groups[0].group
            held = {name: models[name] for name in group if name in models}
            mean = mean_model(held, self.algorithm.members(state).sizes)
            if mean is None:
                continue
            models[silo.name] = mean
            names = {wire.MEMBERS: list(group)} if self.name_members else {}
            number = {wire.GROUP: groups.index(group) + 1} if group in groups else {}
            why = {wire.PLACED: places[silo.name].why}
            own[silo.name] = {
                wire.KEEP: True,
                wire.GROUP_SIZE: len(group),
                **number,
                **names,
                **why,
            }
        placed = [silo for silo in placed if silo.name in models]
        messages = evaluation_messages(
            [*silos, *placed],
            models,
            number=now.number,
            config=run.config,
            more={**run.evaluate_config, **({wire.ENDED_EARLY: True} if ended_early else {})},
            told=run.told,
            own=own,
        )
        replies = run.exchange(messages)
        for silo, reply in zip(placed, replies[len(silos) :], strict=True):
            _note_unkept(silo, reply)
        return silos, replies[: len(silos)]

    # ---------------------------------------------------------------- Flower's hooks

    def _has_no_hooks(self, *_: Any, **__: Any) -> NoReturn:
        raise FederationError(
            "a strategy with several models cannot be driven step by step: Flower's hooks know one "
            "model. Call its start(...), and wrap the ClientApp with mods instead of the strategy."
        )

    configure_train = aggregate_train = _has_no_hooks
    configure_evaluate = aggregate_evaluate = _has_no_hooks


def _ended_by(spent: _AllSpentError, standing: Checkpoint[Any]) -> Checkpoint[Any]:
    """The end of a run whose silos have no privacy left: all keep the models that they have.

    Raises:
        FederationError: there is none yet.
    """
    why = f"no silo's privacy budget allows another round: {spent}"
    if not standing.round:
        raise FederationError(why, round_number=1, phase="train")
    kit.log.warning("the run ends after round %d: %s", standing.round, why)
    return replace(standing, ended_early=why)


def strategy_of(
    algorithm: type[kit.Algorithm[Any]], *, name: str, fixed: Mapping[str, Any]
) -> type[GroupStrategy]:
    """The Flower strategy of an algorithm: ``HCCT(alpha=50, round_timeout=60)``.

    Args:
        algorithm: its fields become the strategy's arguments.
        name: of the class.
        fixed: fields that are not left open.
    """

    def make(**options: Any) -> kit.Algorithm[Any]:
        if stray := sorted(fixed.keys() & options.keys()):
            raise kit.wrong_options([f"unknown key {key!r}: {name} sets it" for key in stray])
        return algorithm(**fixed, **options)

    made = type(
        name,
        (GroupStrategy,),
        {
            "kind": staticmethod(make),
            "__doc__": algorithm.__doc__,
            "__module__": "coterie.strategies",
        },
    )
    engine = inspect.signature(GroupStrategy.__init__).parameters.values()
    own = [
        inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=info.default)
        for field, info in algorithm.model_fields.items()
        if field not in fixed
    ]
    loop = [p for p in engine if p.kind is p.KEYWORD_ONLY]
    made.__signature__ = inspect.Signature([*own, *loop])  # type: ignore[attr-defined]
    return made


def welcome(algorithm: kit.Algorithm[Any], state: Any, now: kit.Round) -> Any:
    """The state with who is here: newcomers enrolled, and what silos state today."""
    members = algorithm.members(state)
    new = [silo for silo in now.silos if silo.name not in members.sizes]
    if new:
        members = kit.enrol(members, new, algorithm.newcomer_model(state))
    changed = kit.renewed(members, now.silos)
    members = kit.with_data(kit.with_minimums(members, now.silos), now.silos)
    state = algorithm.with_members(state, members)
    state = algorithm.welcome(state, frozenset(silo.name for silo in new), now)
    for name in sorted(changed):
        kit.log.warning(
            "silo %s comes with other training data than before: %s",
            name,
            f"{algorithm.outdated} is of the data before"
            if algorithm.outdated
            else "nothing that was known of the data before is used",
        )
    return algorithm.renew(state, changed, now) if changed else state


def with_stated_sizes(
    algorithm: kit.Algorithm[Any],
    state: Any,
    updates: Iterable[kit.Update],
    influence: kit.Influence | None = None,
) -> Any:
    """The state with the training samples that silos state now, none with too large a share."""
    stated = {u.silo.name: u.num_examples for u in updates if not u.purpose or u.kind in SIZED}
    if influence is not None:
        stated = kit.capped(stated, influence.max_share)
    return algorithm.with_members(state, kit.with_sizes(algorithm.members(state), stated))


def _orders_apart(silos: Sequence[kit.Silo], conduct: kit.Conduct) -> list[kit.Order]:
    """Who was moved out trains its own model, alone, and is told why."""
    out = [(silo, conduct.apart[silo.name]) for silo in silos if silo.name in conduct.apart]
    return [
        kit.Order(silo, apart.model, config={wire.GROUP_SIZE: 1, wire.APART: apart.why})
        for silo, apart in out
    ]


def _without_diverged(algorithm: kit.Algorithm[Any], state: Any, gone: Collection[str]) -> Any:
    """The state in which these silos were in no group of this round."""
    if not gone:
        return state
    members = algorithm.members(state)
    kept = [tuple(n for n in group if n not in gone) for group in members.groups]
    return algorithm.with_members(state, members.grouped(filter(None, kept)))


def _not_kept(checked: kit.Checked) -> list[kit.Unseen]:
    """Models that silos were to go on from, and refused: they may have lost them."""
    own = [order.model for order, why in checked.failed if why.refused]
    return [model for model in own if isinstance(model, kit.Unseen)]


def _guests_entry(places: Mapping[str, visiting.Place]) -> dict[str, Any]:
    """For the record, where there are silos without labels."""
    return {"unlabelled": {n: p.entry() for n, p in sorted(places.items())}} if places else {}


def _note_unkept(silo: kit.Silo, reply: Message | None) -> None:
    if reply is None or reply.has_error():
        why = "it did not answer in time" if reply is None else reply.error.reason
        kit.log.warning("silo %s, without labels, did not take its model: %s", silo.name, why)


def _influence_entry(bounded: kit.Bounded) -> dict[str, Any]:
    """For the record, where there is something to say."""
    return {"influence": dict(bounded.told)} if bounded.told else {}


def require_understood(
    orders: Sequence[kit.Order], checked: kit.Checked, number: int, algorithm: str
) -> None:
    """End a run whose ClientApps answer no message of a type that is this project's own.

    Without this, such a strategy would run to its end with everybody alone. What one of them
    answers, one that described itself is asked, or nobody answered in time, is no such case.

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
            f"{algorithm} asks silos for {kind!r}, and none of the {len(asked)} nodes here answers "
            f"that: their ClientApp has no function for it. Run coterie's own silos (`coterie "
            f"silo`), add such a function, or take a strategy that works with any ClientApp "
            f"(docs/how-to/choose-a-strategy.md). {asked[0].name} said: {failed[0]}",
            round_number=number,
            phase=kind,
            exit_code=EXIT_CONFIG,
        )


class _Clock:
    """Wall seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = round(now - self._last, 6)
        self._last = now


def _note(result: RunResult, report: kit.RoundReport, trained: kit.Updates) -> None:
    """The round's report, and Flower's own figures of it."""
    result.rounds.append(report)
    if report.evaluation:
        record = kit.evaluation_record(report.evaluation, report.metrics)
        if report.evaluated_round:
            result.evaluate_metrics_clientapp[report.evaluated_round] = record
    if trained:
        result.train_metrics_clientapp[report.round] = kit.training_record(trained)


def _evaluate_on_server(
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    number: int,
    result: RunResult,
) -> None:
    metrics = evaluate_fn(number, result.arrays) if evaluate_fn is not None else None
    if metrics is not None:
        result.evaluate_metrics_serverapp[number] = metrics


def _evaluate_groups(
    evaluate_group_fn: EvaluateGroup | None, report: kit.RoundReport, result: RunResult
) -> None:
    if evaluate_group_fn is None:
        return
    found = result.evaluate_metrics_groups[report.round] = {}
    for group in report.groups:
        model = result.group_model(group)
        metrics = None if model is None else evaluate_group_fn(report.round, group, model)
        if metrics is not None:
            found[group] = metrics
