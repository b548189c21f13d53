"""One run from configuration to record: build the strategy, run it, record the events."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord

from coterie import wire
from coterie.engine.port import Engine
from coterie.features.evaluation.coordinator import FILE as EVALUATION
from coterie.features.evaluation.coordinator import ask_for_evaluations, write_judgement
from coterie.features.evaluation.coordinator import require_answers as require_evaluations
from coterie.features.secure.row_sums import masking_of
from coterie.features.secure.sums import Enrolled
from coterie.features.statistics.scale import ask_for_scale
from coterie.features.statistics.survey import ask_for_statistics, require_answers, write_survey
from coterie.features.watching.answer import decode_watched
from coterie.server.paths import default_runs_dir, place
from coterie.server.runs import contribution
from coterie.server.runs.answers import Announcing
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.config import RunConfig, train_config, trains_alone
from coterie.server.runs.fitted import fit_by_sums, terms_of
from coterie.server.runs.going_on import (
    CHECKPOINTS,
    Beginning,
    begin,
    earlier_run,
    model_file,
    resume_command,
    with_groups_of,
)
from coterie.server.runs.initial import initial_arrays, started_from
from coterie.server.runs.judged import judged
from coterie.server.runs.record import Recorder, Run, reading
from coterie.server.runs.record.metrics import Lead
from coterie.server.runs.roster import EnrolledRoster, Known
from coterie.server.runs.tracking import Tracking
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.options import Scalar
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import Roster, Silo
from coterie.strategies.strategy import GroupStrategy
from coterie.system.files import LockedError, held_by, locked, make_folder, why_unwritten

log = logging.getLogger("coterie.run")

LOCK_DEADLINE_S = 60.0
"""Time to wait for the previous process, which ends slowly if it lost its SuperLink."""
RESUME_PATIENCE = 5
"""Times ``wait-for-silos`` that a resumed run waits for enough silos: by default ten minutes, as
long as silos try to come back. A key that was not signed off is refused for one of them."""


@dataclass(frozen=True)
class Standing:
    """The committed state after a round, with the strategy's checkpoint.

    ``schema`` is the fingerprint of the silos' model; for ``scale`` see ``ask_for_scale``.
    """

    checkpoint: Checkpoint[Any]
    schema: str
    scale: Sequence[float] = ()


def run_folder(config: RunConfig, *, run_id: int) -> Path:
    """Return the folder of a run's record, named by label or strategy, and id."""
    root = place(config.runs_dir) if config.runs_dir else default_runs_dir()
    if config.resume:
        return root / config.resume
    return root / folder_name(config.label or config.strategy, run_id)


def folder_name(label: str, run_id: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', label)}-{run_id}"


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder for this process; the lock ends with the process.

    Raises ``FederationError`` if another process holds it for longer than a minute.
    """
    try:
        with locked(folder, deadline_s=LOCK_DEADLINE_S):
            yield
    except LockedError:
        raise FederationError(
            f"the run in {folder} is still active, in process {held_by(folder)}. Stop it first."
        ) from None


def terms(config: RunConfig) -> dict[str, Scalar]:
    """Return the terms of the run, which a silo can reject before it joins."""
    if config.strategy in wire.UNTRAINED:
        parent = {wire.PARENT: Path(config.parent).name} if config.parent else {}
        metric = {wire.METRIC: config.primary_metric} if config.primary_metric else {}
        sums = terms_of(config) if config.strategy in wire.BY_SUMS else {}
        secure = {wire.SECURE: True} if config.secure else {}
        own = {wire.STRATEGY: config.strategy, **parent, **metric, **sums, **secure}
        return own | config.task_keys
    training = train_config(config, run="")
    training |= config.algorithm.entries(training)
    entries = {key: value for key, value in training.items() if key in wire.terms()}
    entries |= config.task_keys
    entries |= {wire.SECURE: True} if config.secure else {}
    return entries | dict(config.algorithm.demands())


def build_strategy(
    config: RunConfig,
    *,
    run: str,
    roster: Roster,
    on_round: Callable[[RoundReport], None],
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
    vouching: Enrolled | None = None,
) -> GroupStrategy:
    """Build the configured strategy, with its generators if it has any."""
    return GroupStrategy(
        config.algorithm,
        round_timeout=config.round_timeout,
        train_config=train_config(config, run=run),
        roster=roster,
        on_round=on_round,
        on_event=on_event,
        keep_every=config.keep_every,
        evaluate=config.strategy != wire.CONTRIBUTION,  # silos keep none of its models
        evaluate_every=config.evaluate_every,
        patience=config.patience,
        name_members=config.name_members,
        influence=config.influence,
        server_optimiser=config.server_optimiser,
        secure=config.secure,
        enrolled=vouching,
    )


class RecordingRoster:
    """A roster that records when it looks for silos and which it finds."""

    def __init__(self, inner: Roster, record: Recorder) -> None:
        self.inner = inner
        self.record = record
        self.silos: dict[str, Silo] = {}

    def present(self, engine: Engine, *, number: int) -> list[Silo]:
        self.record.event("look", round=number)
        here = self.inner.present(engine, number=number)
        self.silos = {silo.name: silo for silo in here}
        self.record.event("here", round=number, silos=sorted(self.silos))
        return here

    def answered(self, node_ids: Sequence[int], message_type: str) -> None:
        if silos := self._named(node_ids):
            self.record.event("answer", work=message_type, silos=silos)

    def asked(self, node_ids: Sequence[int]) -> None:
        """Record which silos an exchange without a round waits for."""
        self.record.event("here", round=1, silos=self._named(node_ids))

    def _named(self, node_ids: Sequence[int]) -> list[str]:
        names = {silo.node_id: name for name, silo in self.silos.items()}
        return sorted({names[node] for node in node_ids if node in names})


def execute(
    engine: Engine,
    config: RunConfig,
    *,
    run_id: int,
    folder: Path,
    enrolled: Callable[[], Mapping[int, str]] | None = None,
    vouching: Enrolled | None = None,
    known: Known | None = None,
    asked_by: str = "",
) -> RunResult:
    """Run the federation that ``config`` describes and keep its record in ``folder``.

    With ``config.resume`` the run recorded there continues after its last good checkpoint, or from
    the beginning if no round was committed; with ``config.more_rounds`` it is a complete one.

    Args:
        enrolled: see ``DescribedRoster``.
        vouching: for the silos' keys in a secure run, where they are enrolled.
        known: facts from earlier runs, so that silos of other tasks are not asked.
        asked_by: the operator who started it; silos receive the name.

    Raises:
        FederationError: the run cannot continue; the record has the reason. A complete or missing
            run is not resumed, and nothing is written.
    """
    if config.resume:
        earlier_run(config, folder)  # before anything is written where no run can go on
    else:
        if config.strategy == wire.CONTRIBUTION:
            config = contribution.with_groups(config, folder.parent)
        config = with_groups_of(config, folder.parent)
        make_folder(folder)
    with locked_run(folder):
        checkpoints = Checkpoints(folder / CHECKPOINTS)
        beginning = begin(config, folder, checkpoints)
        config, earlier, after = beginning.config, beginning.earlier, beginning.after
        alone = _alone(config, folder)
        record = Recorder(
            folder,
            config.plain(),
            run_id=run_id,
            earlier=earlier,
            after=after,
            added=beginning.added,
        )
        log.info("run %s: %s, record in %s", run_id, config.strategy, folder)
        if earlier is not None:
            for damage in checkpoints.damaged:
                log.warning("%s. The previous one is used.", damage)
            log.info("%s", record.run.resumed[-1].words)
        if alone is not None and alone.config.get("seed") != config.seed:
            log.warning(
                "baseline-run: run %s has seed %s, this one %d: silos may have different data and "
                "initial models there",
                config.baseline_run,
                alone.config.get("seed"),
                config.seed,
            )
        more_terms: dict[str, Scalar] = {wire.ASKED_BY: asked_by} if asked_by else {}
        try:
            if config.strategy in wire.UNTRAINED:
                return _ask(engine, config, record, enrolled, vouching, known, more_terms)
            with Tracking(config.tracking, folder, config.plain()) as tracking:
                result = _execute(
                    *(engine, config, record, tracking, checkpoints, beginning),
                    *(enrolled, vouching, known, more_terms),
                )
                errors = None if alone is None else alone.final_errors
                record.finish(result.held, global_model=result.global_model, alone=errors)
                tracking.register(record.run)
        except OSError as error:
            failure = FederationError(
                f"the record in {folder} cannot be written: {why_unwritten(error)}. Committed "
                f"rounds are safe: free space and continue with `{resume_command(folder)}`."
            )
            record.fail(failure)
            raise failure from error
        except BaseException as error:
            record.fail(error)
            raise
    log.info("run %s is complete: %s", run_id, folder)
    return result


def _alone(config: RunConfig, folder: Path) -> Run | None:
    """Return the record of the independent run that the configuration names.

    Raises ``FederationError`` if it is missing, unfinished, or has another strategy or task.
    """
    if not config.baseline_run:
        return None
    found = reading.find_run(config.baseline_run, folder.parent)
    alone = reading.read_whole(found)
    if not trains_alone(alone.config) or alone.status != "completed":
        raise refused(
            "baseline-run must name a completed run of independent, or of trees with given-groups "
            f"= each. {found.name} is a run of {alone.strategy}, {alone.status}."
        )
    if (task := alone.config.get("task")) != config.task:
        raise refused(
            f"baseline-run must name a run of the same task, {config.task}. {found.name} is a run "
            f"of {task}: name another run, or run independent on this task first."
        )
    usual = "" if alone.config.get("primary-metric") else alone.metric
    if (config.primary_metric or usual) != alone.metric:
        raise refused(
            f"baseline-run must name a run with the same primary metric. That of {found.name} is "
            f"{alone.metric}: set primary-metric to it, or name another run."
        )
    return alone


def _ask(
    engine: Engine,
    config: RunConfig,
    record: Recorder,
    enrolled: Callable[[], Mapping[int, str]] | None,
    vouching: Enrolled | None,
    known: Known | None,
    more_terms: Mapping[str, Scalar],
) -> RunResult:
    """Run without rounds: ask the silos that are here for statistics, evaluations or sums."""
    evaluates = config.strategy == wire.ONLY_EVALUATION
    given = judged(config, record.folder) if evaluates else None
    beginning = Beginning(config, standing=None if given is None else given.standing)
    hashes = {} if given is None else given.judgement.announced()
    more_terms = {**more_terms, **hashes}
    roster = _roster(config, record, enrolled, beginning, known, more_terms)
    if given is not None:
        write_judgement(record.folder / EVALUATION, given.judgement)
    recording = RecordingRoster(roster, record)
    recording.present(engine, number=1)
    record.ready(recording.silos)
    engine = Announcing(engine, recording.answered, roster.later, recording.asked)
    stated = {wire.PROTOCOL_KEY: wire.PROTOCOL, wire.TASK: config.task, **terms(config)}
    stated |= {wire.RUN: record.folder.name, **hashes}
    deadline_s = config.round_timeout
    absent = roster.absent()
    if given is not None:
        judgement = ask_for_evaluations(
            *(engine, recording.silos, given.judgement, given.models, stated),
            scale=() if given.standing is None else given.standing.scale,
            deadline_s=deadline_s,
        )
        judgement = replace(judgement, silent={**absent, **judgement.silent})
        write_judgement(record.folder / EVALUATION, judgement)
        require_evaluations(judgement)
    elif config.strategy in wire.BY_SUMS:
        silos, masking = recording.silos, None
        if config.secure:
            masking, failed = masking_of(engine, silos, stated, config.round_timeout, vouching)
            silos = {name: silo for name, silo in silos.items() if name not in failed}
            absent |= failed
        fit_by_sums(engine, config, record.folder, silos, absent, stated, masking)
    else:
        found = ask_for_statistics(
            *(engine, recording.silos, stated), deadline_s=deadline_s, read_model=decode_watched
        )
        survey = replace(found, silent={**absent, **found.silent})
        write_survey(record.folder, survey)
        require_answers(survey)
    record.finish({})
    return RunResult(ArrayRecord())


def _roster(
    config: RunConfig,
    record: Recorder,
    enrolled: Callable[[], Mapping[int, str]] | None,
    beginning: Beginning,
    known: Known | None,
    more_terms: Mapping[str, Scalar],
) -> EnrolledRoster:
    standing: Standing | None = beginning.standing
    resume = standing.checkpoint if standing is not None and beginning.returns else None
    return EnrolledRoster(
        task=config.task,
        min_silos=config.min_silos,
        deadline_s=config.wait_for_silos,
        churn=Churn.parse(config.churn),
        terms={**terms(config), **more_terms, wire.OF_RUN: record.folder.name},
        enrolled=enrolled,
        patience_s=0.0 if resume is None else RESUME_PATIENCE * config.wait_for_silos,
        awaited=frozenset() if resume is None else frozenset(s.name for s in resume.silos),
        schema="" if standing is None else standing.schema,
        known=known,
        on_wait=lambda text: record.event("waits", text=text),
    )


def _execute(
    engine: Engine,
    config: RunConfig,
    record: Recorder,
    tracking: Tracking,
    checkpoints: Checkpoints,
    beginning: Beginning,
    enrolled: Callable[[], Mapping[int, str]] | None,
    vouching: Enrolled | None,
    known: Known | None,
    more_terms: Mapping[str, Scalar],
) -> RunResult:
    standing: Standing | None = beginning.standing
    resume = None if standing is None else standing.checkpoint
    roster = _roster(config, record, enrolled, beginning, known, more_terms)
    recording = RecordingRoster(roster, record)

    def on_round(report: RoundReport) -> None:
        record.round(report, recording.silos, roster.refused)
        tracking.round(record.run.rounds, report)
        log.info("%s", _line(report, config.rounds, record.run.lead))

    def commit(checkpoint: Checkpoint[Any]) -> None:
        started = time.perf_counter()
        size = checkpoints.save(checkpoint.round, Standing(checkpoint, roster.schema, scale))
        record.committed(checkpoint.round, num_bytes=size, seconds=time.perf_counter() - started)

    def on_event(kind: str, fields: Mapping[str, Any]) -> None:
        record.event(kind, **fields)

    strategy = build_strategy(
        config,
        run=record.folder.name,
        roster=recording,
        on_round=on_round,
        on_event=on_event,
        vouching=vouching,
    )
    engine = Announcing(engine, recording.answered, roster.later)
    done = 0 if resume is None else resume.round
    ended = resume is not None and resume.ended_early
    first = min(done + 1, config.rounds) if beginning.returns else 1  # enough silos, as before it
    here = recording.present(engine, number=done if ended else first)
    initial = initial_arrays(engine, here, config) if resume is None else ArrayRecord()
    if resume is None and (file := model_file(config)) is not None:
        initial = started_from(file, initial)
    training = train_config(config, run=record.folder.name)
    scale = (
        ask_for_scale(engine, here, training, deadline_s=config.round_timeout)
        if standing is None
        else list(standing.scale)
    )
    record.ready(recording.silos)
    result = strategy.start(
        grid=engine,
        initial_arrays=initial,
        num_rounds=config.rounds,
        train_config=ConfigRecord({wire.SCALE: scale}) if scale else None,
        commit=commit,
        resume=resume,
    )
    if config.strategy == wire.CONTRIBUTION:
        _evaluate_trained(engine, config, record, recording, checkpoints)
    return result


def _evaluate_trained(
    engine: Engine,
    config: RunConfig,
    record: Recorder,
    roster: RecordingRoster,
    checkpoints: Checkpoints,
) -> None:
    """Let the silos of every group evaluate what it trained, after the last round."""
    loaded = checkpoints.load()
    assert loaded is not None, "the last round is committed"
    standing: Standing = loaded[1]
    judgement, models = contribution.judgement_of(config, standing.checkpoint.state)
    stated = {wire.PROTOCOL_KEY: wire.PROTOCOL, wire.TASK: config.task, **terms(config)}
    judgement = ask_for_evaluations(
        *(engine, roster.silos, judgement, models, {**stated, wire.RUN: record.folder.name}),
        scale=standing.scale,
        deadline_s=config.round_timeout,
    )
    write_judgement(record.folder / contribution.FILE, judgement)
    require_evaluations(judgement)


def _line(report: RoundReport, rounds: int, lead: Lead) -> str:
    parts = ["final" if report.final else f"round {report.round}/{rounds}"]
    parts.append(wire.counted(len(report.groups), "group"))
    if report.joined and report.round > 1:
        parts.append("joined: " + ", ".join(report.joined))
    if report.left:
        parts.append("left: " + ", ".join(report.left))
    if report.left_out:
        parts.append("left out: " + ", ".join(report.left_out))
    if report.evaluation:
        errors = [error for _, error, _ in report.evaluation.values() if math.isfinite(error)]
        mean = lead.text(sum(errors) / len(errors) if errors else None)
        parts.append(f"mean {lead.title} after round {report.evaluated_round}: {mean}")
    parts.append(f"{sum(report.seconds.values()):.2f} s")
    return " · ".join(parts)
