"""What Auto knows between two rounds, and who holds which model by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.fedcollab.algorithm import FedCollabState
from coterie.strategies.partition.race import Gain, Standing
from coterie.strategies.rounds.algorithm import Round
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.reports import Group


@dataclass(frozen=True)
class Measured:
    """What a silo found of a model on samples that it has not been trained with.

    ``share``: the error is a share of wrong answers, whose noise is known.
    """

    error: float
    loss: float
    count: float
    share: bool = True


@dataclass(frozen=True)
class Entrant:
    """A candidate of a race, and how it did when it was in it last.

    Attributes:
        candidate: itself.
        standing: beside the best, by the measurements that decide.
        latest: the same by every silo's last measurement alone, for a picture.
        samples: behind a silo's model, mean over silos.
        dropped: round in which it was out, 0 while it is in the race.
    """

    candidate: Candidate
    standing: Standing
    latest: Standing
    samples: float
    dropped: int = 0


@dataclass(frozen=True)
class Trial:
    """What one silo measured in a race.

    Attributes:
        count: of its samples that no model had been trained with.
        errors: of the model that each entrant offered it; NaN of one that it did not measure.
    """

    count: float
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """Why the groups are as they are, for the record.

    Attributes:
        began: the round after which the race was opened.
        round: after which it was found.
        entrants: of the race: those that were in it to the end, then those that were out.
        judges: silos that measured all of them.
        winner: number of the entrant.
        gains: silo → what it gains by its group over training alone, where it measured both.
        trials: silo → what it measured, of those that did.
        shares: errors are shares of samples.
        complete: the race was over; otherwise the run ended before.
        left: silos that are alone because most of their group keep their own models.
    """

    began: int
    round: int
    entrants: tuple[Entrant, ...]
    judges: tuple[str, ...]
    winner: int
    gains: Mapping[str, Gain] = field(default_factory=dict)
    trials: Mapping[str, Trial] = field(default_factory=dict)
    shares: bool = True
    complete: bool = True
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement:
    """What became of a newcomer after its probation.

    Attributes:
        round: after which.
        group: that it was measured against; empty where there was none.
        joins: it is in that group now.
        count: of its samples that neither model had been trained with.
        alone, grouped: errors of its own model and of the group's; NaN where it kept them back.
    """

    round: int
    group: Group
    joins: bool
    count: float
    alone: float
    grouped: float


@dataclass(frozen=True)
class AutoState:
    """What Auto knows between two rounds.

    Attributes:
        members: models that the silos hold, sizes, and the groups of the last round.
        number: the round that has just been absorbed.
        phase, since: what is done, and the round after which that began.
        alone: silo → what it has trained by itself from w⁰.
        noise: silo → expected squared norm of the noise in that, where it states one (privacy).
        candidates: of the race; in a look, what it has suggested so far.
        dropped: those that are out of the race.
        models: group of several → the model that it races with.
        measured: group → silo → the last measurements of the model received.
        pairs: what FedCollab knows of the silos, by their discriminators; None if it was not asked.
        untrained: silo → its error of w⁰.
        trainings: silo → how many passes over its samples it has made, a round's as one.
        moved: bytes of all models and discriminators, to silos and back.
        usual: of them, those that FedAvg would have moved: one model for each silo that trained.
        each: of one model to a silo and back, as of the last round; 0 before the first.
        paired: of ``moved``, the discriminators'; ``paired_in``: the last round with some.
        held: the partition that holds, silos that are away included; empty before the first race.
        group_models: group of ``held`` with several members → its model.
        latest: silo → what it made of its group's model in the last round, of those that end with
            a share of that.
        own: silos that keep their own model although they have a group.
        probation: newcomer → rounds that it has been here, since there are groups.
        beside: newcomer → the group that it is measured against.
        placed: newcomers whose probation is over.
        raced: silos of the last race.
        drifted: silos that have come back with other data since the race.
        verdict: of that race.
    """

    members: Members
    number: int = 0
    phase: Literal["look", "race", "hold"] = "look"
    since: int = 0
    alone: Mapping[str, Model] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    dropped: tuple[Entrant, ...] = ()
    models: Mapping[Group, Model] = field(default_factory=dict)
    measured: Mapping[Group, Mapping[str, tuple[Measured, ...]]] = field(default_factory=dict)
    pairs: FedCollabState | None = None
    untrained: Mapping[str, float] = field(default_factory=dict)
    trainings: Mapping[str, float] = field(default_factory=dict)
    moved: int = 0
    usual: int = 0
    each: float = 0.0
    paired: int = 0
    paired_in: int = 0
    held: tuple[Group, ...] = ()
    group_models: Mapping[Group, Model] = field(default_factory=dict)
    latest: Mapping[str, Model] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    probation: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, Group] = field(default_factory=dict)
    placed: Mapping[str, Placement] = field(default_factory=dict)
    raced: frozenset[str] = frozenset()
    drifted: frozenset[str] = frozenset()
    verdict: Verdict | None = None


def group_of(held: Iterable[Group], name: str) -> Group:
    """The group that a silo is in; alone where it is in none."""
    return next((group for group in held if name in group), (name,))


def without(state: AutoState, name: str) -> AutoState:
    """A silo has no place any more; the others of its group go on as they were."""
    group = group_of(state.held, name)
    rest = tuple(one for one in group if one != name)
    models, alone, own = dict(state.group_models), dict(state.alone), state.own - {name}
    shared = models.pop(group, None)
    if shared is not None and len(rest) > 1:
        models[rest] = shared
    elif shared is not None and rest:
        alone |= {rest[0]: shared} if rest[0] not in own else {}
        own -= {rest[0]}
    held = [one for one in state.held if one != group] + ([rest] if rest else [])
    beside = {n: tuple(m for m in g if m != name) for n, g in state.beside.items() if n != name}
    return replace(
        state,
        held=tuple(sorted(held)),
        group_models=models,
        alone=alone,
        own=own,
        measured={key: of for key, of in state.measured.items() if name not in key},
        beside={n: g for n, g in beside.items() if g in models},
        probation={n: count for n, count in state.probation.items() if n != name},
    )


def holding(state: AutoState) -> dict[str, Model]:
    """Silo → the model that it holds."""
    held = dict(state.alone)
    for group in state.held:
        if len(group) > 1:
            held |= {n: state.group_models[group] for n in group if n not in state.own}
    for name, group in state.beside.items():
        if name in state.probation:
            held[name] = state.group_models[group]
    return held


def trained_together(state: AutoState, here: Iterable[str]) -> tuple[Group, ...]:
    """The groups of a round, by whose model each silo holds; a newcomer is on its own."""
    names, groups = set(here), []
    shared = names - state.own - set(state.probation)
    for group in state.held:
        present = tuple(n for n in group if n in shared)
        groups += [present] if present else []
    placed = {name for group in groups for name in group}
    return tuple(sorted([*groups, *((name,) for name in names - placed)]))


def share_of(state: AutoState, name: str) -> float:
    """Of a silo's own last training in the model that it ends with."""
    gain = None if state.verdict is None else state.verdict.gains.get(name)
    return 0.0 if gain is None or name in state.own else gain.share


def ending(state: AutoState) -> dict[str, Model]:
    """Silo → the model that it ends with, where that is not its group's alone."""
    mixed = {}
    for name, own in state.latest.items():
        shared, share = state.group_models.get(group_of(state.held, name)), share_of(state, name)
        if shared is not None and share > 0:
            mixed[name] = weighted_mean([shared, own], [1 - share, share])
    return mixed


def handed_out(state: AutoState, now: Round) -> AutoState:
    members = state.members.holding(holding(state))
    return replace(state, members=members.grouped(trained_together(state, now.names)))
