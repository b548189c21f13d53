"""FedCollab's discriminators in ``auto``: pairs of silos that are compared, and their proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coterie.features.sums.trees.coordinator import is_trees
from coterie.strategies.auto.budget import Budget
from coterie.strategies.auto.candidates import Candidate, with_proposal
from coterie.strategies.auto.state import AutoState
from coterie.strategies.fedcollab.algorithm import FedCollab, FedCollabState
from coterie.strategies.fedcollab.discriminators import Discriminators
from coterie.strategies.partition.distance import any_apart
from coterie.strategies.rounds.algorithm import Exchanges, Round
from coterie.strategies.rounds.members import Members

if TYPE_CHECKING:
    from coterie.strategies.auto.algorithm import Auto

PAIRED_SHARE = 1 / 6
"""Discriminators' share of the byte limit: what races within the default training budget leave."""
FEWEST_ROUNDS = 5
"""Minimum discriminator rounds; after fewer, distances carry little information."""
MAX_PAIRED = 24
"""Maximum number of silos of which every pair is compared by a discriminator."""


def measured(auto: Auto, state: AutoState, limits: Budget, now: Round) -> Exchanges[AutoState]:
    """Compare the pairs of a look, within a share of the bytes, if the silos may be asked.

    Rows of trees are compared in the bins of the look; not beside a network (``families``), whose
    rows are compared.
    """
    asks = auto.discriminators and not now.unseen  # they are models of a silo's data
    asks = asks and all(silo.described for silo in now.silos)
    forest = state.trees
    if is_trees(state.members.initial):
        asks = asks and bool(forest.bins) and not (forest.judging or forest.judged)
    if not (state.phase == "look" and asks and 2 < len(now.silos) <= MAX_PAIRED):
        return state
    before = state.pairs or FedCollabState(state.members)
    before = replace(before, members=state.members, bins=forest.bins)
    most = PAIRED_SHARE * limits.most_bytes(state, now) - state.paired
    if most <= 0:
        return state
    limit = Discriminators(gigabytes=most / 1e9, fewest=FEWEST_ROUNDS)
    fedcollab = FedCollab(c="auto", seed=auto.seed, discriminators=limit)
    compared = yield from fedcollab.solved(before, now)
    state = replace(state, pairs=replace(compared, members=Members({})))
    if (found := compared.measured) is None:
        return state
    total = state.paired + found.bytes
    return replace(state, paired=total, paired_in=now.number, moved=state.moved + found.bytes)


def proposed(
    state: AutoState, candidates: Sequence[Candidate], names: Sequence[str]
) -> tuple[Candidate, ...]:
    """Return the candidates with the structure that the discriminators' distances suggest."""
    if state.pairs is None or (structure := state.pairs.structure) is None:
        return tuple(candidates)
    return with_proposal(
        candidates,
        names,
        state.pairs.planned,
        "FedCollab, c auto",
        supports=not structure.alone
        and set(names) <= set(structure.silos)
        and any_apart(state.pairs.distances.values()),
    )
