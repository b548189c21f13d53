"""Send models as 16-bit numbers to silos that have sent a rounded update themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from coterie import wire
from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.stage import Outcome, Played, Scene, Stage


class Compression(Stage):
    """The stage for a smaller ``wire-format``; remembers which silos support it."""

    name = "compression"
    first: ClassVar[frozenset[str]] = frozenset()

    def outgoing(self, mine: frozenset[str], scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Round the models in orders to silos that support it."""
        how = scene.now.config.get(wire.WIRE_FORMAT, wire.FLOAT32)
        if not scene.training or how == wire.FLOAT32:
            return list(orders)
        return [
            replace(order, rounded=True)
            if order.silo.name in mine and order.silo.described and not order.evaluates
            else order
            for order in orders
        ]

    def after(self, mine: frozenset[str], played: Played) -> tuple[frozenset[str], Outcome]:
        """Add silos whose update was rounded; remove silos whose reply was wrong."""
        checked = played.came.checked
        wrong = {order.silo.name for order, why in checked.failed if not why.silent}
        rounded = {
            u.silo.name for u in checked.updates if wire.UPDATE_LOST in u.metrics and not u.purpose
        }
        return mine - wrong | rounded, Outcome()
