"""Keep silos' updates from the coordinator: exchange keys, ask for sketches, and ask for sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coterie.features.secure.protocol import FEWEST, sketch_sizes
from coterie.features.secure.sums import SecureRun, own_or_origin, sendable, sketches_of, without
from coterie.strategies.rounds.algorithm import Algorithm, Compared, Order
from coterie.strategies.rounds.handles import Masked
from coterie.strategies.rounds.stage import Came, Held, Room, Scene, Settled, Stage


class Secure(Stage):
    """The stage for secure aggregation; a resumed run exchanges keys again, kept only in memory."""

    name = "secure"

    def __init__(self, sums: SecureRun) -> None:
        self.sums = sums

    def admit(self, mine: None, room: Room) -> tuple[None, Room]:
        """Exchange keys; require groups of at least two, because a sum of one is its update."""
        here = [replace(s, min_group_size=max(FEWEST, s.min_group_size)) for s in room.here]
        silos = [silo for silo in here if silo.name not in room.resting]
        self.sums.require_own(silos)
        compared, _ = _compared(room.algorithm, room.state)
        failed = self.sums.greet(silos, seed=compared is not None)
        return mine, replace(room, here=tuple(here), resting={**room.resting, **failed})

    def outgoing(self, mine: None, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Ask for sketches instead of models."""
        compared, sketches = _compared(scene.algorithm, scene.state)
        return [
            replace(
                order,
                config={**order.config, **self.sums.entries(order, compared)},
                sketches=sketches,
            )
            for order in sendable(orders)
        ]

    def incoming(self, mine: None, scene: Scene, came: Came) -> tuple[None, Came]:
        """Ask silos that refused for their key again, and replace models that they have lost."""
        for order, why in came.checked.failed:
            if not (why.silent or why.diverged):
                self.sums.forget(order.silo.name)
        if not scene.training:
            return mine, came
        lost = [order.model for order, why in came.checked.failed if why.refused]
        gone = [model for model in lost if isinstance(model, Masked)]
        return mine, replace(came, state=without(scene.algorithm, came.state, gone))

    def settle(self, mine: None, scene: Scene, state: Any) -> Settled:
        """Ask for the sums that replace the means in a state by models."""
        return self.sums.settle(scene.algorithm, state, scene.now)

    def held(self, mine: None, scene: Scene, held: Held) -> Held:
        """Replace a model that only another silo has by what that silo started from."""
        return replace(held, models=own_or_origin(held.models))


def _compared(algorithm: Algorithm[Any], state: Any) -> tuple[Compared | None, dict[str, int]]:
    """Return what silos sketch of their updates, and the numbers of each sketch.

    This is what the algorithm compares, or, in a large enough model, what bounds on influence
    need.
    """
    compared = algorithm.compared(state)
    initial = algorithm.members(state).initial
    if compared is not None:
        return compared, sketches_of(compared, initial)
    anyway = None if algorithm.alone else Compared()
    sizes = {} if anyway is None else sketch_sizes(initial, anyway.layers)
    return (anyway, sizes) if sizes else (None, {})
