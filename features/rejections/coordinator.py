"""Tell a silo with its next message that its last training did not count, and why.

A silo knows what it refused, but not what the coordinator found wrong with its reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from coterie import wire
from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.stage import Came, Held, Scene, Stage


class Rejections(Stage):
    """The stage for rejections; remembers silo → why its last training did not count."""

    name = "rejections"
    first: ClassVar[Mapping[str, str]] = {}

    def outgoing(
        self, mine: Mapping[str, str], scene: Scene, orders: Sequence[Order]
    ) -> list[Order]:
        """Add the reason to the silo's order."""
        return [
            replace(order, config={**order.config, wire.LEFT_OUT: mine[order.silo.name]})
            if scene.training
            and not order.purpose
            and order.silo.described
            and order.silo.name in mine
            else order
            for order in orders
        ]

    def incoming(
        self, mine: Mapping[str, str], scene: Scene, came: Came
    ) -> tuple[Mapping[str, str], Came]:
        """Drop the reasons just sent, and note silos whose reply was wrong."""
        if not scene.training:
            return mine, came
        notified = {order.silo.name for order in came.orders}
        wrong = {o.silo.name: str(e) for o, e in came.checked.failed if e.is_ours and not o.purpose}
        return {**{name: why for name, why in mine.items() if name not in notified}, **wrong}, came

    def held(self, mine: Mapping[str, str], scene: Scene, held: Held) -> Held:
        """Add the reason to the message with the silo's model."""
        entries = dict(held.entries)
        for silo in scene.room.labelled:
            if silo.described and silo.name in mine:
                entries[silo.name] = {**entries.get(silo.name, {}), wire.LEFT_OUT: mine[silo.name]}
        return replace(held, entries=entries)
