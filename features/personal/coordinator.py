"""The coordinator's part of partial pooling: choose λ, and tell it to the silos.

Until half of the run, silos of groups hold a share of their samples out of training. Then each
makes its own model of its group's at every λ of a grid, and says how good these are on the samples
that no model has seen (``coterie.strategies.plain.pooling``). From then on silos train on all their
samples, and make their own models with the λ whose losses have the smallest sum over silos. Where
models are boosted trees, those that are measured are the trial's, as soon as it is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from coterie import wire
from coterie.strategies.plain import pooling
from coterie.strategies.rounds.algorithm import Exchanges, Order
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.stage import Held, Outcome, Played, Scene, Stage

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class Chosen:
    """The λ that was chosen before the training of ``round``; 0: the group's model is not changed.

    ``losses``: λ → mean held-out loss over samples; ``before``: silo → held-out loss of the model
    that it received last, while samples are held out.
    """

    round: int = 0
    penalty: float = 0.0
    losses: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)


class Pooling(Stage):
    """The stage for partial pooling.

    Args:
        config: entries of the run's training messages.
    """

    name = "personal"
    first: ClassVar[Chosen] = Chosen()

    def __init__(self, config: Config) -> None:
        partial = config.get(wire.PERSONALISE) == wire.PARTIAL
        self.chooses = partial and not config.get(wire.OWN_PENALTY)
        self.rounds = int(config.get(wire.ROUNDS, 0))

    def _waits(self, scene: Scene) -> bool:
        if (trial := scene.algorithm.boosted_on_trial(scene.state)) is not None:
            return not trial
        return 2 * scene.now.number <= self.rounds

    def ask(self, mine: Chosen, scene: Scene) -> Exchanges[Chosen]:
        """Let silos of groups try every λ, once, after half of the run or a trial of trees."""
        algorithm, state = scene.algorithm, scene.state
        if not self.chooses or mine.round or self._waits(scene):
            return mine
        trial = algorithm.boosted_on_trial(state)
        models = algorithm.models(state) if trial is None else trial
        tried = pooling.TRIED if trial is None else pooling.TRIED_LEAVES
        grouped = {n for g in algorithm.groups(state) if len(g) > 1 for n in g}
        known = grouped & models.keys()
        silos = [s for s in scene.now.silos if s.name in known and pooling.holds_out(s)]
        wanted = [(silo, models[silo.name]) for silo in silos]
        found = yield from pooling.ask(
            wanted, holdout=pooling.HOLDOUT, tried=tried, entries=pooling.with_penalty
        )
        losses = pooling.losses_of(found)
        if not any(losses.values()):
            log.warning(
                "partial pooling: no silo sent its loss on held-out data, so its strength cannot "
                "be chosen, and silos keep their group's model. Name own-penalty, or let losses "
                "leave (share_metrics in silo.toml)"
            )
        penalty = pooling.best_penalty(losses, mine.before)
        chosen = Chosen(scene.now.number, penalty, pooling.mean_losses(losses, "{:g}".format))
        log.info("partial pooling: own-penalty %g", chosen.penalty)
        return chosen

    def outgoing(self, mine: Chosen, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Hold samples out until λ is chosen; then tell it to the silos that have own models."""
        own = self._entries(mine, scene)
        orders = [_told(o, own) if o.kind == wire.EVALUATE_OWN else o for o in orders]
        if not scene.training:
            return orders
        grows = scene.algorithm.boosted_on_trial(scene.state) is not None
        early = self.chooses and not grows and self._waits(scene)
        changed = []
        for order in orders:
            config = dict(order.config)
            if early and not order.purpose and pooling.holds_out(order.silo):
                config = {wire.HOLDOUT: pooling.HOLDOUT, **config}
            if not order.purpose:
                config |= own.get(order.silo.name, {})
            changed.append(order if config == order.config else replace(order, config=config))
        return changed

    def held(self, mine: Chosen, scene: Scene, held: Held) -> Held:
        """Tell silos how they make their own of the model that they get."""
        entries = {
            name: {**held.entries.get(name, {}), **own}
            for name, own in self._entries(mine, scene).items()
        }
        return replace(held, entries={**held.entries, **entries})

    def after(self, mine: Chosen, played: Played) -> tuple[Chosen, Outcome]:
        """Record the choice; before that, note the losses of the models that silos received."""
        if self.chooses and not mine.round:
            received = {
                u.silo.name: u.metrics[wire.HOLDOUT_LOSS]
                for u in played.came.trained
                if wire.HOLDOUT_LOSS in u.metrics
            }
            return replace(mine, before=received), Outcome()
        if mine.round != played.now.number or not mine.losses:
            return mine, Outcome()
        entry = {"penalty": mine.penalty, "losses": dict(mine.losses)}
        return mine, Outcome(notes={"own-penalty": entry})

    def _entries(self, mine: Chosen, scene: Scene) -> Mapping[str, Config]:
        own: Mapping[str, Config] = scene.algorithm.own_entries(scene.state)
        if not mine.penalty:
            return own
        grouped = [n for g in scene.algorithm.groups(scene.state) if len(g) > 1 for n in g]
        return {**dict.fromkeys(grouped, _entries(mine.penalty)), **own}


def _entries(penalty: float) -> Config:
    return {wire.PERSONALISE: wire.PARTIAL, wire.OWN_PENALTY: penalty}


def _told(order: Order, own: Mapping[str, Config]) -> Order:
    """Return a question about own models as silos understand it in any run."""
    mine = own.get(order.silo.name, {})
    mine = {} if wire.AT_HOME in mine else mine  # that is what the silo uses, not what is asked
    return replace(order, config={**_entries(0.0), **mine, **order.config})
