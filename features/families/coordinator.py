"""The coordinator's part: name the family of models that each message is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from coterie import wire
from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.handles import Model, is_seen, sent_for
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.stage import Held, Scene, Stage

OF_TREES = "leaf"
"""An array of trees that no network has."""
OF_NETWORKS = (wire.PART, wire.CONSENSUS)
"""Entries that are about networks only."""


@runtime_checkable
class Chooses(Protocol):
    """An algorithm that may choose between families of models."""

    def own_trees(self, state: Any) -> Mapping[str, Config] | None:
        """Return silo → entries to make its own of its group's trees; None: there is one family."""
        ...


class Families(Stage):
    """The stage for runs whose silos may hold models of several families."""

    name = "families"

    def outgoing(self, mine: None, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Name the family; of trees nothing is asked that only networks have.

        Orders to make own trees name their λ already: that of networks would be another.
        """
        if _own_trees(scene) is None:
            return list(orders)
        named = []
        for order in orders:
            sums = order.kind == wire.EVALUATE_HISTOGRAMS
            family = wire.TREES if sums else family_of(order.model)
            config = {**order.config, wire.FAMILY: family}
            if family == wire.TREES:
                _spared(config)
            named.append(replace(order, config=config))
        return named

    def held(self, mine: None, scene: Scene, held: Held) -> Held:
        """Name the family of every model that a silo is given, and with trees their λ."""
        if (own := _own_trees(scene)) is None:
            return held
        entries = {name: dict(held.entries.get(name, {})) for name in held.models}
        for name, model in held.models.items():
            entries[name][wire.FAMILY] = family_of(model)
            if entries[name][wire.FAMILY] == wire.TREES:
                _spared(entries[name])
                entries[name].pop(wire.OWN_PENALTY, None)
                entries[name] |= own.get(name, {})
        return replace(held, entries={**held.entries, **entries})


def family_of(model: Model) -> str:
    model = sent_for(model)
    return wire.TREES if is_seen(model) and OF_TREES in model else wire.NETWORK


def _own_trees(scene: Scene) -> Mapping[str, Config] | None:
    algorithm = scene.algorithm
    return algorithm.own_trees(scene.state) if isinstance(algorithm, Chooses) else None


def _spared(entries: dict[str, Any]) -> None:
    """Remove what is asked of networks only."""
    for name in OF_NETWORKS:
        entries.pop(name, None)
