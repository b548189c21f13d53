"""The coordinator's part: say which part of a table's network silos train, and choose the share.

The linear part is trained in the first half of the run, and longer while the algorithm compares
partitions; then the hidden layers, with the linear part as it is. Until the share of their effect
is chosen (``coterie.strategies.plain.hidden``), silos hold samples out. Then all train the linear
part again, with all samples, and the hidden layers too if all of their effect was best.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from coterie import wire
from coterie.strategies.plain import hidden, pooling
from coterie.strategies.rounds.algorithm import Exchanges, Order
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.options import Config, Scalar
from coterie.strategies.rounds.stage import Outcome, Played, Scene, Settled, Stage

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class Layers:
    """What the stage remembers.

    Attributes:
        tried: rounds in which hidden layers were trained.
        round: that before whose training the share was chosen; 0: not yet.
        share: of the hidden layers' effect; ``applied``: the models have it.
        losses: share → mean held-out loss over samples; ``alone``: of the models that silos trained
            by themselves beside their group's, if any.
        leave: these are better, so all silos train alone.
    """

    tried: int = 0
    round: int = 0
    share: float = 1.0
    applied: bool = False
    losses: Mapping[str, float] = field(default_factory=dict)
    alone: Mapping[str, float] = field(default_factory=dict)
    leave: bool = False


class HiddenLayers(Stage):
    """The stage for networks of tables.

    Args:
        config: entries of the run's training messages.
        unseen: the coordinator sees sketches at most. A sketch of a linear part alone would reveal
            it, so where an algorithm compares these, silos train all parts at once.
    """

    name = "hidden_layers"
    first: ClassVar[Layers] = Layers()

    def __init__(self, config: Config, *, unseen: bool = False) -> None:
        self.config, self.unseen = config, unseen
        self.linear, self.choice = hidden.ends_of(int(config.get(wire.ROUNDS, 0)))

    def _part(self, mine: Layers, scene: Scene) -> str:
        """Return the part to train in a round; empty: the model has no parts."""
        algorithm, state, number = scene.algorithm, scene.state, scene.now.number
        if not hidden.linear_first(algorithm.members(state).initial, self.config):
            return ""
        if self.unseen and algorithm.compared(state) is not None:
            return ""
        if mine.round:
            return wire.BOTH_PARTS if mine.share == 1 else wire.LINEAR_PART
        early = number <= self.linear or number >= self.choice
        comparing = algorithm.comparing(state, scene.now)
        return wire.LINEAR_PART if early or comparing else wire.HIDDEN_PART

    def ask(self, mine: Layers, scene: Scene) -> Exchanges[Layers]:
        """Let silos measure the shares, after the last round of the hidden layers alone."""
        if mine.round or not mine.tried or scene.now.number != self.choice:
            return mine
        algorithm, state = scene.algorithm, scene.state
        losses = yield from self._measured(scene, algorithm.models(state), {})
        share = hidden.best_share(losses)
        own = algorithm.apart(state) if isinstance(algorithm, hidden.OwnBeside) else {}
        apart = yield from self._measured(scene, own, {wire.OWN_PENALTY: 0.0})
        alone = hidden.best_share(apart)
        leave = hidden.is_better(apart[alone], losses[share])
        mine = replace(
            mine,
            round=scene.now.number,
            share=alone if leave else share,
            leave=leave,
            losses=pooling.mean_losses(losses, "{:g}".format),
            alone=pooling.mean_losses(apart, "{:g}".format),
        )
        who = "every silo's own" if leave else "their"
        log.info("hidden layers: %g of %s effect is kept", mine.share, who)
        return mine

    def _measured(
        self, scene: Scene, models: Mapping[str, Model], more: Config
    ) -> Exchanges[dict[float, dict[str, tuple[float, float]]]]:
        silos = [s for s in scene.now.silos if s.name in models and pooling.holds_out(s)]
        found = yield from pooling.ask(
            [(silo, models[silo.name]) for silo in silos if not silo.private],
            holdout=pooling.HOLDOUT,
            tried=hidden.SHARES,
            entries=lambda share, silo: {wire.HIDDEN_SHARE: share, **more},
        )
        return pooling.losses_of(found)

    def outgoing(self, mine: Layers, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Tell silos which part to train; hold samples out until the share is chosen."""
        part = self._part(mine, scene) if scene.training else ""
        if not part:
            return list(orders)
        early = scene.now.number < self.choice
        changed = []
        for order in orders:
            if order.kind == wire.TRAIN and order.silo.described and not order.silo.private:
                config: dict[str, Scalar] = {wire.PART: part}
                if early and pooling.holds_out(order.silo):
                    config[wire.HOLDOUT] = pooling.HOLDOUT
                order = replace(order, config={**config, **order.config})
            changed.append(order)
        return changed

    def settle(self, mine: Layers, scene: Scene, state: object) -> Settled:
        """Scale the hidden layers of all models by the share, once it is chosen."""
        if not mine.round or mine.applied:
            return Settled(state)
        if mine.leave and isinstance(scene.algorithm, hidden.OwnBeside):
            state = scene.algorithm.left_apart(state, scene.now)
        changed = scene.algorithm.with_models(state, lambda m: hidden.scaled(m, mine.share))
        return Settled(changed, mine=replace(mine, applied=True))

    def after(self, mine: Layers, played: Played) -> tuple[Layers, Outcome]:
        """Count the rounds of hidden layers; record the choice."""
        parts = {order.config.get(wire.PART) for order in played.came.orders}
        mine = replace(mine, tried=mine.tried + (wire.HIDDEN_PART in parts))
        if mine.round != played.now.number or not mine.losses:
            return mine, Outcome()
        note = {"share": mine.share, "losses": dict(mine.losses)}
        if mine.alone:
            note |= {"alone": dict(mine.alone), "leave": mine.leave}
        return mine, Outcome(notes={"hidden-layers": note})
