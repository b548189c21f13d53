"""Bound every silo's updates; quarantined silos train their own model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie import wire
from coterie.features.robust.bounds import Bounded, bound
from coterie.features.robust.keys import Influence
from coterie.features.robust.reputation import Reputation
from coterie.strategies.rounds.algorithm import Order, Updates
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.stage import Came, Room, Scene, Stage


class Robust(Stage):
    """The stage for robust aggregation."""

    name = "robust"
    first = Reputation()

    def __init__(self, influence: Influence) -> None:
        self.influence = influence

    def admit(self, mine: Reputation, room: Room) -> tuple[Reputation, Room]:
        """End quarantines that are over, and put newcomers on probation."""
        if not room.final:
            known = room.algorithm.members(room.state).sizes
            new = [silo.name for silo in room.playing if silo.name not in known]
            mine = mine.begin(room.number, new)
        return mine, replace(room, apart=mine.models)

    def outgoing(self, mine: Reputation, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Let quarantined silos train their own model, and send them the reason."""
        out = [silo for silo in scene.room.playing if silo.name in mine.apart]
        alone = [
            Order(
                silo,
                mine.apart[silo.name].model,
                config={wire.GROUP_SIZE: 1, wire.APART: mine.apart[silo.name].why},
            )
            for silo in out
        ]
        return [*orders, *(alone if scene.training else [])]

    def incoming(self, mine: Reputation, scene: Scene, came: Came) -> tuple[Reputation, Came]:
        """Bound updates; in the round's own training, check their directions too."""
        groups = scene.algorithm.groups(came.state) if scene.training else ()
        bounded = self._bounded(mine, scene, came.updates, groups)
        counting = [u for u in bounded.updates if u.silo.name not in mine.apart]
        if not scene.training:
            return mine, replace(came, updates=bounded.updates)
        own = [u for u in came.checked.updates if u.silo.name in mine.apart]
        now = bounded.reputation.diverged(came.diverged, scene.now.number).trained_alone(own)
        return now, replace(
            came,
            updates=counting,
            apart=now.models,
            left_out={**came.left_out, **bounded.left_out},
            notes={
                **came.notes,
                **({"influence": dict(bounded.details)} if bounded.details else {}),
            },
        )

    def _bounded(
        self, mine: Reputation, scene: Scene, updates: Updates, groups: Sequence[Group]
    ) -> Bounded:
        """Return what counts: everything, if silos learn nothing from others, or not here."""
        if scene.algorithm.alone or scene.algorithm.whole:
            return Bounded(list(updates), mine)
        return bound(
            self.influence,
            mine,
            [u for u in updates if u.silo.name not in mine.apart],
            number=scene.now.number,
            groups=groups,
            crosses=scene.algorithm.crosses,
        )
