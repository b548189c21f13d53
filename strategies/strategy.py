"""Strategies: Flower's interface to an algorithm, and the engine that plays its rounds.

A strategy holds an algorithm (``coterie.strategies.rounds.algorithm``). The engine
(``coterie.strategies.rounds.play``) does what is common to all algorithms: it gets the connected
silos from the roster, admits newcomers, sends orders under a deadline, checks every reply before
any arithmetic, and reports. Everything else is a stage, in a folder of ``features``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NoReturn
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from coterie import wire
from coterie.engine.plain import engine_of, run_of
from coterie.engine.port import Engine
from coterie.features.compression.coordinator import Compression
from coterie.features.consensus.coordinator import Consensus
from coterie.features.families.coordinator import Families
from coterie.features.hidden_layers.coordinator import HiddenLayers
from coterie.features.personal.coordinator import Pooling
from coterie.features.rejections.coordinator import Rejections
from coterie.features.robust.coordinator import Robust
from coterie.features.robust.keys import Influence, aggregate_problem
from coterie.features.secure.coordinator import Secure
from coterie.features.secure.keys import insecure
from coterie.features.secure.sums import Enrolled, SecureRun
from coterie.features.server_optimiser.coordinator import ServerOptimisation
from coterie.features.server_optimiser.keys import ServerOptimiser, server_optimiser_problem
from coterie.features.smallest_groups.coordinator import SmallestGroups
from coterie.features.stopping.coordinator import Stopping
from coterie.features.stragglers.coordinator import Stragglers
from coterie.features.sums.trees.coordinator import is_trees
from coterie.features.unlabelled.coordinator import Testing, Unlabelled
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.plain.hidden import OwnBeside
from coterie.strategies.rounds import spoken
from coterie.strategies.rounds.algorithm import Algorithm, Update, Updates
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.conversation import AllSpentError, Line, NobodyAnsweredError, Run
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.nodes import NodeRoster
from coterie.strategies.rounds.options import Config, underscored, wrong_options
from coterie.strategies.rounds.play import finish, play
from coterie.strategies.rounds.replies import (
    MAPPED,
    check_averageable,
    check_finite,
    evaluation_record,
    training_record,
)
from coterie.strategies.rounds.reports import Group, RoundReport
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import Roster
from coterie.strategies.rounds.stage import Stage

log = logging.getLogger("coterie.run")

MOST_TRIES = 3
"""Most tries of a round in which no training counts, before the run fails."""
TRY_AGAIN_S = 1.0
"""Seconds before the second try, doubled each time: the cause may be temporary."""

EvaluateGroup = Callable[[int, Group, ArrayRecord], MetricRecord | None]
"""Called with the round, who is in the group and the group's model."""


class GroupStrategy(Strategy):
    """A Flower strategy in which silos may hold different models: an algorithm, and its engine.

    Args:
        algorithm: a subclass such as ``HCCT`` makes its own from its options.
        round_timeout: seconds after which a round continues without the missing replies.
        train_config: entries of every training message, e.g. ``{"lr": 0.1, "local-epochs": 5}``. A
            key ``lr-decay`` is applied here: silos get ``lr · lr-decay^(round−1)``.
        evaluate: whether silos evaluate their models.
        evaluate_every: rounds between two evaluations; the last round is always evaluated.
        min_silos: nodes that round 1 waits for.
        ask_names: ask every node what it is called (``query.name``). Otherwise, and if it does not
            answer, nodes are called ``silo-0``, ``silo-1``, ….
        roster: which silos take part, in place of every connected node.
        on_round: called with every report at once. Without it, every round and its groups are
            logged through Flower's logger, ``flwr``.
        on_event: called with what cannot wait for the round's report: a kind, and JSON values.
            ``budget``: the most that an exchange before the round's training may cost.
        keep_every: rounds after which silos also write their own model to disk each time; 0 = only
            after the last.
        name_members: silos receive the names of their group's members, not only the number.
        patience: rounds without improvement of the silos' mean validation error after which the run
            ends; 0 plays all rounds. Silos hold validation data out of training if ``train_config``
            has ``validation``.
        influence: bounds on one silo's influence; see ``coterie.strategies.Influence``.
        server_optimiser: ``fedavgm``, ``fedadam`` or ``fedyogi``, or a ``ServerOptimiser`` with its
            settings: moves each group's model by a step instead of to its silos' mean.
        secure: secure aggregation: only a silo itself sees its updates; the coordinator compares
            sketches of them and adds up masked ones. Needs coterie's own silos.
        enrolled: with ``secure``: vouches for the keys of enrolled silos.
        metric_names: the ClientApp's name of a metric → ``num-examples``, ``train-loss``, ``loss``,
            ``error`` or ``accuracy``, for names that are not understood directly, unlike those of
            Flower's examples.
        record: whether a run that ``flwr run`` starts has a record, which ``coterie runs`` reads;
            see ``coterie.recorded``.
        options: of the algorithm, in a subclass.

    Raises:
        FederationError: an option is out of bounds, or conflicts with another.
    """

    kind: ClassVar[Callable[..., Algorithm[Any]] | None] = None
    action: str = ""
    """Of the ClientApp's functions that train and evaluate: ``@app.train("<action>")``."""

    def __init__(
        self,
        algorithm: Algorithm[Any] | None = None,
        *,
        round_timeout: float = 600.0,
        train_config: Config | None = None,
        evaluate: bool = True,
        min_silos: int = 2,
        ask_names: bool = False,
        roster: Roster | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
        keep_every: int = 0,
        name_members: bool = False,
        evaluate_every: int = 1,
        patience: int = 0,
        influence: Influence | None = None,
        server_optimiser: ServerOptimiser | str = "none",
        metric_names: Mapping[str, str] | None = None,
        secure: bool = False,
        enrolled: Enrolled | None = None,
        record: bool = True,
        **options: Any,
    ) -> None:
        if self.kind is not None and algorithm is not None:
            raise TypeError(
                f"options of {type(self).__name__} must be given by name. Got {algorithm!r}"
            )
        if self.kind is not None:
            algorithm = self.kind(**options)
        elif options:
            raise TypeError(f"unknown arguments: {', '.join(sorted(options))}")
        if algorithm is None:
            raise TypeError("an algorithm is needed")
        training = dict(train_config or {})
        algorithm.require_consistency(training, spell=underscored)
        self.algorithm, self._asked = algorithm, training
        if algorithm.whole and influence is not None:
            why = "influence: replies go whole to other strategies, so it cannot be bounded"
            raise wrong_options([f"{why}. Use a robust strategy inside, such as FedMedian"])
        self.influence = influence or Influence()
        name = type(self if self.kind is not None else algorithm).__name__
        averages = algorithm.averages
        if why := aggregate_problem(self.influence, averages=averages, strategy=name):
            raise wrong_options([why])
        if isinstance(server_optimiser, str):
            server_optimiser = ServerOptimiser.build({"server-optimiser": server_optimiser})
        if why := server_optimiser_problem(server_optimiser, algorithm, name):
            raise wrong_options([why])
        self.server_optimiser = server_optimiser
        how = str(training.get(wire.WIRE_FORMAT, wire.FLOAT32))
        aggregate = self.influence.aggregate
        why = insecure(algorithm, aggregate=aggregate, name=name, wire_format=how) if secure else ""
        if why:
            raise wrong_options([why])
        self.secure, self.enrolled, self.record = secure, enrolled, record
        self.round_timeout = round_timeout
        self.train_config: Config = {**training, **algorithm.entries(training)}
        if secure and wire.RUN not in self.train_config:  # silos keep what is of it apart by that
            self.train_config = {**self.train_config, wire.RUN: f"run-{uuid4().hex[:12]}"}
        self.evaluate = evaluate
        if min_silos < 1:
            raise wrong_options([f"min_silos must be at least 1. Got {min_silos}"])
        self.roster: Roster = roster or NodeRoster(min_silos=min_silos, ask=ask_names)
        self.on_round = on_round
        self.on_event = on_event or (lambda kind, fields: None)
        self.keep_every, self.name_members = keep_every, name_members
        self.evaluate_every = evaluate_every
        if evaluate_every < 1 or patience < 0:
            raise wrong_options(
                [
                    "evaluate_every must be at least 1 and patience at least 0. "
                    f"Got {evaluate_every} and {patience}"
                ]
            )
        self.patience = patience
        self.metric_names = dict(metric_names or {})
        if stray := sorted(set(self.metric_names.values()) - set(MAPPED)):
            raise wrong_options(
                [f"metric_names: must map to one of {', '.join(MAPPED)}. Got {stray[0]!r}"]
            )

    def summary(self) -> None:
        """Log the configuration."""
        name = type(self.algorithm).__name__
        settings = dict(self.train_config) or "each ClientApp trains by its own settings"
        log.info("%s: %s", name, settings)

    # ---------------------------------------------------------------- the run

    def start(
        self,
        grid: Grid | Engine,
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
            grid: Flower's, or an engine.
            initial_arrays: w⁰, from which every silo starts.
            num_rounds: ≥ 1.
            timeout: seconds; replaces ``round_timeout``.
            train_config: added to the entries of training messages.
            evaluate_config: added to the entries of evaluation messages.
            evaluate_fn: evaluates the mean of all models on the server, as in Flower.
            evaluate_group_fn: evaluates every group's model on the server after every round.
            commit: called with a checkpoint when a round has been reported.
            resume: checkpoint to continue from, with the same models as in an uninterrupted run;
                ``initial_arrays`` are then not used.

        Returns:
            Flower's result, with every silo's own model, the groups and a report per round.

        Raises:
            FederationError: no silos came, none is left, or none of them understands the strategy's
                messages.
        """
        if num_rounds < 1:
            raise FederationError(f"num_rounds must be at least 1. Got {num_rounds}.")
        if commit is None and resume is None and (kept := self._kept(grid)) is not None:
            given = (grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config)
            found: RunResult = kept.start(
                *given, evaluate_fn=evaluate_fn, evaluate_group_fn=evaluate_group_fn
            )
            return found
        # Classes are called like strategies in files, but for capitals.
        name = type(self).__name__.lower() if self.kind is not None else ""
        about: dict[str, Any] = {wire.ROUNDS: num_rounds, **({wire.STRATEGY: name} if name else {})}
        asked = {**about, **self._asked, **(train_config or {})}
        self.algorithm.require_consistency(asked, spell=underscored)
        config = {**about, **self.train_config, **(train_config or {})}
        line = Line(engine_of(grid), self.round_timeout if timeout is None else timeout)
        run = Run(
            line,
            roster_of_run(self.roster, self.algorithm, resume),
            self.algorithm,
            self._stages(line, config),
            num_rounds,
            config,
            dict(evaluate_config or {}),
            self.metric_names,
            self.on_event,
            unseen=self.secure,
            max_share=self.influence.max_share,
            evaluate=self.evaluate,
            evaluate_every=self.evaluate_every,
            keep_every=self.keep_every,
            name_members=self.name_members,
            action=self.action,
        )
        on_round = self.on_round or partial(spoken.say, rounds=num_rounds)
        with spoken.heard() if self.on_round is None else nullcontext():
            return self._run(
                run, initial_arrays, on_round, evaluate_fn, evaluate_group_fn, commit, resume
            )

    def _kept(self, grid: Grid | Engine) -> Any:
        """Return this strategy with a record, for a run that ``flwr run`` started."""
        if not self.record or run_of(grid) is None:
            return None
        from coterie import recorded

        try:
            return recorded(self)
        except (FederationError, OSError) as error:
            log.warning("this run has no record: %s. COTERIE_RUNS can name another folder.", error)
            return None

    def _stages(self, line: Line, config: Mapping[str, Any]) -> tuple[Stage, ...]:
        """Return the run's stages in the order in which they are called."""
        secure: tuple[Stage, ...] = ()
        if self.secure:
            known = (wire.TASK, wire.STRATEGY, wire.RUN, wire.SEED, wire.ROUNDS)
            said = {key: config[key] for key in known if key in config}
            sums = SecureRun(line.exchange, said, line.deadline_s, self.enrolled, line.silent)
            secure = (Secure(sums, config),)
        return (
            Stragglers(),
            Robust(self.influence),
            *secure,
            *self._optimisation(),
            SmallestGroups(),
            Compression(),
            *self._consensus(config),
            Stopping(self.patience, self.evaluate_every),
            Pooling(config),
            *(() if self.secure else (Rejections(),)),  # a sum needs equal entries
            Unlabelled(),
            Testing(),
            Families(),  # last: it looks at what the others send and hand out
        )

    def _consensus(self, config: Config) -> tuple[Stage, ...]:
        """Return the stages where a group's model is the mean of what its silos send."""
        means = self.algorithm.averages and not self.algorithm.crosses
        plain = self.influence.aggregate == "mean" and self.server_optimiser.name == "none"
        consensus: tuple[Stage, ...] = (Consensus(),) if means and plain and not self.secure else ()
        compares = self.algorithm.takes_steps or isinstance(self.algorithm, OwnBeside)
        exact = (means and plain and compares) or self.algorithm.alone
        return (*consensus, HiddenLayers(config, unseen=self.secure)) if exact else consensus

    def _optimisation(self) -> tuple[Stage, ...]:
        chosen = self.server_optimiser
        return () if chosen.name == "none" else (ServerOptimisation(chosen),)

    def _require_means(self, initial: Arrays) -> None:
        """Refuse keys about means of silos' models for trees, which are made of sums."""
        optimiser: str = self.server_optimiser.name
        aggregate: str = self.influence.aggregate
        asked = ("server-optimiser", optimiser, "none"), ("aggregate", aggregate, "mean")
        for key, value, usual in asked:
            if value != usual and is_trees(initial):
                raise refused(
                    f"{key} = {value} is for networks, and the task's network is trees, which grow "
                    "by sums. Leave it out."
                )

    def _run(
        self,
        run: Run,
        initial_arrays: ArrayRecord,
        on_round: Callable[[RoundReport], None],
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        evaluate_group_fn: EvaluateGroup | None,
        commit: Callable[[Checkpoint[Any]], None] | None,
        resume: Checkpoint[Any] | None,
    ) -> RunResult:
        self.summary()
        result = RunResult(initial_arrays)
        if resume is None:
            initial = wire.decode_arrays(initial_arrays)
            check_finite(initial)
            if not (self.algorithm.alone or self.algorithm.whole):
                check_averageable(initial)
            self.algorithm.check(initial, run.rounds)
            self._require_means(initial)
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
            except AllSpentError as spent:
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
                f"no silo's update counted in {wire.counted(standing.round, 'round')}: "
                f"{wire.reasons(report.left_out)}"
            )
        standing, report = finish(run, standing, alone=resume is standing)
        if result.rounds and result.rounds[-1].ended_early != standing.ended_early:
            report = replace(report, ended_early=standing.ended_early)
        result.stand(self.algorithm, standing)
        _note(result, report, [])
        on_round(report)
        return result

    def _play_until_answered(
        self, run: Run, before: Checkpoint[Any]
    ) -> tuple[Checkpoint[Any], RoundReport, list[Update]]:
        """Play the next round, again if no silo's training counts."""
        number = before.round + 1
        for tries in range(1, MOST_TRIES + 1):
            try:
                return play(run, before)
            except NobodyAnsweredError as nobody:
                why = str(nobody)
            if tries < MOST_TRIES:
                log.warning(
                    "round %d: no silo's training counted, so the round is repeated (%d of %d "
                    "tries): %s",
                    *(number, tries, MOST_TRIES, why),
                )
                time.sleep(TRY_AGAIN_S * 2 ** (tries - 1))
        raise FederationError(
            f"no silo's training counted in {MOST_TRIES} tries of round {number}: {why}"
        )

    # ---------------------------------------------------------------- Flower's hooks

    def _has_no_hooks(self, *_: Any, **__: Any) -> NoReturn:
        raise FederationError(
            "a strategy with several models cannot be driven step by step: Flower's hooks "
            "handle only one model. Call its start(...), and wrap the ClientApp with mods "
            "instead of the strategy."
        )

    configure_train = aggregate_train = _has_no_hooks
    configure_evaluate = aggregate_evaluate = _has_no_hooks


def roster_of_run(
    roster: Roster, algorithm: Algorithm[Any], resume: Checkpoint[Any] | None = None
) -> Roster:
    """Return the roster for one run; nodes keep the names that they had in a run that goes on."""
    if not isinstance(roster, NodeRoster):
        return roster
    own = roster.for_a_run()
    if resume is not None:
        own.recall(resume.silos, algorithm.members(resume.state).sizes)
    return own


def _ended_by(spent: AllSpentError, standing: Checkpoint[Any]) -> Checkpoint[Any]:
    """End a run whose silos have no privacy budget left; raise if there is no model to keep yet."""
    why = f"no silo's privacy budget allows another round: {spent}"
    if not standing.round:
        raise FederationError(why)
    log.warning("the run stops after round %d: %s", standing.round, why)
    return replace(standing, ended_early=why)


def _note(result: RunResult, report: RoundReport, trained: Updates) -> None:
    result.rounds.append(report)
    if report.evaluation:
        record = evaluation_record(report.evaluation, report.metrics)
        if report.evaluated_round:
            result.evaluate_metrics_clientapp[report.evaluated_round] = record
    if trained:
        result.train_metrics_clientapp[report.round] = training_record(trained)


def _evaluate_on_server(
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    number: int,
    result: RunResult,
) -> None:
    metrics = evaluate_fn(number, result.arrays) if evaluate_fn is not None else None
    if metrics is not None:
        result.evaluate_metrics_serverapp[number] = metrics


def _evaluate_groups(
    evaluate_group_fn: EvaluateGroup | None, report: RoundReport, result: RunResult
) -> None:
    if evaluate_group_fn is None:
        return
    found = result.evaluate_metrics_groups[report.round] = {}
    for group in report.groups:
        model = result.group_model(group)
        metrics = None if model is None else evaluate_group_fn(report.round, group, model)
        if metrics is not None:
            found[group] = metrics
