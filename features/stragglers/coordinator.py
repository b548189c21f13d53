"""Silos that are connected but do not answer in time, so that all others wait.

A silo may not use up every deadline either. The time that one silo alone costs the others, from the
last reply but one to its own, is added up over the run. A silo that is slow because it has much to
train is waited for; one that is many times slower than every other silo is asked less often, as
soon as it has cost as much as a silent silo may.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.replies import Checked
from coterie.strategies.rounds.stage import Outcome, Played, Room, Stage

MISSES = 2
"""Consecutive rounds in which a silo may keep the others waiting before it is skipped."""
TIMES = 8
"""A wait for one silo alone is not counted up to this multiple of the time until all others had
answered: silos differ in size and hardware."""
UNCOUNTED_S = 10.0
"""Seconds of a wait that are never counted, for very short rounds."""


@dataclass
class Waits:
    """How long the others waited for one silo alone since the previous round's training.

    ``over``: silo → counted seconds. ``uncounted``: seconds of these exchanges that are not
    counted.
    """

    over: dict[str, float] = field(default_factory=dict)
    uncounted: float = 0.0

    def note(self, seconds: Mapping[str, float]) -> None:
        """Add one exchange: silo → seconds until it answered or was given up.

        With only two silos it is unclear whether one is slow or the other fast.
        """
        if len(seconds) < 3:
            return
        *_, others, last = sorted(seconds, key=lambda name: seconds[name])
        most = max(TIMES * seconds[others], UNCOUNTED_S)
        self.uncounted += most
        if seconds[last] > most:
            self.over[last] = self.over.get(last, 0.0) + seconds[last] - most


@dataclass(frozen=True)
class Absences:
    """Silos that did not answer in time, and those that are skipped for it.

    After ``MISSES`` rounds in a row a silo is not asked for two rounds; if it misses the next one
    too, for four, and so on. An answer in time clears it. Over the whole run the others wait for
    one silo alone as long as for ``MISSES`` rounds without an answer; each further wait is then
    followed by enough skipped rounds that a run takes at most ``TIMES`` times longer for it.

    Attributes:
        missed: silo → rounds in a row in which it was asked and did not answer.
        until: silo → the first round in which it is asked again.
        overtime: silo → counted seconds in which the others waited for it alone.
    """

    missed: Mapping[str, int] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)
    overtime: Mapping[str, float] = field(default_factory=dict)

    def resting(self, names: Collection[str], number: int) -> dict[str, str]:
        """Return silo → why it is skipped in this round; empty if no silo would be left."""
        rest = sorted(name for name in names if self.until.get(name, 0) > number)
        if len(rest) == len(names):
            return {}
        return {name: f"{self._why(name)} again in round {self.until[name]}." for name in rest}

    def _why(self, name: str) -> str:
        if self.missed.get(name, 0) >= MISSES:
            return f"it did not answer in {self.missed[name]} rounds in a row; it is asked"
        return (
            f"in this run all other silos waited {self.overtime[name]:.0f} s only for it, more "
            f"than {MISSES} times round-timeout; it is asked"
        )

    def after(
        self,
        orders: Sequence[Order],
        checked: Checked,
        number: int,
        *,
        silent_otherwise: Collection[str] = (),
        waits: Waits | None = None,
        deadline_s: float = math.inf,
    ) -> Absences:
        """Return the absences after a round.

        Args:
            silent_otherwise: silos that did not answer something else.
            waits: of all exchanges since the training of the previous round.
            deadline_s: seconds, for every exchange.
        """
        silent = {order.silo.name for order, why in checked.failed if why.silent}
        silent |= set(silent_otherwise)
        asked = {order.silo.name for order in orders} | silent
        missed = {name: times for name, times in self.missed.items() if name not in asked}
        until = {name: first for name, first in self.until.items() if name not in asked}
        for name in sorted(silent):
            missed[name] = self.missed.get(name, 0) + 1
            if missed[name] >= MISSES:
                until[name] = number + 1 + 2 ** (missed[name] - MISSES + 1)
        overtime, waits = dict(self.overtime), waits or Waits()
        for name, seconds in sorted(waits.over.items()):
            overtime[name] = overtime.get(name, 0.0) + seconds
            if overtime[name] > MISSES * deadline_s:
                rest = math.ceil(seconds / waits.uncounted)
                until[name] = max(until.get(name, 0), number + 1 + rest)
        return Absences(missed, until, overtime)


class Stragglers(Stage):
    """Ask silos that keep the others waiting less often."""

    name = "stragglers"
    first = Absences()

    def admit(self, mine: Absences, room: Room) -> tuple[Absences, Room]:
        """Let stragglers rest in this round."""
        resting = mine.resting([silo.name for silo in room.labelled], room.number)
        return mine, replace(room, resting={**room.resting, **resting})

    def after(self, mine: Absences, played: Played) -> tuple[Absences, Outcome]:
        """Count who was silent or slow in this round."""
        waits = Waits()
        for seconds in played.seconds:
            waits.note(seconds)
        after = mine.after(
            *(played.came.orders, played.came.checked, played.now.number),
            silent_otherwise=played.silent,
            waits=waits,
            deadline_s=played.deadline_s,
        )
        return after, Outcome()
