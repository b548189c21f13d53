"""CFL: one group that is split in two recursively, where its silos' updates disagree.

Sattler, Müller, Samek: "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE TNNLS 2021, https://arxiv.org/abs/1910.01991;
Algorithms 1 and 3, called FedCluster by FedCollab. Every group is a FedAvg. If a group as a whole
hardly moves, ``|Σ D_i Δ_i / D| < ε₁``, while a member does, ``max |Δ_i| > ε₂``, it is split so that
the largest cosine between the two parts is smallest. The numerics are
``coterie.strategies.partition.cfl``.

A newcomer walks down the tree of splits, as in the paper: it trains once from the model that was
split, goes to the part that it resembles, and so on to a group that has not been split.

Differs from the paper in:

- ε₁ and ε₂ are shares of the largest update norm so far, independent of model and learning rate
  (the paper advises ε₁ of about a tenth of it, and ε₂ between ε₁ and that norm).
- A part's cosines with a newcomer are those of its mean update, not the largest over its members,
  so that the server need not keep all updates.
- The paper's further condition on γ_max, which is unknown, is left out, as in its code.
- ``first_split``: no split before that round.

It uses FedAvg's messages and works with any ClientApp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field

from coterie.strategies.partition.cfl import bipartition, is_split_due, mean_norm
from coterie.strategies.plain.placing import (
    Direction,
    constant_lr,
    direction_of,
    gram_of,
    nearest,
    placing_order,
)
from coterie.strategies.rounds.algorithm import (
    SUMS_BEFORE_GROUPS,
    Algorithm,
    Exchanges,
    Order,
    Round,
    Update,
    Updates,
    orders_from,
)
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members, give_out
from coterie.strategies.rounds.minimum_sizes import accepted, average_groups
from coterie.strategies.rounds.options import Count, NotNegative, Positive
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class Split:
    """An inner node of the tree.

    Attributes:
        model: the group's model when it was split; its updates started from it.
        round: round of the split.
        directions: of the two parts.
        parts: their group numbers.
    """

    model: Model
    round: int
    directions: tuple[Direction, Direction]
    parts: tuple[int, int]


@dataclass(frozen=True)
class CFLState:
    """CFL's state between rounds.

    Attributes:
        group_models: number of a group → its model; 0 is the first, of all silos.
        splits: number of a split group → its split.
        group_of: silo → its group; a number in ``splits`` while it walks down.
        largest: the largest update norm so far.
        norms: number of a group → (norm of its mean update, of its largest), last round.
    """

    members: Members
    group_models: Mapping[int, Model]
    splits: Mapping[int, Split] = field(default_factory=dict)
    group_of: Mapping[str, int] = field(default_factory=dict)
    largest: float = 0.0
    norms: Mapping[int, tuple[float, float]] = field(default_factory=dict)


class CFL(Algorithm[CFLState]):
    """Groups by recursive bipartition, using the cosines of the updates."""

    eps_mean: Positive = Field(
        0.4,
        le=1e6,
        description="ε₁: a group is split only if the norm of its mean update is below this share "
        "of the largest norm so far.",
    )
    eps_largest: NotNegative = Field(
        0.5,
        le=1e6,
        description="ε₂: in addition, a group is split only if the largest norm of its updates is "
        "above this share of the largest norm so far.",
    )
    first_split: Count = Field(2, description="First round in which a group can be split.")
    hands_on = True
    models_in = ("group_models",)

    def insecure(self) -> str:
        """Return why it is refused in a secure run: its first sums would bind the groups."""
        return SUMS_BEFORE_GROUPS

    def first(self, initial: Arrays) -> CFLState:
        return CFLState(Members(initial), {0: initial})

    def newcomer_model(self, state: CFLState) -> Model:
        return state.splits[0].model if state.splits else state.group_models[0]

    def welcome(self, state: CFLState, new: frozenset[str], now: Round) -> CFLState:
        """Start newcomers at the root."""
        return replace(state, group_of={**state.group_of, **dict.fromkeys(sorted(new), 0)})

    def renew(self, state: CFLState, changed: frozenset[str], now: Round) -> CFLState:
        """Send silos with changed data to the root again."""
        return self.welcome(state, changed, now)

    def prepare(self, state: CFLState, now: Round) -> Exchanges[CFLState]:
        """Let newcomers walk down, one training per level; without an answer, resume later."""
        step = 0
        waiting = [silo for silo in now.silos if state.group_of[silo.name] in state.splits]
        while waiting:
            step += 1
            answers = yield [_placing(state, silo, step, now) for silo in waiting]
            down = {u.silo.name: _part(state, u) for u in answers}
            state = replace(state, group_of={**state.group_of, **down})
            here = {u.silo.name for u in answers}
            waiting = [
                s for s in waiting if s.name in here and state.group_of[s.name] in state.splits
            ]
        return state

    def orders(self, state: CFLState, now: Round) -> tuple[CFLState, list[Order]]:
        state = replace(state, members=_handed_out(state, now.names))
        settled = [silo for silo in now.silos if state.group_of[silo.name] not in state.splits]
        return state, orders_from(state.members.models, settled)

    def absorb(self, state: CFLState, updates: Updates, now: Round) -> CFLState:
        """Split the groups that are due, then run FedAvg in every group."""
        by_group: dict[int, list[Update]] = {}
        for update in updates:
            by_group.setdefault(state.group_of[update.silo.name], []).append(update)
        grams = {number: gram_of(own) for number, own in by_group.items()}
        norms = {
            number: (
                mean_norm(matrix, [u.num_examples for u in by_group[number]]),
                float(np.sqrt(matrix.diagonal().max())),
            )
            for number, matrix in grams.items()
        }
        largest = max([state.largest, *(norm for _, norm in norms.values())])
        state = replace(state, largest=largest, norms=norms)
        for number in sorted(by_group):
            matrix, own = grams[number], by_group[number]
            if now.number >= self.first_split and is_split_due(
                matrix,
                [u.num_examples for u in own],
                max_mean_norm=self.eps_mean * largest,
                min_largest_norm=self.eps_largest * largest,
            ):
                state = _split(state, number, own, matrix, now)
        return _trained(state, updates)

    def details(self, state: CFLState) -> Mapping[str, Any]:
        """Return the tree, and each group's movement as a share of the largest norm."""
        scale = state.largest or 1.0
        return {
            "splits": {
                str(n): {"round": s.round, "parts": s.parts} for n, s in state.splits.items()
            },
            "moves": {
                str(n): [round(mean / scale, 4), round(most / scale, 4)]
                for n, (mean, most) in state.norms.items()
            },
        }


def _placing(state: CFLState, silo: Silo, step: int, now: Round) -> Order:
    split = state.splits[state.group_of[silo.name]]
    config = constant_lr(now.config, split.round)
    return placing_order(silo, split.model, config, formed=split.round, step=step)


def _part(state: CFLState, update: Update) -> int:
    """Return the part one level below the silo's present place."""
    split = state.splits[state.group_of[update.silo.name]]
    return split.parts[nearest(update, split.directions, metric="cosine")]


def _split(
    state: CFLState, number: int, updates: Updates, matrix: np.ndarray, now: Round
) -> CFLState:
    """Replace a group by two; absent silos and those without an answer are placed later."""
    halves = bipartition(matrix)
    names = [[updates[row].silo.name for row in half] for half in halves]
    first = 1 + max(state.group_models)
    parts = (first, first + 1)
    one, other = (direction_of([updates[row] for row in half]) for half in halves)
    log.info("round %d: group %d is split into %s and %s", now.number, number, *names)
    start = updates[0].start
    return replace(
        state,
        splits={**state.splits, number: Split(start, now.number, (one, other), parts)},
        group_models={**state.group_models, parts[0]: start, parts[1]: start},
        group_of={
            **state.group_of,
            **{n: p for p, half in zip(parts, names, strict=True) for n in half},
        },
    )


def _trained(state: CFLState, updates: Updates) -> CFLState:
    groups = _handed_out(state, state.members.here).groups
    answered = [([u for u in updates if u.silo.name in group], group) for group in groups]
    kept = [update for own, group in answered for update in accepted(own, group)]
    members = average_groups(state.members.grouped(groups), kept)
    models = dict(state.group_models)
    for update in kept:
        models[state.group_of[update.silo.name]] = members.models[update.silo.name]
    return replace(state, members=members, group_models=models)


def _handed_out(state: CFLState, here: Sequence[str]) -> Members:
    """Give present silos their group's model; those still walking down are alone."""
    settled = {n: number for n, number in state.group_of.items() if number not in state.splits}
    return give_out(state.members, here, settled, state.group_models)
