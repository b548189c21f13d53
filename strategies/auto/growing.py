"""Boosted trees in ``auto``: what is compared, raced and held of models that grow by sums.

- *Look*, one round. All silos agree on bins and a constant answer, and each sums the gradients of
  its rows over them: the histogram of the root of a first tree. Divided by its rows, it is
  compared as other models' first updates are.
- *Race*. Every group grows its own trees from rows that are not held out, with a fifth of the trees
  at five times the rate. One candidate more is all together with trees that may split by silo: soft
  groups in one model.
- *Hold*. The winner's groups grow all their trees from all rows. Until these are complete, silos
  hold those of the race.

A silo that is alone grows its trees at home, in a race too, and only says how good they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil

import numpy as np

from coterie.features.sums.trees.asking import Growing, Grown, Roots, grow
from coterie.features.sums.trees.coordinator import Growth, bins_of, room
from coterie.features.sums.trees.growth import Settings, enough, trial
from coterie.strategies.auto.budget import Budget, holdout, planned
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.auto.evidence import HOLDOUT, noted
from coterie.strategies.auto.state import (
    ALONE,
    BY_SILO,
    AutoState,
    Forest,
    group_of,
    holding,
    key_of,
)
from coterie.strategies.partition.gram import gram
from coterie.strategies.plain import pooling
from coterie.strategies.rounds.algorithm import Exchanges, Round
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.members import staying
from coterie.strategies.rounds.reports import Group

FEWEST_SPLIT = 3
"""Fewest silos of trees that may split by silo."""
NEWCOMER = ""
"""A name that no silo has: of any silo that such trees do not name."""


def raced(growth: Growth, initial: Arrays) -> tuple[Settings, int]:
    """Return how trees grow in a race, and how many."""
    return trial(growth.growth, len(initial["leaf"]))


def needed(growth: Growth, initial: Arrays) -> int:
    """Return the rounds for a look, a race of all alone and all together, and all trees.

    Raises:
        FederationError: no number of rounds would do.
    """
    growth.require_growable(initial)
    return 1 + _race_rounds(growth, initial, 1) + _final_rounds(growth, initial)


def _race_rounds(growth: Growth, initial: Arrays, arms: int) -> int:
    tree = growth.exchanges(initial) * arms
    exchanges = raced(growth, initial)[1] * tree
    return max(1, ceil((exchanges + room(0) - room(arms)) / _whole(tree)))


def _final_rounds(growth: Growth, initial: Arrays) -> int:
    return ceil(len(initial["leaf"]) / (room(1) // growth.exchanges(initial)))


def _whole(tree: int) -> int:
    """Return the exchanges of a round that whole trees use, of ``tree`` exchanges each."""
    return max(room(0) // tree, 1) * tree


def fits(
    state: AutoState, candidates: Sequence[Candidate], limits: Budget, growth: Growth, now: Round
) -> bool:
    """Return whether a race between these, and then all trees, are within rounds and budgets.

    Both budgets count trees, as those of groups cost bytes in proportion.
    """
    initial = state.members.initial
    arms = {name: len({key_of(c, name) for c in candidates}) for name in now.names}
    share = raced(growth, initial)[1] / len(initial["leaf"])
    most = min(limits.trainings, limits.bytes) * planned(now)
    if any(
        state.trainings.get(name, 0.0) + (1 + share * own) * planned(now) > most * (1 + 1e-9)
        for name, own in arms.items()
    ):
        return False
    side = max(max(arms.values()) - 1, 1)  # a silo alone is not asked for sums
    rounds = _race_rounds(growth, initial, side) + _final_rounds(growth, initial)
    return growth.exchanges(initial) * side <= room(side) and now.number + rounds <= now.rounds


def with_split(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates, after the trivial ones also all together with splits by silo."""
    split = [
        Candidate(one.groups, BY_SILO, by_silo=True)
        for one in candidates
        if one.is_together and max(map(len, one.groups)) >= FEWEST_SPLIT
    ]
    trivial = [one for one in candidates if one.is_trivial]
    return (*trivial, *split, *(one for one in candidates if not one.is_trivial))


def compared(state: AutoState, names: Sequence[str]) -> np.ndarray:
    """Return the (N, N) inner products of the silos' first histograms."""
    return gram([[state.trees.roots[name]] for name in names])


# ---------------------------------------------------------------- before a round's training


def grown(state: AutoState, growth: Growth, limits: Budget, now: Round) -> Exchanges[AutoState]:
    """Ask for what the phase needs of histograms, and hand out the trees that are complete."""
    state = replace(state, trees=replace(state.trees, lost={}))
    if state.phase == "look" and len(now.names) > 1:
        state = yield from _looked(state, growth, now)
    state = yield from _measured_alone(state, growth, now)
    if state.phase == "race":
        state = yield from _raced(state, growth, now)
    if state.phase == "hold":
        state = yield from _finished(state, growth, limits, now)
    return state


def _looked(state: AutoState, growth: Growth, now: Round) -> Exchanges[AutoState]:
    empty = Grown(state.members.initial).split_by(now.names)
    settings = growth.growth, growth.column_bins
    looking = Roots(*settings, now.names, empty, 1, config=holdout)
    yield from grow([looking], now, {})
    found = {**state.trees.roots, **looking.roots}
    bins = state.trees.bins or bins_of(looking.grown)
    return _noted(state, [looking], now, roots=found, bins=bins)


def _measured_alone(state: AutoState, growth: Growth, now: Round) -> Exchanges[AutoState]:
    """Let silos of a race, and newcomers, grow trees at home as groups do, and measure these."""
    keys: dict[str, Group] = {n: (n,) for n in state.raced if state.phase == "race"}
    keys |= {name: (ALONE, name) for name in state.probation}
    asked = [
        now.here[name]
        for name, key in sorted(keys.items())
        if name in now.here and name not in state.measured.get(key, {}) and holdout(now.here[name])
    ]
    how = growth.entry_at_home(len(state.members.initial["leaf"]))
    found = yield from pooling.ask(
        [(silo, state.members.initial) for silo in asked],
        holdout=HOLDOUT,
        tried=("alone",),
        entries=lambda tried, silo: how,
    )
    for name, update in found["alone"].items():
        state = replace(state, measured=noted(state, keys[name], [update]))
    return state


def _raced(state: AutoState, growth: Growth, now: Round) -> Exchanges[AutoState]:
    """Grow the trees of the groups as far as the round's exchanges allow."""
    initial, keys = state.members.initial, state.models
    settings, count = raced(growth, initial)
    arms = {key: state.trees.arms.get(key) or _empty(initial, key) for key in keys}
    here = {key: _here(key, state, now) for key in keys}
    until = _until(arms, here, count, growth)
    grows = partial(Growing, settings, growth.column_bins)
    growing = {
        key: grows(here[key], own, until[key], judged=count, config=holdout)
        for key, own in arms.items()
    }
    yield from grow(list(growing.values()), now, state.members.minimums)
    new = {key: one.grown for key, one in growing.items()}
    stuck = all(new[key].most is not None or new[key].done == arms[key].done for key in keys)
    found = {
        key: enough(own.most, growth.growth, len(initial["leaf"]))
        for key, own in new.items()
        if own.most is not None
    }
    forest = replace(state.trees, enough={**state.trees.enough, **found})
    state = replace(state, trees=forest, models={key: own.trees for key, own in new.items()})
    return _noted(state, growing.values(), now, arms=new, raced=stuck)


def _finished(state: AutoState, growth: Growth, limits: Budget, now: Round) -> Exchanges[AutoState]:
    """Grow the held groups' trees from all rows; hand them out when they are complete."""
    trees, judging = len(state.members.initial["leaf"]), state.trees.judging
    again = state.trees.judged and not state.trees.finals
    if again and now.rounds - now.number + 1 < _final_rounds(growth, state.members.initial):
        return state  # they would not be complete
    finals = {key: _final_of(state, key) for key in state.held if len(key) > 1}
    twice = _afford_two(state, limits, now)
    here = {key: _here(key, state, now, without=state.own - twice) for key in finals}
    until = _until(finals, here, trees, growth)
    grows = partial(Growing, growth.growth, growth.column_bins)
    grows = partial(grows, config=holdout) if judging else grows
    growing = {
        key: grows(here[key], own, until[key]) for key, own in finals.items() if not own.whole
    }
    yield from grow(list(growing.values()), now, state.members.minimums)
    new = {key: one.grown for key, one in growing.items()}
    state = _noted(state, growing.values(), now, finals={**finals, **new})
    complete = {key: own for key, own in new.items() if own.whole}
    shared = {key: own.of(NEWCOMER) for key, own in complete.items()}
    split = {name: own.of(name) for own in complete.values() for name in own.silos}
    state = replace(
        state,
        group_models={**state.group_models, **shared},
        trees=replace(state.trees, own={**state.trees.own, **split}),
    )
    if judging and not incomplete(state):  # then grow them from all rows
        judged = replace(state.trees, judging=False, judged=holding(state), finals={})
        state = replace(state, trees=judged)
    return state


def _until(
    grown: Mapping[Group, Grown], here: Mapping[Group, Group], count: int, growth: Growth
) -> dict[Group, int]:
    """Return how many trees each group has after the round, of ``count`` in the end."""
    names = [name for group in here.values() for name in group]
    arms = max((names.count(name) for name in set(names)), default=1)
    begins = any(not own.edges for own in grown.values())
    found = {}
    for key, own in grown.items():
        tree = growth.exchanges(own.trees) * arms
        more = max(room(arms if begins else 0) // tree, 1)
        found[key] = max(min(count, own.done + more), own.done)
    return found


def _here(
    key: Group, state: AutoState, now: Round, *, without: frozenset[str] = frozenset()
) -> Group:
    """Return a group's silos that are asked: all that are here and accept its size."""
    away = without | state.probation.keys()
    here = tuple(name for name in key if name in now.here and name not in away)
    return staying(here, state.members.minimums)


def _afford_two(state: AutoState, limits: Budget, now: Round) -> frozenset[str]:
    """Return silos that use their own trees and, within the budget, also grow their group's."""
    trees, most = len(state.members.initial["leaf"]), limits.trainings * planned(now)

    def ahead(name: str) -> float:
        done = _final_of(state, group_of(state.held, name)).done
        return (trees - done) / trees * planned(now)

    return frozenset(n for n in state.own if state.trainings.get(n, 0.0) + ahead(n) <= most)


def _empty(initial: Arrays, key: Group) -> Grown:
    empty = Grown(initial)
    return empty.split_by(key[1:]) if key[0] == BY_SILO else empty


def _final_of(state: AutoState, key: Group) -> Grown:
    """Return a group's trees, also those that it had with fewer or more silos."""
    known = state.trees.finals
    if key in known:
        return known[key]
    common = {k: len(set(k) & set(key)) for k in known if min(len(k), len(key)) > 1}
    if common and max(common.values()) > 1:
        return known[max(common, key=lambda k: (common[k], k))]
    own = (BY_SILO, *key) if state.by_silo and len(key) > 1 else key
    return replace(_empty(state.members.initial, own), most=state.trees.enough.get(own))


def _noted(
    state: AutoState, growing: Iterable[Growing], now: Round, **changes: object
) -> AutoState:
    """Note the trees, silos that were left out, and what was grown: all trees are a whole run."""
    trainings, lost = dict(state.trainings), dict(state.trees.lost)
    whole = len(state.members.initial["leaf"])
    for one in growing:
        lost |= one.lost
        for name in one.here:
            more = one.grew / whole * planned(now)
            trainings[name] = trainings.get(name, 0.0) + more
    forest: Forest = replace(state.trees, lost=lost, **changes)  # type: ignore[arg-type]
    return replace(state, trainings=trainings, trees=forest)


# ---------------------------------------------------------------- after a race


def settled(state: AutoState, before: AutoState) -> AutoState:
    """Return the state after a race of trees, whose silos hold the winner's trees of the race."""
    arms, forest = before.trees.arms, before.trees
    split = {
        group: arms[BY_SILO, *group]
        for group in state.group_models
        if state.by_silo and (BY_SILO, *group) in arms
    }
    own = {name: trees.of(name) for group, trees in split.items() for name in group}
    shared = {group: trees.of(NEWCOMER) for group, trees in split.items()}
    finals = {k: v for k, v in forest.finals.items() if k in state.held and not v.silos}
    forest = replace(forest, arms={}, finals={} if state.by_silo else finals, own=own, raced=False)
    return replace(state, group_models={**state.group_models, **shared}, trees=forest)


def incomplete(state: AutoState) -> bool:
    """Return whether a held group lacks trees."""
    groups = [group for group in state.held if len(group) > 1]
    finals = state.trees.finals
    return not state.held or not all(key in finals and finals[key].whole for key in groups)
