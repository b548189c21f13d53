"""Silos that are connected and do not answer in time: each keeps everybody waiting.

Nor may a silo use all of every deadline. What a silo alone costs the others is counted over the
run: the time from the last reply but one to its own. A silo that is slow because it has much to
train is waited for; one that is many times slower than every other silo is asked less often, as
soon as it has cost as much as a silo that is silent may.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.replies import Checked
from coterie.strategies.rounds.stage import Outcome, Played, Room, Stage

MISSES = 2
"""Rounds in a row in which a silo may keep the others waiting; then it is not asked for a while."""
TIMES = 8
"""For one silo alone the others wait so many times as long as it took until all of them had
answered, and nothing of it is counted: silos are of different sizes, on different machines."""
UNCOUNTED_S = 10.0
"""Nor is so much of a wait, where rounds take moments."""


@dataclass
class Waits:
    """For whom alone the others waited since a round's training before, and for how long.

    Attributes:
        over: silo → seconds beyond what is not counted.
        uncounted: seconds that are not, of all these exchanges.
    """

    over: dict[str, float] = field(default_factory=dict)
    uncounted: float = 0.0

    def note(self, seconds: Mapping[str, float]) -> None:
        """Of one exchange: silo → seconds until it had answered, or was given up.

        Of two nobody can tell whether one is slow or the other too quick.
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
    """Who did not answer in time, and who rests for it.

    After ``MISSES`` rounds in a row a silo is not asked for two rounds; if it misses the next one
    too, for four, and so on. An answer in time clears it. Over the whole run the others wait for
    one silo alone as long as for ``MISSES`` rounds without an answer; then each further wait is
    followed by so many rounds of rest that a run takes at most ``TIMES`` times longer for it.

    Attributes:
        missed: silo → rounds in a row in which it was asked and did not answer.
        until: silo → the first round in which it is asked again, of those that rest or rested.
        overtime: silo → seconds in which the others waited for it alone, of those that count.
    """

    missed: Mapping[str, int] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)
    overtime: Mapping[str, float] = field(default_factory=dict)

    def resting(self, names: Collection[str], number: int) -> dict[str, str]:
        """Silo → why it is not asked in this round; nobody rests where nobody would be left."""
        rest = sorted(name for name in names if self.until.get(name, 0) > number)
        if len(rest) == len(names):
            return {}
        return {name: f"{self._why(name)} again in round {self.until[name]}." for name in rest}

    def _why(self, name: str) -> str:
        if self.missed.get(name, 0) >= MISSES:
            return f"it did not answer in {self.missed[name]} rounds in a row, so it is asked"
        return (
            f"in this run the others have waited {self.overtime[name]:.0f} s for it alone, more "
            f"than {MISSES} times round-timeout, so it is asked less often:"
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
        """With what this round showed of those who were asked, for their training or otherwise.

        Args:
            orders, checked: of the round's training.
            number: of the round.
            silent_otherwise: who did not answer something else.
            waits: of all exchanges since the training of the round before.
            deadline_s: of an exchange.
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
