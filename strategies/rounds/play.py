"""A round, and the end of a run.

Evaluation: after round t every silo holds the model that it will start round t+1 from; the record
of round t has that model's error on the silo's own test data. Silos that described themselves
report it with their next training, so it needs no extra message; other ClientApps are sent an
ordinary ``evaluate``. After the last round the final model is evaluated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.strategies.rounds.algorithm import Algorithm, Round, Update, Updates, num_bytes
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.conversation import Clock, Conversation, Run, stated_sizes
from coterie.strategies.rounds.handles import Arrays, AtHome, Model, is_seen
from coterie.strategies.rounds.members import (
    capped,
    enrol,
    renewed,
    with_data,
    with_minimums,
    with_sizes,
)
from coterie.strategies.rounds.models import distance, each
from coterie.strategies.rounds.replies import (
    received_evaluations,
    silo_report,
    trained_evaluations,
)
from coterie.strategies.rounds.reports import Evaluation, Figures, Group, RoundReport, SiloReport
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.stage import Came, Outcome, Played, Room, Stages

log = logging.getLogger("coterie.run")


def play(run: Run, before: Checkpoint[Any]) -> tuple[Checkpoint[Any], RoundReport, list[Update]]:
    """Play one round, and return its checkpoint, report and updates.

    Raises:
        NobodyAnsweredError, AllSpentError: no silo's training counts.
        FederationError: no silo understands the algorithm's messages.
    """
    algorithm, number, clock = run.algorithm, before.round + 1, Clock()

    # 1. Who is here, and who takes part? Newcomers are let in.
    stages, here = Stages(run.stages, before.kept), run.line.present(run.roster, number)
    room = stages.admit(Room(number, here, algorithm, before.state))
    talk = Conversation(run, stages, room, clock)
    state = talk.settled(welcome(algorithm, before.state, talk.now))

    # 2. Questions before the training: the algorithm's, such as a cold start, and the stages'.
    state = talk.hold(algorithm.prepare(state, talk.now), state)
    sizes = dict(talk.sizes)
    talk.ask(state)
    state = with_stated_sizes(algorithm, talk.settled(state), sizes, run.max_share)

    # 3. Everybody trains: one exchange, every reply checked.
    state, orders = algorithm.orders(state, talk.now)
    came = talk.train(orders, state)

    # 4. State and updates give the next state.
    state = with_stated_sizes(algorithm, came.state, stated_sizes(came.updates), run.max_share)
    state = talk.settled(algorithm.absorb(state, came.updates, talk.now))
    clock.lap("aggregate")

    # 5. What the stages make of it; and how good are the models that silos now hold?
    said = stages.after(
        Played(
            *(talk.now, room, algorithm, state, came),
            silent=frozenset(run.line.silent),
            seconds=run.line.seconds,
            deadline_s=run.line.deadline_s,
        )
    )
    run.line.seconds.clear()
    going_on = number < run.rounds and not said.ended_early
    stated, metrics = talk.evaluate(state) if going_on else ({}, {})
    if going_on and run.keep_every and number % run.keep_every == 0:
        talk.hand_over(state, talk.held(state), room.playing)
    clock.lap("evaluate")

    # 6. The round is over.
    report = _report(talk, before, state, came, said)
    if stated:
        report = replace(report, evaluated_round=number, evaluation=stated, metrics=metrics)
    standing = Checkpoint(number, state, room.here, said.ended_early, talk.apart, stages.kept)
    return standing, report, came.trained


def _report(
    talk: Conversation, before: Checkpoint[Any], state: Any, came: Came, said: Outcome
) -> RoundReport:
    algorithm, room, number = talk.run.algorithm, talk.room, talk.number
    left_out = {**room.resting, **came.left_out, **talk.left_out, **said.left_out}
    for name, reason in left_out.items():
        log.warning("round %d: %s is left out: %s", number, name, reason)
    evaluation, models = received_evaluations(came.trained), algorithm.models(state)
    if number == 1:  # who trains at home has measured its own model already, not the first one
        at_home = {name for name, model in models.items() if isinstance(model, AtHome)}
        evaluation = {name: own for name, own in evaluation.items() if name not in at_home}
    return RoundReport(
        round=number,
        groups=talk.groups(state, room.playing),
        joined=_others(room.here, before.silos),
        left=_others(before.silos, room.here),
        left_out=left_out,
        silos=_silo_reports(algorithm, state, came.trained, algorithm.groups(came.state)),
        evaluated_round=number - 1,
        evaluation=evaluation,
        train_metrics={u.silo.name: u.figures for u in came.trained if u.figures},
        personalised=trained_evaluations(came.trained),
        seconds=talk.clock.seconds,
        phases=talk.costs,
        details={**algorithm.details(state), **came.notes, **said.notes},
        ended_early=said.ended_early,
    )


def finish(
    run: Run, standing: Checkpoint[Any], *, alone: bool
) -> tuple[Checkpoint[Any], RoundReport]:
    """Send every connected silo its own final model to keep, and evaluate it.

    ``alone`` means that only this step was missing, so that nodes may have other ids now.
    """
    algorithm, clock, silos = run.algorithm, Clock(), standing.silos
    if alone:
        here = {silo.name: silo for silo in run.line.present(run.roster, standing.round)}
        silos = tuple(here[silo.name] for silo in silos if silo.name in here)
    stages = Stages(run.stages, standing.kept)
    room = Room(
        standing.round + 1, silos, algorithm, standing.state, apart=standing.apart, final=True
    )
    room = stages.admit(room)
    talk = Conversation(run, stages, room, clock)
    state = talk.settled(talk.hold(algorithm.finish(standing.state, talk.now), standing.state))
    talk.ask(state)
    clock.lap("finish")
    held = talk.held(state)
    evaluation: Mapping[str, Evaluation] = {}
    metrics: Mapping[str, Figures] = {}
    if run.evaluate:  # silos that rest are given their models all the same
        early = bool(standing.ended_early)
        evaluation, metrics = talk.hand_over(state, held, room.labelled, ended_early=early)
    clock.lap("evaluate")
    if choice := algorithm.by_choice(state):
        log.info("%s", choice)
    report = RoundReport(
        round=standing.round,
        groups=talk.groups(state, room.labelled),
        evaluated_round=standing.round,
        evaluation=evaluation,
        metrics=metrics,
        seconds=clock.seconds,
        phases=talk.costs,
        details={
            **algorithm.details(state),
            **held.notes,
            **({"by-choice": choice} if choice else {}),
            **({"tested": talk.tested} if talk.tested else {}),
        },
        final=True,
    )
    return replace(standing, state=state, silos=room.here, kept=stages.kept), report


def welcome(algorithm: Algorithm[Any], state: Any, now: Round) -> Any:
    """Return the state with newcomers added, and with what the connected silos state now."""
    members = algorithm.members(state)
    new = [silo for silo in now.silos if silo.name not in members.sizes]
    if new:
        members = enrol(members, new, algorithm.newcomer_model(state))
    changed = renewed(members, now.silos)
    members = with_data(with_minimums(members, now.silos), now.silos)
    state = algorithm.with_members(state, members)
    state = algorithm.welcome(state, frozenset(silo.name for silo in new), now)
    for name in sorted(changed):
        log.warning(
            "silo %s returned with different training data: %s",
            name,
            f"{algorithm.outdated} refers to the previous data"
            if algorithm.outdated
            else "nothing known about the previous data is used",
        )
    return algorithm.renew(state, changed, now) if changed else state


def with_stated_sizes(
    algorithm: Algorithm[Any],
    state: Any,
    stated: Mapping[str, float],
    max_share: float = 1.0,
) -> Any:
    """Return the state with the training samples that silos state now, each capped at a share."""
    members = with_sizes(algorithm.members(state), capped(stated, max_share))
    return algorithm.with_members(state, members)


def _others(silos: Sequence[Silo], than: Sequence[Silo]) -> tuple[str, ...]:
    known = {silo.name for silo in than}
    return tuple(silo.name for silo in silos if silo.name not in known)


def _alike(one: Arrays, other: Model) -> bool:
    return is_seen(other) and one.keys() == other.keys()


def _silo_reports(
    algorithm: Algorithm[Any],
    state: Any,
    trained: Updates,
    groups: Sequence[Group],
) -> dict[str, SiloReport]:
    held = algorithm.models(state)
    together = {name for group in groups if len(group) > 1 for name in group}
    reports = {u.silo.name: silo_report(u) for u in trained}
    seen = [u for u in trained if u.reply is None]  # others' models may have another shape
    shared = [
        u
        for u in seen
        if u.silo.name in together and u.silo.name in held
        if not is_seen(u.model) or _alike(u.model, held[u.silo.name])
    ]
    apart = each(
        lambda u: distance(u.model, held[u.silo.name], u.silo.buffers),
        shared,
        num_bytes=max((num_bytes(u.start) for u in shared), default=0),
    )
    for u, far in zip(shared, apart, strict=True):
        reports[u.silo.name] = replace(reports[u.silo.name], discrepancy=far)
    return reports
