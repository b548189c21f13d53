"""The coordinator's part of secure aggregation: exchange keys, request sketches, request sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie import wire
from coterie.features.secure.protocol import FEWEST, LEAST_SKETCH, SPARSE, num_numbers, sketch_sizes
from coterie.features.secure.row_sums import RowSums
from coterie.features.secure.sums import SecureRun, without
from coterie.strategies.errors import refused
from coterie.strategies.plain.hidden import linear_first
from coterie.strategies.rounds.algorithm import Algorithm, Compared, Order
from coterie.strategies.rounds.handles import Arrays, Masked, Model
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.stage import Came, Held, Room, Scene, Settled, Stage


class Secure(Stage):
    """The secure aggregation stage. Keys exist only in memory: a resumed run exchanges new ones.

    Args:
        config: entries of the run's training messages.
    """

    name = "secure"

    def __init__(self, sums: SecureRun, config: Config) -> None:
        self.sums, self.rows, self.config = sums, RowSums(sums), config

    def admit(self, mine: None, room: Room) -> tuple[None, Room]:
        """Exchange keys; require groups of at least two: a sum of one silo is its update."""
        here = [replace(s, min_group_size=max(FEWEST, s.min_group_size)) for s in room.here]
        silos = [silo for silo in here if silo.name not in room.resting]
        self.sums.require_own(silos)
        compared, _ = _compared(room.algorithm, room.state, self.config)
        failed = self.sums.greet(silos, seed=compared is not None)
        return mine, replace(room, here=tuple(here), resting={**room.resting, **failed})

    def outgoing(self, mine: None, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Request sketches instead of models; of what is summed over rows, masked answers."""
        if any(wire.kind_of(order.kind).summed for order in orders):
            return self.rows.asked(orders)
        compared, sketches = _compared(scene.algorithm, scene.state, self.config)
        return [
            replace(
                order,
                config={**order.config, **self.sums.entries(order, compared)},
                sketches=sketches,
            )
            for order in sendable(orders)
        ]

    def incoming(self, mine: None, scene: Scene, came: Came) -> tuple[None, Came]:
        """Request keys again from silos that refused, and replace models that they have lost."""
        for order, why in came.checked.failed:
            if not (why.silent or why.diverged):
                self.sums.forget(order.silo.name)
        if not scene.training:
            failed = [*came.checked.failed, *self.rows.take_waiting()]
            return mine, replace(came, checked=replace(came.checked, failed=failed))
        lost = [order.model for order, why in came.checked.failed if why.refused]
        gone = [model for model in lost if isinstance(model, Masked)]
        return mine, replace(came, state=without(scene.algorithm, came.state, gone))

    def settle(self, mine: None, scene: Scene, state: Any) -> Settled:
        """Request the sums, and replace the means in a state by models."""
        return self.sums.settle(scene.algorithm, state, scene.now)

    def held(self, mine: None, scene: Scene, held: Held) -> Held:
        """Replace a model that only another silo has by the model that silo started from."""
        return replace(held, models=own_or_origin(held.models))


def _compared(
    algorithm: Algorithm[Any], state: Any, config: Config
) -> tuple[Compared | None, dict[str, int]]:
    """Return what silos sketch of their updates, and the numbers of each sketch.

    Sketches serve the algorithm's comparison or, in a large enough model, the bounds on influence.
    A table's network has none for bounds: in some rounds silos train its linear part alone, and
    what is sketched of so few parameters would reveal them.
    """
    compared = algorithm.compared(state)
    initial = algorithm.members(state).initial
    if compared is not None:
        return compared, sketches_of(compared, initial)
    bounded = algorithm.averages and not linear_first(initial, config)
    anyway = Compared() if bounded else None
    sizes = {} if anyway is None else sketch_sizes(initial, anyway.layers)
    return (anyway, sizes) if sizes else (None, {})


def sketches_of(compared: Compared | None, model: Arrays) -> dict[str, int]:
    """Return name → length of the sketches that are requested from silos.

    Raises:
        FederationError: the model is too small to be sketched.
    """
    if compared is None:
        return {}
    sizes = sketch_sizes(model, compared.layers)
    if not sizes:
        raise refused(
            "a secure run of this strategy forms groups by comparing silos, and this model of "
            f"{num_numbers(model):,} parameters is too small for that: a sketch of its update "
            f"needs {LEAST_SKETCH} numbers, {SPARSE} times fewer than the update has, or it is "
            "inaccurate or the update itself. Scores of candidate models would reveal the update "
            "as well, after as many scores as the model has parameters; and so would sums of "
            "pairs. Use a strategy that compares nothing (fedavg), a larger model, or leave "
            "secure out."
        )
    return sizes


def own_or_origin(models: Mapping[str, Model]) -> dict[str, Model]:
    """Return silo → model, replacing a model that only another silo has by its origin."""
    return {
        name: model.origin if isinstance(model, Masked) and model.silo != name else model
        for name, model in models.items()
    }


def sendable(orders: Sequence[Order]) -> list[Order]:
    """Return the orders; replace one silo's model that others also receive by its origin for all.

    All silos in a sum must have started from the same model.
    """
    own = [order.model for order in orders if isinstance(order.model, Masked)]
    wanted = [o for o in orders if isinstance(o.model, Masked) and o.model.silo != o.silo.name]
    shared = {id(order.model) for order in wanted} & {id(model) for model in own}
    return [
        replace(order, model=order.model.origin)
        if isinstance(order.model, Masked) and id(order.model) in shared
        else order
        for order in orders
    ]
