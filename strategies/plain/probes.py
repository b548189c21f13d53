"""Probes: questions to silos how good a model is for them, before a round's training.

A coterie silo answers ``evaluate.training`` from its *training* data, so that nothing is chosen by
test data. Any other ClientApp is sent an ordinary ``evaluate``, which it answers from whatever it
evaluates on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie import wire
from coterie.strategies.rounds.algorithm import Exchanges, Order, Update
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.replies import error_of
from coterie.strategies.rounds.roster import Silo


def probe(silo: Silo, model: Model, purpose: str) -> Order:
    """Return an order for one silo's loss and error of one model."""
    kind = wire.EVALUATE_TRAINING if silo.described else wire.EVALUATE
    return Order(silo, model, purpose=purpose, kind=kind)


def loss_of(update: Update) -> float:
    """Return the loss that a silo stated, or else its error; NaN if it stated neither."""
    return float(update.metrics.get(wire.LOSS, error_of(update.metrics)))


def ask(silos: Sequence[Silo], models: Sequence[Model]) -> Exchanges[dict[str, dict[int, Update]]]:
    """Ask every silo about every model in one exchange; return silo → model number → answer."""
    purposes = {f"model-{number}": number for number in range(len(models))}
    answers = yield [
        probe(silo, model, purpose)
        for silo in silos
        for purpose, model in zip(purposes, models, strict=True)
    ]
    found: dict[str, dict[int, Update]] = {}
    for update in answers:
        found.setdefault(update.silo.name, {})[purposes[update.purpose]] = update
    return found


def losses(
    silos: Sequence[Silo], models: Sequence[Model]
) -> Exchanges[dict[str, tuple[float, ...]]]:
    """Return silo → its loss of every model; infinity for a loss that is not finite.

    Silos that did not answer for a model, or have no finite loss, are missing.
    """
    answers = yield from ask(silos, models)
    stated = {
        name: [loss_of(by_model[number]) for number in sorted(by_model)]
        for name, by_model in answers.items()
        if len(by_model) == len(models)
    }
    # A model that overflows on a silo's data is the worst for it, no reason to keep a choice.
    return {
        name: tuple(loss if np.isfinite(loss) else float("inf") for loss in row)
        for name, row in stated.items()
        if np.isfinite(row).any()
    }
