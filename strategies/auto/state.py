"""Auto's state between rounds, and the model that each silo holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from coterie.features.sums.trees.asking import Grown
from coterie.features.sums.trees.coordinator import is_trees
from coterie.features.sums.trees.ensemble import Floats
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.fedcollab.algorithm import FedCollabState
from coterie.strategies.partition.products import Products
from coterie.strategies.partition.race import Gain, Standing
from coterie.strategies.rounds.algorithm import Round
from coterie.strategies.rounds.handles import Arrays, AtHome, Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.reports import Group

BY_SILO = "split by silo"
"""Source, and first part of the keys, of the candidate whose trees may split by silo."""
ALONE, GROUP, OWN = "alone", "group", "own"
"""Purposes of a silo's trainings in addition to that of the model that it holds, and of own models
that it makes of that."""


@dataclass(frozen=True)
class Measured:
    """A measurement on held-out samples.

    Attributes:
        share: the error is a share of wrong answers, of known noise.
        noise: the standard error of the loss that takes the error's place; NaN if it is unknown.
    """

    error: float
    loss: float
    count: float
    share: bool = True
    noise: float = math.nan


@dataclass(frozen=True)
class Entrant:
    """A candidate of a race with its last standing.

    Attributes:
        standing: relative to the best, by the measurements that decide.
        latest: the same by every silo's last measurement only, for plots.
        samples: training samples behind a silo's model, mean over silos.
        dropped: round in which it dropped out; 0 while it is in the race.
    """

    candidate: Candidate
    standing: Standing
    latest: Standing
    samples: float
    dropped: int = 0


@dataclass(frozen=True)
class Trial:
    """One silo's measurements: ``count`` held-out samples, and one error or NaN per entrant."""

    count: float
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """The reason for the groups, for the record.

    Attributes:
        began, round: rounds after which the race was opened and decided.
        entrants: those in the race to the end, then those that dropped out.
        judges: silos that measured all entrants.
        winner: index of the winning entrant.
        gains: silo → its gain by the group over local training, where it measured both.
        trials: silo → its measurements, where there are any.
        shares: errors are shares of samples.
        score: the metric that decided; empty: the run's primary metric.
        converged: models were trained to their minimum.
        complete: False if the run ended during the race.
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
    score: str = ""
    converged: bool = False
    complete: bool = True
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placement:
    """The outcome of a newcomer's probation.

    Attributes:
        round: round after which it was decided.
        group: group that it was compared with; empty if there was none.
        count: number of its samples that neither model was trained with.
        alone, grouped: errors of its own model and of the group's; NaN if it did not share them.
    """

    round: int
    group: Group
    joins: bool
    count: float
    alone: float
    grouped: float


@dataclass(frozen=True)
class Forest:
    """What is remembered where models are trees (``growing``).

    Attributes:
        roots: silo → the histogram that it is compared by.
        bins: of the first look, in which discriminators see rows.
        arms: group → its trees of the race.
        raced: the arms have all their trees, or cannot grow further.
        finals: held group of several → its trees from all rows, complete or not.
        enough: group → the number of trees that its held-out rows called for.
        own: silo → the trees that it holds of a group whose trees split by silo.
        lost: silo → why it was left out of sums in this round.
        judging: the held groups' trees grow from rows that are not held out, to be compared with
            networks (``families``); ``judged``: silo → the trees that it held of these.
    """

    roots: Mapping[str, Floats] = field(default_factory=dict)
    bins: Arrays = field(default_factory=dict)
    arms: Mapping[Group, Grown] = field(default_factory=dict)
    raced: bool = False
    finals: Mapping[Group, Grown] = field(default_factory=dict)
    enough: Mapping[Group, int] = field(default_factory=dict)
    own: Mapping[str, Model] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    judging: bool = False
    judged: Mapping[str, Model] = field(default_factory=dict)


@dataclass(frozen=True)
class Boosted:
    """The trees of a run that chooses between a network and trees (``families``).

    Attributes:
        state: of the trees' own look, race and hold.
        measured: silo → what it measured of its network and of its trees, on the same samples.
        uses: silo → the family of its model, since ``round``; 0: it is not chosen yet.
        favoured: the family of silos that did not measure both.
        fresh: silos whose family was chosen after the last round.
    """

    state: AutoState
    measured: Mapping[str, tuple[Measured, Measured]] = field(default_factory=dict)
    uses: Mapping[str, str] = field(default_factory=dict)
    favoured: str = ""
    round: int = 0
    fresh: frozenset[str] = frozenset()


@dataclass(frozen=True)
class AutoState:
    """Auto's state between rounds.

    Attributes:
        linear_first: silos train the linear part of a table's network until the race is over.
        number: the last absorbed round.
        since: round after which ``phase`` began.
        alone: silo → model trained by itself from w⁰; of trees, which stay at the silo, none.
        noise: silo → expected squared norm of the noise in that, if it states one (privacy).
        products: in a secure run, inner products of the trainings of ``alone``, over all rounds.
        candidates: during a look, its suggestions so far.
        models: group of several silos → its model in the race.
        measured: group → silo → the last measurements of the model received.
        pairs: FedCollab's state, from discriminators; None if it was not used.
        untrained: silo → its error of w⁰.
        trainings: silo → passes over its samples; a normal round counts as one.
        moved: bytes of all models and discriminators, to silos and back.
        usual: the part of them that FedAvg would move: one model per silo that trained.
        each: bytes of one model to a silo and back in the last round; 0 before the first.
        paired: the discriminators' part of ``moved``; ``paired_in``: the last round with some.
        held: the held partition, including absent silos; empty before the first race.
        group_models: group of ``held`` with several members → its model.
        latest: silo → its last update of the group's model, if its final model has a share of that.
        own: silos that keep their own model although they have a group.
        penalty: λ with which silos make their own models of their group's; 0: they use the group's.
        by_silo: the trees of groups may split by silo.
        trees: where the model is trees.
        measures_own: the race is over but for measuring own models.
        probation: newcomer → its rounds since there are groups.
        beside: newcomer → the group that it is compared with.
        raced: silos of the last race.
        drifted: silos that returned with different data since the race.
        boosted: in a run that chooses between a network and trees, the trees; all else is of the
            network, and ``members`` hold what silos use.
    """

    members: Members
    linear_first: bool = False
    number: int = 0
    phase: Literal["look", "race", "hold"] = "look"
    since: int = 0
    alone: Mapping[str, Model] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    products: Products = field(default_factory=Products)
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
    penalty: float = 0.0
    by_silo: bool = False
    trees: Forest = Forest()
    measures_own: bool = False
    probation: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, Group] = field(default_factory=dict)
    placed: Mapping[str, Placement] = field(default_factory=dict)
    raced: frozenset[str] = frozenset()
    drifted: frozenset[str] = frozenset()
    verdict: Verdict | None = None
    boosted: Boosted | None = None


def group_of(held: Iterable[Group], name: str) -> Group:
    """Return the group that a silo is in, or the silo alone."""
    return next((group for group in held if name in group), (name,))


def key_of(candidate: Candidate, name: str) -> Group:
    """Return the key in ``measured`` of the model that a candidate offers a silo."""
    group = group_of(candidate.groups, name)
    if not group[1:]:
        return group
    key = (BY_SILO, *group) if candidate.by_silo else group
    return (f"{OWN} {candidate.penalty:g}", *key) if candidate.penalty else key


def offered(state: AutoState, key: Group, name: str) -> Model:
    """Return the model of a race that has a key of ``key_of``, as a silo gets it."""
    arm = state.trees.arms.get(key)
    return state.models[key] if arm is None else arm.of(name)


def without(state: AutoState, name: str) -> AutoState:
    """Remove a silo from its group; the rest of the group continues unchanged.

    If it comes back, trees that split by silo are to it those of any other.
    """
    group = group_of(state.held, name)
    rest = tuple(one for one in group if one != name)
    models, alone, own = dict(state.group_models), dict(state.alone), state.own - {name}
    shared = models.pop(group, None)
    if shared is not None and len(rest) > 1:
        models[rest] = shared
    elif shared is not None and rest:
        alone |= {rest[0]: held_of(state, group, rest[0])} if rest[0] not in own else {}
        own -= {rest[0]}
    held = [one for one in state.held if one != group] + ([rest] if rest else [])
    beside = {n: tuple(m for m in g if m != name) for n, g in state.beside.items() if n != name}
    forest = replace(
        state.trees,
        own={one: trees for one, trees in state.trees.own.items() if one != name},
        finals={key: grown.forgetting(name) for key, grown in state.trees.finals.items()},
    )
    return replace(
        state,
        trees=forest,
        held=tuple(sorted(held)),
        group_models=models,
        alone=alone,
        own=own,
        measured={key: of for key, of in state.measured.items() if name not in key},
        beside={n: g for n, g in beside.items() if g in models},
        probation={n: count for n, count in state.probation.items() if n != name},
    )


def holding(state: AutoState) -> dict[str, Model]:
    """Return silo → the model that it holds."""
    held = dict(state.alone)
    for group in state.held:
        if len(group) > 1:
            held |= {n: held_of(state, group, n) for n in group if n not in state.own}
    for name, group in state.beside.items():
        if name in state.probation:
            held[name] = state.group_models[group]
    return held | {name: AtHome(name, state.members.initial) for name in at_home(state)}


def at_home(state: AutoState) -> frozenset[str]:
    """Return silos that use trees of their rows alone, since there are groups."""
    if not (state.held and is_trees(state.members.initial)):
        return frozenset()
    single = {group[0] for group in state.held if len(group) == 1} | state.own
    return frozenset(single | state.probation.keys() - state.beside.keys())


def held_of(state: AutoState, group: Group, name: str) -> Model:
    """Return a group's model, as a silo of the group holds it."""
    return state.trees.own.get(name, state.group_models[group])


def trained_together(state: AutoState, here: Iterable[str]) -> tuple[Group, ...]:
    """Return a round's groups by the model that each silo holds; a newcomer is on its own."""
    names, groups = set(here), []
    shared = names - state.own - set(state.probation)
    for group in state.held:
        present = tuple(n for n in group if n in shared)
        groups += [present] if present else []
    placed = {name for group in groups for name in group}
    return tuple(sorted([*groups, *((name,) for name in names - placed)]))


def share_of(state: AutoState, name: str) -> float:
    """Return the share of a silo's own last training in its final model."""
    gain = None if state.verdict is None else state.verdict.gains.get(name)
    return 0.0 if gain is None or name in state.own | state.drifted else gain.share


def ending(state: AutoState) -> dict[str, Model]:
    """Return silo → its final model, where that is not simply its group's."""
    mixed = {}
    for name, own in state.latest.items():
        shared, share = state.group_models.get(group_of(state.held, name)), share_of(state, name)
        if shared is not None and share > 0:
            mixed[name] = weighted_mean([shared, own], [1 - share, share])
    return mixed


def handed_out(state: AutoState, now: Round) -> AutoState:
    members = state.members.holding(holding(state))
    return replace(state, members=members.grouped(trained_together(state, now.names)))
