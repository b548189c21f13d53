"""What training and comparing cost, and what a run's budget allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coterie import wire
from coterie.features.sums.trees.coordinator import is_trees
from coterie.strategies.auto.candidates import AS_IT_IS, Candidate
from coterie.strategies.auto.evidence import HOLDOUT, MEASURES, by_loss
from coterie.strategies.auto.state import AutoState, group_of
from coterie.strategies.plain import hidden
from coterie.strategies.rounds.algorithm import Round, Update, Updates, num_bytes
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.options import Scalar
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

FEWEST = 5
"""Training samples below which a silo holds nothing out and does not judge."""
PLANNED = 20
"""Rounds that are planned at a time. A run of more rounds equals, so far, one that was to end after
these; so this one can be continued."""
LEAST_BYTES = 1_000_000
"""Bytes of a run and silo that are never too many, whatever its model's size: a linear model may
have a few dozen numbers, and no discriminator is as small."""
EXTRA = 2
"""Rounds' worth of epochs in one round of the winner, while the budget allows."""


def planned(now: Round) -> int:
    """Return the round up to which race and budget are planned: the last one of a short run, or the
    next multiple of ``PLANNED``."""
    if now.rounds <= PLANNED:
        return now.rounds
    return math.ceil(min(now.number, now.rounds) / PLANNED) * PLANNED


@dataclass(frozen=True)
class Budget:
    """The most that a run may cost, as multiples of FedAvg in as many rounds as are planned.

    Attributes:
        trainings: of every silo.
        bytes: of models and discriminators, to silos and back.
    """

    trainings: float
    bytes: float

    def most_bytes(self, state: AutoState, now: Round) -> float:
        """Return the byte limit: ``bytes`` times FedAvg's bytes, past and still to come.

        For linear models it is at least ``LEAST_BYTES`` for each silo.
        """
        each = state.each or _bytes_each(state.members.initial, now)
        ahead = (planned(now) - state.number) * len(now.silos) * each
        return max(self.bytes * (state.usual + ahead), least_bytes(state, len(now.silos)))

    def allows_bytes(self, state: AutoState, now: Round, exchanges: float) -> bool:
        return state.moved + exchanges * state.each <= self.most_bytes(state, now)

    def allows(
        self, state: AutoState, passes: Mapping[str, float], exchanges: float, now: Round
    ) -> bool:
        """Return whether these passes of each silo, and exchanges of models, are within both."""
        return self.allows_bytes(state, now, exchanges) and all(
            state.trainings.get(name, 0.0) + more <= self.trainings * planned(now)
            for name, more in passes.items()
        )

    def charged(self, state: AutoState, updates: Updates, now: Round) -> AutoState:
        """Add the round's trainings, in passes over a silo's samples, and its bytes."""
        done, moved, usual, trained = dict(state.trainings), 0, 0, 0
        grows = is_trees(state.members.initial)  # what these cost is counted where they grow
        for update in updates:
            name = update.silo.name
            comparing = state.phase != "hold" or name in state.probation
            times = pass_of(update.silo) if comparing else float(self.times(state, name, now))
            done[name] = done.get(name, 0.0) + (0.0 if grows else times)
            moved += bytes_of(update)
            if not update.purpose:
                usual, trained = usual + bytes_of(update), trained + 1
        return replace(
            state,
            trainings=done,
            moved=state.moved + moved,
            usual=state.usual + usual,
            each=usual / trained if trained else state.each,
        )

    def longer(self, state: AutoState, name: str, now: Round) -> dict[str, Scalar]:
        times, key = self.times(state, name, now), wire.LOCAL_EPOCHS
        if now.config.get(wire.LOCAL_STEPS):
            key = wire.LOCAL_STEPS
        return {} if times == 1 else {key: times * int(now.config.get(key, 1))}

    def times(self, state: AutoState, name: str, now: Round) -> int:
        """Return how many rounds' worth of epochs a group trains in this round of a hold.

        The remaining budget, spent early and equally for all members, makes up for the passes that
        held-out samples missed and for the race.
        """
        compares = hidden.compares(state.linear_first, now)
        if state.phase != "hold" or compares or is_trees(state.members.initial):
            return 1
        group = [n for n in group_of(state.held, name) if n in now.here]
        epochs, left = int(now.config.get(wire.LOCAL_EPOCHS, 1)), planned(now) - now.number + 1
        for member in group:
            most = now.here[member].max_local_epochs
            if most and (most < EXTRA * epochs or now.config.get(wire.LOCAL_STEPS)):
                return 1
            if state.trainings.get(member, 0.0) + EXTRA + left - 1 > self.trainings * planned(now):
                return 1
        return EXTRA

    def allows_race(self, state: AutoState, kept: Sequence[Candidate], now: Round) -> bool:
        """Return whether a race between these, and then the rest of the run, are within both."""
        left = planned(now) - now.number - MEASURES
        groups = {group for c in kept for group in c.groups if len(group) > 1}
        arms = {n: 1 + sum(n in group for group in groups) for n in now.names}
        return self.allows_bytes(
            state, now, MEASURES * sum(arms.values()) + left * len(now.names)
        ) and all(
            state.trainings.get(n, 0.0) + MEASURES * arms[n] * pass_of(now.here[n]) + left
            <= self.trainings * planned(now)
            for n in now.names
        )

    @staticmethod
    def affordable(
        found: Sequence[Candidate], fits: Callable[[Sequence[Candidate]], bool]
    ) -> tuple[Candidate, ...]:
        """Drop the weakest candidates, not trivial or held ones, until a race is affordable."""
        kept = list(found)
        while True:
            spare = [c for c in kept if not (c.is_trivial or c.source == AS_IT_IS)]
            if fits(kept) or not spare:
                return tuple(kept)
            weakest = min(
                spare, key=lambda c: (c.supported or c.by_silo, c.num_sources, -kept.index(c))
            )
            kept.remove(weakest)
            log.info("auto does not race %s: the budget is too small", weakest.source)


def least_bytes(state: AutoState, silos: int) -> int:
    """Return the least byte limit of a run; 0 without one."""
    return LEAST_BYTES * silos if by_loss(state) else 0


def holdout(silo: Silo) -> dict[str, Scalar]:
    """Return the entry that holds samples out; empty for a silo that states too few.

    ClientApps that are not coterie's state none in advance: they hold out what they can.
    """
    enough = silo.num_examples >= FEWEST or not silo.described
    return {wire.HOLDOUT: HOLDOUT} if enough else {}


def pass_of(silo: Silo) -> float:
    """Return the cost of a look or race training, as a share of one with all samples."""
    return 1 - HOLDOUT if holdout(silo) else 1.0


def bytes_of(update: Update) -> int:
    return update.bytes_sent + update.bytes_received


def _bytes_each(model: Arrays, now: Round) -> float:
    """Return the bytes of a model to a silo and back, in the run's wire format."""
    how = now.config.get(wire.WIRE_FORMAT, wire.FLOAT32)
    if how == wire.FLOAT32:
        return 2 * num_bytes(model)
    return 2 * wire.num_rounded_bytes(model) * (0.75 if how == "delta-int8" else 1)
