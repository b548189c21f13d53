"""Networks for tables: first the linear part, then hidden layers, as far as these help.

With a few hundred rows a network is often worse than a regression. A table's network is therefore
trained like one first, exactly and with all that linear models have; its hidden layers start
without effect and learn what the linear part leaves over. Then every silo measures the network with
a share of their effect, on samples that were held out all the time; the sum of the losses over
silos decides on the share (as a learning rate shrinks each step of boosting: Friedman, "Greedy
Function Approximation", Annals of Statistics 29(5), 2001).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from coterie import wire
from coterie.strategies.partition.race import standard_error
from coterie.strategies.rounds.algorithm import Round
from coterie.strategies.rounds.handles import Arrays, Model, is_seen
from coterie.strategies.rounds.options import Config

SHARES = (0.0, 0.25, 0.5, 1.0)
"""Shares of the hidden layers' effect that are tried."""
LEAST_ROUNDS = 5
"""Minimum rounds of a run: two for each part, and one with all data."""
PLANNED = 20
"""Rounds that are planned; a longer run goes on as it ended these."""
LAST = 0.2
"""Share of the planned rounds, after the choice, in which silos train on all their samples."""
Losses = Mapping[str, tuple[float, float]]
"""Silo → its mean loss, and the number of samples behind it."""
HEAD = "head.weight"
"""Name of the weights of the hidden layers' effect."""
GRADIENT_STEPS = (
    wire.OPTIMISER,
    wire.MOMENTUM,
    "clip-norm",
    "accumulate",
    wire.SCHEDULE,
    wire.PRECISION,
    wire.BALANCE,
)
"""Entries of messages that, if they are not at their defaults, ask for gradient steps."""


def minimises(config: Config) -> bool:
    """Return whether silos train linear models to their minimum with these entries of messages."""
    usual = {name: wire.entries()[name].at.default for name in GRADIENT_STEPS}
    return all(config.get(name, default) == default for name, default in usual.items())


def linear_first(initial: Arrays, config: Config) -> bool:
    """Return whether a run trains the linear part of its model before the hidden layers."""
    parts = {HEAD, f"{wire.LINEAR_LAYER}weight"} <= initial.keys()
    return parts and minimises(config) and int(config.get(wire.ROUNDS, 0)) >= LEAST_ROUNDS


def ends_of(rounds: int) -> tuple[int, int]:
    """Return the last round of the linear part alone, and that before which the share is chosen."""
    planned = min(rounds, PLANNED)
    return planned // 2, planned + 1 - max(1, round(LAST * planned))


@runtime_checkable
class OwnBeside(Protocol):
    """An algorithm whose silos also train their own hidden layers, beside their group's."""

    def apart(self, state: Any) -> Mapping[str, Model]:
        """Return grouped silo → the model that it trained by itself."""
        ...

    def left_apart(self, state: Any, now: Round) -> Any:
        """Return the state in which every silo goes on with that model, alone."""
        ...


def compares(linear_first: bool, now: Round) -> bool:
    """Return whether hidden layers are trained in this round whose share is not yet chosen."""
    linear, choice = ends_of(now.rounds)
    return linear_first and linear < now.number < choice


def have_effect(model: Model | None) -> bool:
    """Return whether a model's hidden layers have been trained."""
    return model is not None and is_seen(model) and HEAD in model and bool(model[HEAD].any())


def best_share(losses: Mapping[float, Losses]) -> float:
    """Return the share with the smallest sum of losses; 0 unless it is better than that.

    Silos count that measured every share.
    """
    judges = frozenset.intersection(*(frozenset(own) for own in losses.values()))
    totals = {
        share: sum(loss * count for name, (loss, count) in sorted(own.items()) if name in judges)
        for share, own in losses.items()
    }
    known = {share: total for share, total in totals.items() if np.isfinite(total)}
    best = min(known, key=lambda share: (known[share], share), default=0.0)
    return best if is_better(losses[best], losses[0.0]) else 0.0


def is_better(one: Losses, other: Losses) -> bool:
    """Return whether the mean difference of silos' losses exceeds its standard error."""
    judges = sorted(one.keys() & other.keys())
    if len(judges) < 2:
        return False
    counts = np.array([one[name][1] for name in judges])
    gains = np.array([other[name][0] - one[name][0] for name in judges]) * counts / counts.mean()
    return bool(gains.mean() > standard_error(gains, None))


def scaled(model: Model, share: float) -> Model:
    """Return a model with this share of its hidden layers' effect."""
    if not is_seen(model):
        return model
    head = model[HEAD]
    return {**model, HEAD: (head.astype(np.float64) * share).astype(head.dtype)}
