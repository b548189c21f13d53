"""The coordinator's part of consensus: the factor on the length of the silos' steps.

Consensus converges for every length, but slowly if the length does not fit the data. So the primal
and the dual residual are kept of one size (Boyd et al. 2011, §3.4.1, with the relative residuals
and the square root of Wohlberg 2017, https://arxiv.org/abs/1704.06209). Each silo reports their
ratio; the median over silos moves the factor, so that no few silos can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, sqrt
from typing import ClassVar

import numpy as np

from coterie import wire
from coterie.features.consensus import MOST_FACTOR
from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.stage import Came, Scene, Stage

MOST = 2.0
"""Largest change of the factor in a round."""


class Consensus(Stage):
    """The stage for linear models of groups; it remembers the factor."""

    name = "consensus"
    first: ClassVar[float] = 1.0

    def outgoing(self, mine: float, scene: Scene, orders: Sequence[Order]) -> list[Order]:
        """Tell silos that train the factor."""
        if not scene.training:
            return list(orders)
        return [
            replace(order, config={**order.config, wire.CONSENSUS: mine})
            if order.kind == wire.TRAIN and order.silo.described
            else order
            for order in orders
        ]

    def incoming(self, mine: float, scene: Scene, came: Came) -> tuple[float, Came]:
        """Lengthen the steps if the dual residuals are the larger ones, and shorten them if not."""
        found = [u.metrics.get(wire.CONSENSUS_BALANCE, 0.0) for u in came.checked.updates]
        ratios = [ratio for ratio in found if isfinite(ratio) and ratio > 0]
        if ratios:
            change = min(max(sqrt(float(np.median(ratios))), 1 / MOST), MOST)
            mine = min(max(mine * change, 1 / MOST_FACTOR), MOST_FACTOR)
        return mine, came
