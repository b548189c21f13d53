"""Leave silos out whose group is smaller than they accept.

``coterie.strategies.rounds.minimum_sizes`` forms and averages groups within these limits already;
here silos are left out of groups in which too few answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from coterie import wire
from coterie.strategies.rounds.minimum_sizes import withdraw
from coterie.strategies.rounds.stage import Came, Outcome, Played, Room, Scene, Stage


class SmallestGroups(Stage):
    """The stage for smallest groups; remembers what silos without a description stated last."""

    name = "smallest_groups"
    first: ClassVar[Mapping[str, int]] = {}

    def admit(self, mine: Mapping[str, int], room: Room) -> tuple[Mapping[str, int], Room]:
        """Give silos the smallest group that they stated last."""
        here = [
            replace(silo, min_group_size=mine[silo.name])
            if silo.name in mine and not silo.described
            else silo
            for silo in room.here
        ]
        return mine, replace(room, here=tuple(here))

    def incoming(
        self, mine: Mapping[str, int], scene: Scene, came: Came
    ) -> tuple[Mapping[str, int], Came]:
        """Leave out silos that require larger groups than what answered of theirs."""
        if not scene.training:
            return mine, came
        groups = [group for group in scene.algorithm.groups(came.state) if len(group) > 1]
        left_out = {**came.left_out, **withdraw(groups, came.updates)}
        counting = [u for u in came.updates if u.purpose or u.silo.name not in left_out]
        return mine, replace(came, updates=counting, left_out=left_out)

    def after(self, mine: Mapping[str, int], played: Played) -> tuple[Mapping[str, int], Outcome]:
        """Note what silos stated, and report those whose update went into no group after all."""
        noted = dict(mine)
        for update in played.came.checked.updates:
            noted.pop(update.silo.name, None)
            if update.metrics.get(wire.MIN_GROUP_SIZE, 1) > 1:
                noted[update.silo.name] = update.silo.min_group_size
        sharing = played.algorithm.sharing(played.state)
        return noted, Outcome(left_out=withdraw(sharing, played.came.updates))
