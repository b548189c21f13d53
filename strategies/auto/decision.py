"""What a race decides: which partition is held, and what of it.

The one place where ``auto`` comes to hold groups. Whoever proposed them, they are not held if they
stand behind everybody alone by the figures of their own race.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coterie.strategies.auto.candidates import Candidate, everybody_alone
from coterie.strategies.auto.evidence import behind_alone, by_preference, gains_of, standings_of
from coterie.strategies.auto.state import AutoState
from coterie.strategies.partition.race import Gain
from coterie.strategies.rounds.reports import Group


@dataclass(frozen=True)
class Decision:
    """What is held after a race.

    Attributes:
        winner: the partition.
        gains: silo → what it gains by its group over training alone, where it measured both.
        groups: of several silos that are held: those of the winner that most of their silos stay
            in.
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
        """Those of them that have a group."""
        return self.keeping & {name for group in self.groups for name in group}


def decision(state: AutoState, *, unseen: bool) -> Decision:
    """The most wanted candidate that stands behind everybody alone neither as it was raced nor in
    what would be held of it; else everybody alone, which the race may have dropped before."""
    wanted = by_preference(state.candidates, standings_of(state), state.members.sizes)
    for number in wanted:
        candidate = state.candidates[number]
        found = _settled(state, candidate, unseen=unseen)
        if not any(behind_alone(state, groups) for groups in (candidate.groups, found.groups)):
            return found
    return Decision(everybody_alone(state.raced), {}, (), ())


def _settled(state: AutoState, winner: Candidate, *, unseen: bool) -> Decision:
    """What would be held of a partition: of a group that most of its silos leave, what the others
    measured says nothing any more."""
    gains = gains_of(state, winner)
    # What a silo makes of its group's model gets no share where nobody sees it, and none where it
    # has noise that only the mean of many takes away (privacy).
    blind = gains if unseen else gains.keys() & state.noise.keys()
    gains |= {name: replace(gains[name], doubt=0.0) for name in blind}
    own = {name for name, gain in gains.items() if gain.own}
    several = [group for group in winner.groups if len(group) > 1]
    deserted = [group for group in several if 2 * len(own & set(group)) > len(group)]
    left = sorted(name for group in deserted for name in group if name not in own)
    gains |= {name: replace(gains[name], doubt=0.0) for name in left if name in gains}
    kept = tuple(group for group in several if group not in deserted)
    return Decision(winner, gains, kept, tuple(left))
