"""The strategy ``trees``: every group grows its own boosted trees, by sums over its silos.

Groups are given: all silos together, or the groups of an earlier run; ``auto`` finds them
(``coterie.strategies.auto.growing``). A round grows the same number of trees in every group, and
the last round the rest. A level of a tree is one exchange with the silos of all groups.

In the first rounds every group also grows a trial: a fifth of the trees at five times the rate,
from rows that are not held out. The number of its trees that is best on the held-out rows says how
many of the trees from all rows are used; no more of them grow (``growth.enough``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.features.sums.trees.alone import Alone
from coterie.features.sums.trees.asking import FEW, Growing, Grown, grow
from coterie.features.sums.trees.bins import USUAL
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import HOLDOUT, Settings, enough, trial
from coterie.features.sums.trees.questions import nodes_of
from coterie.features.sums.trees.seen import Seen
from coterie.strategies.errors import refused
from coterie.strategies.rounds.algorithm import Algorithm, Exchanges, Order, Round, Updates
from coterie.strategies.rounds.handles import Arrays, AtHome, Model, sent_for
from coterie.strategies.rounds.members import Members, present_groups, staying
from coterie.strategies.rounds.options import Config, Options
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

MOST_EXCHANGES = 168
"""Most exchanges of a round: silos answer no more than 200 times, other questions among them."""
FIRST = 12
"""Exchanges before the first tree, at most."""


@dataclass(frozen=True)
class TreesState:
    """The state between rounds.

    Attributes:
        grown: a group, by the names of its silos with commas between them → its trees.
        trials: the same, of those whose number of trees is not known.
        tried: the same, of complete trials, until silos have tried own models of them.
        lost: silo → why it is left out of this round.
        unfinished: group → how many of its trees have grown, of those whose rounds were lost.
    """

    members: Members
    grown: Mapping[str, Grown] = field(default_factory=dict)
    trials: Mapping[str, Grown] = field(default_factory=dict)
    tried: Mapping[str, Grown] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    unfinished: Mapping[str, str] = field(default_factory=dict)


def bins_of(grown: Grown) -> Arrays:
    """Return what discriminators need of the bins of trees; empty if these have none."""
    base = np.asarray(grown.trees["base"], np.float32)
    return Seen(grown.edges, base).arrays() if grown.edges else {}


class Growth(Options):
    """How trees grow; the keys of every strategy that grows some."""

    tree_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="Learning rate of the trees: the factor on every leaf."
    )
    leaf_penalty: Annotated[float, Field(ge=0, le=1e6)] = Field(
        1.0, description="Penalty on squared leaves (λ)."
    )
    leaf_rows: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        20, description="Fewest rows of a leaf, over all silos of its group."
    )
    column_bins: Annotated[int, Field(ge=2, le=1024)] = Field(
        USUAL, description="Most bins per column, besides the one for missing values."
    )

    @property
    def growth(self) -> Settings:
        return Settings(self.tree_rate, self.leaf_penalty, self.leaf_rows)

    def entry_at_home(self, raced: int = 0) -> Config:
        """Return the entry for a silo that grows its trees at home.

        In a race it grows as many as groups do, whose models have ``raced`` trees.
        """
        how = trial(self.growth, raced) if raced else (self.growth, 0)
        return {wire.AT_HOME: Alone.of(how[0], self.column_bins, how[1]).model_dump_json()}

    def exchanges(self, trees: Arrays) -> int:
        """Return how many exchanges one tree of each output needs, at most."""
        at_once = max(self._nodes_at_once(trees), 1)
        nodes = (len(trees["base"]) << level for level in range(depth_of(trees)))
        return sum(-(-own // at_once) for own in nodes)

    def _nodes_at_once(self, trees: Arrays) -> int:
        return nodes_of(len(trees["gain"]) * (self.column_bins + 1))

    def require_growable(self, trees: Arrays) -> None:
        """Require that no tree has grown, and that a silo can answer for two of each output.

        Raises:
            FederationError: there are trees, or the histograms are too large for a round.
        """
        if trees["gain"].any() or trees["leaf"].any():
            raise refused(
                "trees grow from nothing, and the model named by --from has some. Leave --from out."
            )
        if self._nodes_at_once(trees) and 2 * self.exchanges(trees) <= room(2):
            return
        raise refused(
            f"the histograms of one tree of depth {depth_of(trees)}, of {len(trees['gain'])} "
            f"columns, {self.column_bins} bins and {wire.counted(len(trees['base']), 'output')}, "
            "are too large for a round. Set column-bins lower, name trees of less depth, or give "
            "the task fewer columns."
        )


class Trees(Growth, Algorithm[TreesState]):
    """Boosted trees by summed histograms, in every group its own."""

    remembers = TreesState
    works_unseen = True

    given_groups: str = Field(
        "",
        description="Groups: silos with commas between them, groups with semicolons. A silo in "
        "none is alone. `each`: every silo alone. Empty: all silos together.",
    )
    groups_of: str = Field(
        "", description="A complete run whose last groups are these groups: its name or folder."
    )

    def problems(self, training: Config) -> Iterator[str]:
        names = [name for group in self.given for name in group]
        if double := sorted({name for name in names if names.count(name) > 1}):
            yield f"given-groups: every silo is in one group. {double[0]} is in several"

    @property
    def averages(self) -> bool:
        return False

    def entries(self, training: Config) -> Config:
        """Silos grow trees alone by the same settings, and compare."""
        return {wire.GROWING: Alone.of(self.growth, self.column_bins).model_dump_json()}

    def own_entries(self, state: TreesState) -> Mapping[str, Config]:
        """Return the entry for silos alone, which grow their trees at home."""
        held = {n for n, model in state.members.models.items() if isinstance(model, AtHome)}
        return dict.fromkeys(sorted(held.union(self._at_home(state))), self.entry_at_home())

    @property
    def given(self) -> tuple[Group, ...]:
        groups = (text.split(",") for text in self.given_groups.split(";"))
        named = (tuple(sorted(filter(None, map(str.strip, group)))) for group in groups)
        return tuple(filter(None, named))

    def check(self, initial: Arrays, rounds: int) -> None:
        if not is_trees(initial):
            raise refused(
                "strategy trees grows boosted trees, and the task's network is another. Its file "
                'must have network = "trees", or network = "any" with task.family = trees.'
            )
        trees, (_, tried) = len(initial["leaf"]), trial(self.growth, len(initial["leaf"]))
        self.require_growable(initial)
        fit = room(2) // self.exchanges(initial)
        least = next(n for n in count(1) if -(-trees // n) - (-tried // n) <= fit)
        require_rounds(initial, rounds, least)

    def agreed_bins(self, state: TreesState) -> Arrays:
        """Return the bins of the largest group that has some."""
        groups = sorted(state.grown, key=lambda key: (-key.count(","), key))
        several = (bins_of(state.grown[key]) for key in groups if "," in key)
        return next(filter(None, several), {})

    # ---------------------------------------------------------------- a round

    def prepare(self, state: TreesState, now: Round) -> Exchanges[TreesState]:
        """Grow the round's trees in all groups, level by level."""
        growing, trials = dict[str, Growing](), dict[str, Growing]()
        all_trees = len(state.members.initial["leaf"])
        faster, tried = trial(self.growth, all_trees)
        groups = present_groups(self.given or (now.names,), now.names)
        for group in groups:
            if self._is_alone(group, state):
                continue
            own = self._of(state, group)
            stay = staying(group, state.members.minimums)
            until, more = self._until(own, now), self._most_tried(own, tried, now)
            growing[self._key(group)] = one = Growing(
                *(self.growth, self.column_bins, stay, own, until), masked=now.unseen
            )
            one.lost |= dict.fromkeys(set(group) - set(stay), FEW)
            if own.most is None and not own.whole:
                known = state.trials.get(self._key(group), Grown(state.members.initial))
                trials[self._key(group)] = Growing(
                    *(faster, self.column_bins, stay, known, min(known.done + more, tried)),
                    judged=tried,
                    config=_of_trial,
                    masked=now.unseen,
                )
        yield from grow([*growing.values(), *trials.values()], now, state.members.minimums)
        lost = {name: why for one in growing.values() for name, why in one.lost.items()}
        new = {key: one.grown for key, one in growing.items()}
        for key, one in trials.items():
            if (best := one.grown.most) is not None:
                new[key] = new[key].at_most(enough(best, self.growth, all_trees))
        left = {key: one.grown for key, one in trials.items() if new[key].most is None}
        grown = {**state.grown, **new}
        lacks = {key: own for key, own in new.items() if own.edges and not own.whole}
        unfinished = {
            _said(key): f"{own.done} of {own.most or all_trees}" for key, own in lacks.items()
        }
        done = {key: trials[key].grown for key in sorted(trials.keys() - left.keys())}
        state = TreesState(
            state.members,
            grown=grown,
            trials=left,
            tried={**state.tried, **done},
            lost={**self._without_others(groups, state), **lost},
            unfinished=unfinished if now.number >= now.rounds else {},
        )
        state = replace(state, members=state.members.grouped(self._apart(groups, state)))
        home = self._at_home(state)
        said = {
            n: f"{why} It grows trees at home." if n in home else why for n, why in lost.items()
        }
        return replace(state, lost={**state.lost, **said})

    def orders(self, state: TreesState, now: Round) -> tuple[TreesState, list[Order]]:
        """Let every silo measure the trees that it held before the round."""
        groups = present_groups(self.given or (now.names,), now.names)
        members = state.members.grouped(self._apart(groups, state))
        left_out = state.lost.keys() - self._at_home(state)
        asked = [silo for silo in now.silos if silo.name not in left_out]
        orders = [Order(silo, sent_for(members.models[silo.name])) for silo in asked]
        return replace(state, members=members), orders

    def absorb(self, state: TreesState, updates: Updates, now: Round) -> TreesState:
        """Give every silo its group's trees; what it sent back is not used.

        A silo that has trees at home holds these until its group's are complete. Trials that silos
        were asked about before the training are not kept.
        """
        home = self.own_entries(state)
        held: dict[str, Model] = {
            name: AtHome(name, state.members.initial)
            if self._is_alone(group, state) or (name in home and not self._of(state, group).whole)
            else self._of(state, group).trees
            for group in state.members.groups
            for name in group
        }
        tried = {} if self.boosted_on_trial(state) else state.tried
        return replace(state, members=state.members.holding(held), tried=tried)

    def boosted_on_trial(self, state: TreesState) -> Mapping[str, Arrays]:
        """Return silo → its group's trees of the trial, when groups' trials are complete."""
        groups = {self._key(group): group for group in state.members.groups if len(group) > 1}
        if groups.keys() & state.trials.keys():
            return {}
        tried = groups.keys() & state.tried.keys()
        return {name: state.tried[key].trees for key in sorted(tried) for name in groups[key]}

    def details(self, state: TreesState) -> Mapping[str, Any]:
        """Return the number of trees of each group, and which silos were left out or are alone."""
        counts = {key: own.done for key, own in state.grown.items()}
        most = {key: own.most for key, own in state.grown.items() if own.most is not None}
        return {
            "trees": counts,
            **({"trees-enough": most} if most else {}),
            **({"not-summed": dict(state.lost)} if state.lost else {}),
            **({"unfinished": dict(state.unfinished)} if state.unfinished else {}),
            **({"at-home": sorted(alone)} if (alone := self.own_entries(state)) else {}),
        }

    def complete(self, state: TreesState) -> str:
        grown = state.grown
        together = [("*",)] if len(state.members.sizes) > 1 else []
        here = state.members.sizes.keys()
        groups = [own for own in self.given if len(here & set(own)) > 1] if self.given else together
        known = {",".join(group) for group in groups} <= grown.keys()
        if not known or not all(own.whole for own in grown.values()):
            return ""
        most = ", ".join(f"{_said(key)}: {own.done}" for key, own in sorted(grown.items()))
        return "all trees have grown that help on held-out rows" + (f" ({most})" if most else "")

    def _without_others(self, groups: Iterable[Group], state: TreesState) -> dict[str, str]:
        """Return why silos are not grouped as given: unknown names, and silos without others."""
        named = {name for group in self.given for name in group} - {wire.EACH_ALONE}
        unknown = named - state.members.sizes.keys()
        alone = {group[0] for group in groups if self._is_alone(group, state)}
        alone -= {group[0] for group in self.given if len(group) == 1}
        found = dict.fromkeys(unknown, "given-groups names it, and no such silo has joined.")
        for name in alone if unknown else ():
            why = "no other silo of its group is here" if name in named else "no group names it"
            found[name] = f"{why} (given-groups), so it grows trees at home."
        return dict(sorted(found.items()))

    def _key(self, group: Group) -> str:
        """Return the name of a group: its given silos, or ``*`` for all."""
        if not self.given:
            return "*"
        own = next((given for given in self.given if set(group) <= set(given)), group)
        return ",".join(own)

    def _is_alone(self, group: Group, state: TreesState) -> bool:
        """Return whether a group is one silo, and no others of it have grown trees with it."""
        key = self._key(group)
        return len(group) == 1 and (key == group[0] or not self._of(state, group).edges)

    def _at_home(self, state: TreesState) -> list[str]:
        return sorted(group[0] for group in state.members.groups if self._is_alone(group, state))

    def _apart(self, groups: Iterable[Group], state: TreesState) -> Iterator[Group]:
        """Yield the groups; silos of a group that has no trees and can grow none now are alone."""
        for group in groups:
            none = state.lost.keys() >= set(group) and not self._of(state, group).edges
            yield from ((name,) for name in group) if none else (group,)

    def _of(self, state: TreesState, group: Group) -> Grown:
        return state.grown.get(self._key(group), Grown(state.members.initial))

    def _most_tried(self, own: Grown, tried: int, now: Round) -> int:
        """Return how many trees of ``tried`` a trial grows in this round, beside the group's."""
        trees, rounds = len(own.trees["leaf"]), max(now.rounds, 1)
        most = -(-trees // rounds)
        return max(min(most, room(2) // self.exchanges(own.trees) - most), -(-tried // rounds))

    def _until(self, own: Grown, now: Round) -> int:
        """Return the number of trees that a group has after this round.

        A group that lost a round makes up for it once its trial is complete.
        """
        trees, rounds = len(own.trees["leaf"]), max(now.rounds, 1)
        most = -(-trees // rounds)
        if own.most is not None:
            most = max(most, room(1) // self.exchanges(own.trees))
        return min(trees * min(now.number, rounds) // rounds, own.done + most)


def _said(key: str) -> str:
    return "all silos" if key == "*" else key


def _of_trial(silo: Silo) -> Config:
    """Return the same for every silo, as masks depend on it; one with few rows holds none out."""
    return {wire.HOLDOUT: HOLDOUT}


def is_trees(model: Arrays) -> bool:
    try:
        Ensemble.of(model)
    except (KeyError, ValueError):
        return False
    return True


def room(groups: int) -> int:
    """Return the exchanges left for trees in a round in which so many groups begin at a silo."""
    return MOST_EXCHANGES - groups * FIRST


def require_rounds(trees: Arrays, rounds: int, least: int) -> None:
    """Require rounds enough for the exchanges of all trees.

    Raises:
        FederationError: they need more exchanges than silos answer in a round.
    """
    if rounds < least:
        raise refused(
            f"{len(trees['leaf'])} trees of depth {depth_of(trees)} in "
            f"{wire.counted(rounds, 'round')} need more than {MOST_EXCHANGES} exchanges a round, "
            f"which silos refuse. Set rounds to at least {least}."
        )


def depth_of(trees: Arrays) -> int:
    return int(trees["leaf"].shape[2]).bit_length() - 1
