"""FedCollab: measure how different the silos' data are, then optimise which silos train together.

Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated Learning", ICML
2023, https://proceedings.mlr.press/v202/bao23b.html. Step 1, the distances, is ``discriminators``;
step 2, the structure, ``coterie.strategies.partition.fedcollab``. Step 3 is FedAvg inside every
coalition, or another algorithm (``within``), with the training configuration's options:
``proximal-mu`` makes it FedProx, ``personal`` keeps layers at the silos, ``personalise`` fine-tunes
or keeps a personal model (Ditto). Boosted trees grow in it (``strategies.fedcollab.trees``).

Before round 1 all pairs of silos are measured and the structure is solved. A newcomer, in any
round, is measured with all silos present, and only those pairs are trained. A silo measured at the
second attempt is then placed like a newcomer. A leaver's row and column are removed. A coalition
whose members change starts from the size-weighted mean of its members' coalitions; one of newcomers
only from w⁰.

Differs from the paper in all that concerns newcomers, leavers and lost silos, which it does not
have; in the discriminators' rounds (``strategies.fedcollab.discriminators``); and in ``c="auto"``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, Literal

import numpy as np
from pydantic import Field

from coterie.features.sums.trees.coordinator import Growth, Trees, TreesState, is_trees
from coterie.strategies.errors import refused
from coterie.strategies.fedcollab import trees
from coterie.strategies.fedcollab.discriminators import (
    Discriminators,
    Measurement,
    Pair,
    measure,
    takes_part,
)
from coterie.strategies.fedcollab.entries import details_of, report_text
from coterie.strategies.fedcollab.starts import starts
from coterie.strategies.partition import fedcollab, solvers
from coterie.strategies.partition.distance import Distance, null_error
from coterie.strategies.partition.fedcollab import StructureReport
from coterie.strategies.partition.objectives import FedCollabBound
from coterie.strategies.partition.solvers import MAX_OPTIMAL_SILOS, Solver
from coterie.strategies.plain.within import Grouping, Within, WithinField
from coterie.strategies.rounds.algorithm import Exchanges, Order, Round, Updates, orders_from
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members, stated_samples, staying, with_sizes
from coterie.strategies.rounds.minimum_sizes import average_groups, form
from coterie.strategies.rounds.options import Config, Positive, Seed
from coterie.strategies.rounds.reports import Group

log = logging.getLogger("coterie.run")

MAX_ATTEMPTS = 2
"""Maximum phases in which a pair is tried."""
NUM_RESTARTS = 100
"""Restarts of relocation, as in the paper's code."""


@dataclass(frozen=True)
class Structure:
    """A structure and the input it was solved from. Row i is ``silos[i]``.

    Attributes:
        silos: those with known distances, sorted.
        alone: those that train alone because theirs are unknown.
        c: the value used; None if there was nothing to compare.
        distances, errors: (N, N); an unknown distance is filled in, its error NaN. Empty if there
            was nothing to compare.
        report: the bound and its rivals, and the interval of c.
        aside: those that train alone because their coalition is smaller than they accept.
        kept: another structure has a smaller bound, but only newcomers may move.
    """

    silos: tuple[str, ...]
    alone: tuple[str, ...]
    c: float | None = None
    distances: tuple[tuple[float, ...], ...] = ()
    errors: tuple[tuple[float, ...], ...] = ()
    report: StructureReport | None = None
    aside: tuple[str, ...] = ()
    kept: bool = False


@dataclass(frozen=True)
class FedCollabState:
    """FedCollab's state between rounds.

    Attributes:
        distances: pair → its discriminator's result.
        held_out: silo → number of samples that it holds out.
        attempts: pair → phases in which it was tried.
        unfinished: pairs that were interrupted and may be tried again.
        refused: silos that let no discriminator leave; asked again when they return.
        planned: coalitions of the next round, explained by ``structure``.
        solved: the structure was found in this round.
        trained: silos whose model has been through a round.
        measured: cost of the last phase, for the record of its round.
        minimums: the smallest groups by which ``planned`` was formed.
        bins: with which discriminators see the rows of trees (``trees.agreed``).
        forest: the trees of coalitions, without members; None if the model is a network.
    """

    members: Members
    distances: Mapping[Pair, Distance] = field(default_factory=dict)
    held_out: Mapping[str, int] = field(default_factory=dict)
    attempts: Mapping[Pair, int] = field(default_factory=dict)
    unfinished: frozenset[Pair] = frozenset()
    refused: frozenset[str] = frozenset()
    planned: tuple[Group, ...] = ()
    structure: Structure | None = None
    solved: bool = False
    trained: frozenset[str] = frozenset()
    measured: Measurement | None = None
    minimums: Mapping[str, int] = field(default_factory=dict)
    bins: Arrays = field(default_factory=dict)
    forest: TreesState | None = None


class FedCollab(Growth, Grouping[FedCollabState]):
    """Coalitions that minimise FedCollab's error bound."""

    c: Positive | Literal["auto"] = Field(
        10.0,
        description="C in FedCollab's error bound, the preference for more data, in square roots "
        "of samples. `auto`: the smallest value at which noise alone separates no two silos.",
    )
    discriminators: Discriminators = Discriminators()
    solver: Literal["best", "relocation", "agglomerative", "optimal"] = Field(
        "best",
        description="Search for the groups: `best` is `optimal` for at most 16 silos and "
        "otherwise `relocation`, the paper's method; `agglomerative` merges greedily.",
    )
    newcomers: Literal["keep", "resolve"] = Field(
        "keep",
        description="Silos that may change groups when a newcomer arrives: with `keep`, only "
        "silos whose distances were measured late; with `resolve`, every silo.",
    )
    unmeasured: Literal["alone", "unknown"] = Field(
        "alone",
        description="How silos with unknown distances are handled: `alone` lets them train alone; "
        "`unknown` gives them the mean distance. If no distance is known, every silo trains alone.",
    )
    within: WithinField = Within()
    seed: Seed = 0
    remembers = FedCollabState
    takes_steps = True

    def check(self, initial: Arrays, rounds: int) -> None:
        if not is_trees(initial):
            return
        if self.within != Within():
            raise refused(
                "within is for networks, and the task's network is trees, which grow by sums. "
                "Leave it out."
            )
        trees.growing(self, ()).check(initial, rounds)

    def first(self, initial: Arrays) -> FedCollabState:
        forest = TreesState(Members({})) if is_trees(initial) else None
        return FedCollabState(Members(initial), forest=forest)

    # ---------------------------------------------------------------- before a round

    def renew(self, state: FedCollabState, changed: frozenset[str], now: Round) -> FedCollabState:
        """Forget the distances of silos with changed data; they are measured and placed again."""
        other = changed.isdisjoint
        return replace(
            state,
            distances={pair: own for pair, own in state.distances.items() if other(pair)},
            attempts={pair: own for pair, own in state.attempts.items() if other(pair)},
            unfinished=frozenset(pair for pair in state.unfinished if other(pair)),
            held_out={name: own for name, own in state.held_out.items() if name not in changed},
        )

    def prepare(self, state: FedCollabState, now: Round) -> Exchanges[FedCollabState]:
        """Find the coalitions; let them grow trees if the model is some."""
        state = yield from self.solved(state, now)
        if state.forest is None:
            return state
        forest = trees.regrouped(state.forest, state.planned, state.members)
        return _with(state, (yield from self._trees(state).prepare(forest, now)))

    def _trees(self, state: FedCollabState) -> Trees:
        return trees.growing(self, state.planned)

    def solved(self, state: FedCollabState, now: Round) -> Exchanges[FedCollabState]:
        """Measure unknown pairs, and solve the structure if anything has changed."""
        names = tuple(sorted(now.names))
        state = replace(
            state, measured=None, solved=False, refused=state.refused.intersection(names)
        )
        apart = {silo.name for silo in now.silos if not takes_part(silo)}
        due = [pair for pair in combinations(names, 2) if _is_due(state, pair, apart)]
        if due and not state.bins and is_trees(state.members.initial):
            state = replace(state, bins=(yield from trees.agreed(self, state.members, now)))
            due = due if state.bins else []
        if due:
            found = yield from measure(
                due,
                now.silos,
                self.discriminators,
                bins=state.bins,
                announce=lambda budget: now.announce(
                    "budget", {"work": "discriminators", **asdict(budget)}
                ),
            )
            state = _with_measured(state, due, found)
        planned = tuple(sorted(name for group in state.planned for name in group))
        minimums = state.members.minimums
        if due or names != planned or minimums != state.minimums:
            state = replace(self._structured(state, names, now), solved=True, minimums=minimums)
        return state

    def _structured(
        self, state: FedCollabState, names: Sequence[str], now: Round
    ) -> FedCollabState:
        """Solve the structure of silos with known distances (step 2)."""
        known, alone = tuple(names), tuple[str, ...]()
        if self.unmeasured == "alone" or state.distances.keys().isdisjoint(combinations(names, 2)):
            known, alone = _split_known(names, state.distances)
        for name in alone:
            log.warning("silo %s trains alone: its distances are not known", name)
        if len(known) < 2:  # nothing to compare
            if alone:
                log.warning("every silo trains alone: no distance between silos is known")
            structure = Structure((), tuple(names)) if alone else Structure(known, ())
            return replace(state, planned=tuple((name,) for name in names), structure=structure)
        distances, errors, null_errors = _matrices(known, state)
        sizes = stated_samples(state.members, known, now.max_share)
        c = self.c
        if c == "auto":
            c = fedcollab.auto_c(sizes, null_errors)
            log.info("c: %.3g, from the noise of the distances", c)
        rng = np.random.default_rng([self.seed, now.number])
        rows = {name: row for row, name in enumerate(known)}
        present = [[rows[n] for n in group] for group in _settled(state, known)]
        bound = FedCollabBound.from_distances(distances, sizes, c=c)
        solve = _Solve(bound, self._solver(len(known)), rng)
        groups = solve.structure(present, keep=self.newcomers == "keep")
        report = fedcollab.report(bound, groups, solver=solve.solver, rng=rng)
        kept = self.newcomers == "keep" and solve.is_beaten(report)
        log.info("%s", report_text(report, known, kept=kept))
        solved = [tuple(known[row] for row in group) for group in groups]
        minimums = state.members.minimums
        planned = form(solved, minimums)
        several = [group for group in solved if len(group) > 1]
        aside = tuple(
            sorted(n for group in several for n in set(group) - {*staying(group, minimums)})
        )
        for name in aside:
            log.warning(
                "silo %s trains alone: it accepts groups of at least %d silos, but its "
                "coalition would be smaller",
                name,
                minimums[name],
            )
        structure = Structure(known, alone, c, _rows(distances), _rows(errors), report, aside, kept)
        planned += tuple((name,) for name in alone)
        return replace(state, planned=tuple(sorted(planned)), structure=structure)

    def _solver(self, num_silos: int) -> Solver:
        if self.solver in ("relocation", "agglomerative"):
            return self.solver
        if num_silos <= MAX_OPTIMAL_SILOS:
            return "optimal"
        if self.solver == "optimal":
            log.warning(
                "solver: %d silos are too many for optimal, which takes up to %d; relocation is "
                "used",
                num_silos,
                MAX_OPTIMAL_SILOS,
            )
        return "relocation"

    # ---------------------------------------------------------------- a round

    def orders(self, state: FedCollabState, now: Round) -> tuple[FedCollabState, list[Order]]:
        """Order each silo's training of its coalition's model (step 3); of trees, measuring."""
        if state.forest is not None:
            forest, orders = self._trees(state).orders(_forest(state), now)
            return _with(state, forest), orders
        models = dict(state.members.models)
        for group in state.planned:
            models |= starts(state.members, state.trained, group)
        members = state.members.holding(models).grouped(state.planned)
        orders = orders_from(members.models, now.silos, self.within.inside.kind)
        return replace(state, members=members), orders

    def absorb(self, state: FedCollabState, updates: Updates, now: Round) -> FedCollabState:
        """Aggregate every coalition by FedAvg or the algorithm in its place."""
        if state.forest is not None:
            return _with(state, self._trees(state).absorb(_forest(state), updates, now))
        answered = {update.silo.name for update in updates}
        moved = {name for group in state.planned if answered & set(group) for name in group}
        combine = partial(self.within.inside.combine, now=now)
        members = average_groups(state.members, updates, combine=combine)
        return replace(state, members=members, trained=state.trained | moved)

    def by_choice(self, state: FedCollabState) -> str:
        found = None if state.structure is None else state.structure
        report = None if found is None else found.report
        if found is None or report is None or found.alone or found.aside or self.c == "auto":
            return ""
        if len(report.groups) == len(found.silos) and np.isfinite(report.c_high):
            text = f"every silo trains alone at c = {found.c:.3g}. Some would train together from"
            return f"{text} c = {report.c_high:.3g}"
        if len(report.groups) == 1 and report.c_low > 0:
            text = f"all silos train together at c = {found.c:.3g}. One would leave below"
            return f"{text} c = {report.c_low:.3g}"
        return ""

    def agreed_bins(self, state: FedCollabState) -> Arrays | None:
        return None if state.forest is None else state.bins

    def own_entries(self, state: FedCollabState) -> Mapping[str, Config]:
        return {} if state.forest is None else self._trees(state).own_entries(_forest(state))

    def boosted_on_trial(self, state: FedCollabState) -> Mapping[str, Model] | None:
        if state.forest is None:
            return None
        return self._trees(state).boosted_on_trial(_forest(state))

    def complete(self, state: FedCollabState) -> str:
        return "" if state.forest is None else self._trees(state).complete(state.forest)

    def details(self, state: FedCollabState) -> Mapping[str, Any]:
        grown = {} if state.forest is None else self._trees(state).details(_forest(state))
        return {**details_of(state), **grown}


def _forest(state: FedCollabState) -> TreesState:
    assert state.forest is not None
    return replace(state.forest, members=state.members)


def _with(state: FedCollabState, forest: TreesState) -> FedCollabState:
    return replace(state, members=forest.members, forest=replace(forest, members=Members({})))


@dataclass
class _Solve:
    bound: FedCollabBound
    solver: Solver
    rng: np.random.Generator

    def structure(self, present: list[list[int]], *, keep: bool) -> list[list[int]]:
        """Return the best structure; with ``keep``, silos in ``present`` groups do not move."""
        if sum(len(group) for group in present) < 2:  # one silo keeps its place in any structure
            return self._solved(None)
        groups, placed = present, {row for group in present for row in group}
        for row in range(len(self.bound.distances)):
            if row not in placed:
                groups = fedcollab.place(self.bound, groups, row)
        return groups if keep else self._solved(groups)

    def _solved(self, start: list[list[int]] | None) -> list[list[int]]:
        """Solve from scratch; return ``start`` if that is no better."""
        found = solvers.solve(
            self.bound, solver=self.solver, rng=self.rng, num_restarts=NUM_RESTARTS
        ).groups
        if start is None or self._value(found) < self._value(start) * (1 - 1e-12):
            return found
        return sorted(sorted(group) for group in start)

    def _value(self, groups: list[list[int]]) -> float:
        return fedcollab.objective(self.bound, groups)

    def is_beaten(self, report: StructureReport) -> bool:
        """Return whether another structure has a smaller bound than the reported one."""
        if np.isfinite(report.c_low):
            return False
        best = min(report.second_best, self._value(self._solved(report.groups)))
        return best < report.chosen * (1 - 1e-12)


def _is_due(state: FedCollabState, pair: Pair, apart: Set[str]) -> bool:
    """Return whether a pair must and may be measured; with a silo ``apart`` it cannot be."""
    if any(name in state.refused or state.held_out.get(name) == 0 for name in pair):
        return False
    unknown = pair not in state.distances or pair in state.unfinished
    # A pair that cannot be measured is due once, so that the log and the record say why.
    attempts = 1 if apart & set(pair) else MAX_ATTEMPTS
    return unknown and state.attempts.get(pair, 0) < attempts


def _with_measured(
    state: FedCollabState, due: Sequence[Pair], found: Measurement
) -> FedCollabState:
    better = {
        pair: new
        for pair, new in found.distances.items()
        if pair not in found.unfinished
        or pair not in state.distances
        or new.rounds > state.distances[pair].rounds
    }
    # Who refused may have other conditions when it comes back: that was no attempt.
    tried = [pair for pair in due if found.refused.isdisjoint(pair)]
    attempts = {**state.attempts, **{pair: state.attempts.get(pair, 0) + 1 for pair in tried}}
    return replace(
        state,
        members=with_sizes(state.members, found.sizes),
        distances={**state.distances, **better},
        held_out={**state.held_out, **found.held_out},
        attempts=attempts,
        unfinished=(state.unfinished - set(due)) | found.unfinished,
        refused=state.refused | found.refused,
        measured=found,
    )


def _settled(state: FedCollabState, names: Sequence[str]) -> list[list[str]]:
    """Return the planned groups of these silos, without those to be placed again.

    Placed again are silos that were alone for want of distances or of members, and, where silos
    have a new distance to each other, those with the most.
    """
    before = state.structure
    late = set() if before is None else {*before.alone, *before.aside}
    found = {} if state.measured is None else state.measured.distances
    fresh = {pair for pair, new in found.items() if state.distances.get(pair, new) == new}
    kept = {name for group in state.planned for name in group if name in names} - late
    while inside := [pair for pair in fresh if kept.issuperset(pair)]:
        counts = Counter(name for pair in inside for name in pair)
        most = max(counts.values())
        kept -= {name for name, count in counts.items() if count == most}
    groups = [[name for name in group if name in kept] for group in state.planned]
    return [group for group in groups if group]


def _split_known(
    names: Sequence[str], distances: Mapping[Pair, Distance]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return silos whose mutual distances are all known, and the rest; most lacking go first."""
    known, alone = list(names), list[str]()
    while True:
        lacking = [pair for pair in combinations(known, 2) if pair not in distances]
        if not lacking:
            return tuple(known), tuple(sorted(alone))
        counts = {name: sum(name in pair for pair in lacking) for name in known}
        worst = max(known, key=lambda name: counts[name])
        known.remove(worst)
        alone.append(worst)


def _matrices(
    names: Sequence[str], state: FedCollabState
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distances clipped to [0, 1], their standard errors, and those for equal data.

    At least one distance must be known; an unknown one is the mean of the known, its errors NaN.
    """
    values, errors = np.zeros((2, len(names), len(names)))
    null_errors = np.full_like(errors, np.nan)
    mine = {p: state.distances[p] for p in combinations(names, 2) if p in state.distances}
    usual = np.clip(np.mean([d.value for d in mine.values()]), 0, 1)
    for (i, one), (j, other) in combinations(enumerate(names), 2):
        found = mine.get((one, other))
        values[i, j] = values[j, i] = usual if found is None else np.clip(found.value, 0, 1)
        errors[i, j] = errors[j, i] = np.nan if found is None else found.error
        if found is not None:
            counts = [state.held_out[one], state.held_out[other]]
            null_errors[i, j] = null_errors[j, i] = null_error(counts)
    return values, errors, null_errors


def _rows(matrix: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in matrix)
