"""Silos that are connected and do not answer in time: each keeps everybody waiting."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.replies import Checked

MISSES = 2
"""Rounds in a row in which a silo may keep the others waiting; then it is not asked for a while."""


@dataclass(frozen=True)
class Absences:
    """Who did not answer in time, and who rests for it.

    After ``MISSES`` rounds in a row a silo is not asked for two rounds; if it misses the next one
    too, for four, and so on. An answer in time clears it.

    Attributes:
        missed: silo → rounds in a row in which it was asked and did not answer.
        until: silo → the first round in which it is asked again, of those that rest or rested.
    """

    missed: Mapping[str, int] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)

    def resting(self, names: Collection[str], number: int) -> dict[str, str]:
        """Silo → why it is not asked in this round; nobody rests where nobody would be left."""
        rest = sorted(name for name in names if self.until.get(name, 0) > number)
        if len(rest) == len(names):
            return {}
        return {
            name: f"it did not answer in {self.missed[name]} rounds in a row, so it is asked "
            f"again in round {self.until[name]}."
            for name in rest
        }

    def after(
        self,
        orders: Sequence[Order],
        checked: Checked,
        number: int,
        *,
        silent_otherwise: Collection[str] = (),
    ) -> Absences:
        """With what this round showed of those who were asked, for their training or otherwise."""
        silent = {order.silo.name for order, why in checked.failed if why.silent}
        silent |= set(silent_otherwise)
        asked = {order.silo.name for order in orders} | silent
        missed = {name: times for name, times in self.missed.items() if name not in asked}
        until = {name: first for name, first in self.until.items() if name not in asked}
        for name in sorted(silent):
            missed[name] = self.missed.get(name, 0) + 1
            if missed[name] >= MISSES:
                until[name] = number + 1 + 2 ** (missed[name] - MISSES + 1)
        return Absences(missed, until)
