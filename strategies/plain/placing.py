"""Placement of newcomers: one training from a remembered model, compared with the groups'.

Shared by algorithms that formed their groups from updates of one round and remember, for every
group, the mean of its members' updates and the model that they all started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie import wire
from coterie.strategies.partition._check import FloatArray
from coterie.strategies.partition.clustering import Metric
from coterie.strategies.partition.clustering import distances as distances_of
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.algorithm import Order, Update, Updates
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.models import comparable, difference, plain_mean
from coterie.strategies.rounds.options import Config, Scalar
from coterie.strategies.rounds.roster import Silo

PLACE = "place"
"""Purpose of a newcomer's training."""


def compared(update: Update) -> Arrays:
    """Return what a training changed, parameters only."""
    delta = difference(update.model, update.start)
    return comparable(delta, similarity="parameters", buffers=update.silo.buffers)


def gram_of(updates: Updates) -> FloatArray:
    """Return the inner products of what their trainings changed, corrected for known noise."""
    changed = [compared(update) for update in updates]
    noise = [update.noise_in(own) for update, own in zip(updates, changed, strict=True)]
    return gram([list(own.values()) for own in changed], noise=noise)


def constant_lr(config: Config, number: int) -> dict[str, Scalar]:
    """Return entries that fix the learning rate at that of round ``number``."""
    if wire.LR not in config:
        return {}
    decay = float(config.get(wire.LR_DECAY, 1.0))
    return {wire.LR: float(config[wire.LR]) * decay ** (number - 1), wire.LR_DECAY: 1.0}


@dataclass(frozen=True)
class Direction:
    """A group's mean update in a round, and the expected squared norm of the noise in it."""

    mean: Arrays
    noise: float


def direction_of(updates: Updates) -> Direction:
    changed = [compared(update) for update in updates]
    noise = sum(update.noise_in(own) for update, own in zip(updates, changed, strict=True))
    return Direction(plain_mean(changed), noise / len(updates) ** 2)


def placing_order(silo: Silo, model: Model, config: Config, *, formed: int, step: int = 0) -> Order:
    """Return an order to train once from a remembered model.

    ``formed`` is the round of the updates with which it is compared.
    """
    purpose = f"{PLACE}-{step}" if step else PLACE
    return Order(silo, model, purpose=purpose, config=config, beside=(formed, ""))


def nearest(update: Update, directions: Sequence[Direction], *, metric: Metric) -> int:
    """Return the index of the direction nearest to an update; the first of ties."""
    own = compared(update)
    rows = [list(part.values()) for part in (own, *(one.mean for one in directions))]
    noise = [update.noise_in(own), *(one.noise for one in directions)]
    return int(np.argmin(distances_of(gram(rows, noise=noise), metric=metric)[0, 1:]))
