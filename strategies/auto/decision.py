"""The decision of a race: which partition is held, and which of its groups.

``auto`` holds groups only by this decision, and never groups that are worse than all silos alone by
the measurements of their race.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coterie.strategies.auto.candidates import Candidate, everybody_alone
from coterie.strategies.auto.evidence import (
    behind_alone,
    by_loss,
    by_preference,
    converges,
    gains_of,
    standings_of,
)
from coterie.strategies.auto.state import AutoState
from coterie.strategies.partition.race import Gain
from coterie.strategies.rounds.reports import Group


@dataclass(frozen=True)
class Decision:
    """The outcome of a race.

    Attributes:
        gains: silo → its gain by the group over local training, where it measured both.
        groups: the winner's groups of several silos that most of their silos stay in.
        left: silos that are alone because most of their group keep their own models.
    """

    winner: Candidate
    gains: Mapping[str, Gain]
    groups: tuple[Group, ...]
    left: tuple[str, ...]

    @property
    def keeping(self) -> frozenset[str]:
        """Silos that keep the model that they trained alone."""
        return frozenset(name for name, gain in self.gains.items() if gain.own)

    @property
    def own(self) -> frozenset[str]:
        """Silos that keep their own model although they have a group."""
        return self.keeping & {name for group in self.groups for name in group}


def decision(state: AutoState, *, unseen: bool) -> Decision:
    """Return the most wanted candidate that is not behind all silos alone, else all alone.

    Both the candidate as raced and what would be held of it must pass.
    """
    found, sizes = standings_of(state), state.members.sizes
    wanted = by_preference(state.candidates, found, sizes, converged=converges(state))
    for number in wanted:
        candidate = state.candidates[number]
        settled = _settled(state, candidate, unseen=unseen)
        left = replace(candidate, groups=settled.groups)
        if not any(behind_alone(state, one) for one in (candidate, left)):
            return settled
    return Decision(everybody_alone(state.raced), {}, (), ())


def _settled(state: AutoState, winner: Candidate, *, unseen: bool) -> Decision:
    """Return what would be held of a partition, without groups that most of their silos leave."""
    gains = gains_of(state, winner)
    # What a silo makes of its group's model gets no share where nobody sees it, and none where it
    # has noise that only the mean of many takes away (privacy). What is sent of a linear model also
    # has the silo's pull on its group (``coterie.features.consensus``).
    blind = gains if unseen or by_loss(state) else gains.keys() & state.noise.keys()
    gains |= {name: replace(gains[name], doubt=0.0) for name in blind}
    own = {name for name, gain in gains.items() if gain.own}
    several = [group for group in winner.groups if len(group) > 1]
    deserted = [group for group in several if 2 * len(own & set(group)) > len(group)]
    left = sorted(name for group in deserted for name in group if name not in own)
    gains |= {name: replace(gains[name], doubt=0.0) for name in left if name in gains}
    kept = tuple(group for group in several if group not in deserted)
    return Decision(winner, gains, kept, tuple(left))
