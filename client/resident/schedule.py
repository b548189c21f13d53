"""Which silo of a process is dialled or asked for a message next, and when.

A silo in the middle of a run is asked often, one that waits for hours hardly ever. Where the
SuperLink says when there is a message (``rest``, ``word``), it is asked then. The threads of a
``Host`` share one schedule and do what ``take`` gives them, then say what came of it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable
from threading import Condition
from typing import Generic, TypeVar

IDLE_SHARE = 0.05
"""The pause between two looks at one silo, as a share of the time since its process last had work:
the delay that waiting adds stays below this share of a round."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.004, 1.0
REST_S = 35.0
"""Pause while a call waits at the SuperLink: longer than that may take, until its deadline."""
IN_VAIN = 3
"""So often in a row a silo looks at once for a message that was told, and is not there."""
LOOK_SHARE = 0.05
"""Share of one thread's time that the looks at further silos may take while there is no work."""
DIAL_PAUSE_S, MAX_DIAL_PAUSE_S = 0.25, 5.0
"""Pause after the first failed attempt to connect; it doubles with each further one."""

Silo = TypeVar("Silo")


class Schedule(Generic[Silo]):
    """The turns of silos that share a process and a SuperLink; safe to use from several threads.

    Args:
        silos: none of them connected yet.
    """

    def __init__(self, silos: Iterable[Silo]) -> None:
        self._to_dial = deque(silos)
        self._to_look: deque[Silo] = deque()
        self._num_silos = len(self._to_dial)
        self._num_connected = 0
        self._next_dial = self._next_look = 0.0
        self._dial_pause = DIAL_PAUSE_S
        self._misses = 0  # looks in a row that found no message
        self._look_s = 0.001  # how long such a look takes, on average
        self._in_vain = 0  # words in a row, before their time, that no message followed
        self._last_work = self._last_contact = time.monotonic()
        self._stopped = False
        self._changed = Condition()

    def take(self) -> Silo | None:
        """The silo whose turn it is, when it is time; None once ``stop`` was called."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                if self._to_dial and now >= self._next_dial:
                    return self._to_dial.popleft()
                if self._to_look and now >= self._next_look:
                    self._next_look = now + self._pause(now)
                    return self._to_look.popleft()
                self._changed.wait(self._seconds_to_next(now))
        return None

    def stop(self) -> None:
        """End every wait. May be called by a signal handler."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def connected(self, silo: Silo) -> bool:
        """It was dialled and answered; returns whether now all are connected."""
        with self._changed:
            self._num_connected += 1
            self._next_dial, self._dial_pause = 0.0, DIAL_PAUSE_S
            self._last_work = self._last_contact = time.monotonic()
            self._give_back(silo)
            return self._num_connected == self._num_silos

    def returned(self) -> None:
        """A connection that was lost, and was not given up, goes on."""
        with self._changed:
            self._num_connected += 1
            self._next_dial, self._dial_pause = 0.0, DIAL_PAUSE_S
            self._last_contact = time.monotonic()

    def worked(self, silo: Silo) -> None:
        """There was a message. Those of a round come together: the others' turns come at once."""
        with self._changed:
            self._misses = self._in_vain = 0
            self._last_work = self._last_contact = time.monotonic()
            self._give_back(silo)

    def missed(self, silo: Silo, *, seconds: float) -> None:
        """There was no message; to look took so long."""
        with self._changed:
            self._misses += 1
            self._look_s += 0.1 * (seconds - self._look_s)
            self._last_contact = time.monotonic()
            self._to_look.append(silo)
            self._changed.notify_all()

    def rest(self) -> None:
        """Of a process of one silo: no look until ``word``, or for ``REST_S``."""
        with self._changed:
            self._next_look = time.monotonic() + REST_S

    def word(self, *, told: bool, early: bool) -> None:
        """What was waited for in ``rest`` is over.

        Args:
            told: there may be a message; otherwise it goes on as if nobody could tell.
            early: before the time was up. Who says so again and again, and has nothing, is not
                believed until the next message.
        """
        with self._changed:
            believed = told and self._in_vain < IN_VAIN
            self._in_vain += told and early
            pause_s = 0.0 if believed else self._own_pause(time.monotonic())
            self._next_look = time.monotonic() + pause_s
            self._changed.notify_all()

    def failed(self, silo: Silo, *, was_connected: bool) -> tuple[float, bool]:
        """Its connection was lost or could not be opened.

        All dial the same SuperLink: what holds for one holds for the others for a while. Returns
        the seconds since it last answered any of them, and whether that is news: another silo's
        failure a moment ago may have said the same already.
        """
        with self._changed:
            now = time.monotonic()
            if was_connected:
                self._num_connected -= 1
                self._last_contact = now
            new = now >= self._next_dial
            if new:
                # Jitter: silos that lost the same SuperLink should not all return in one instant.
                self._next_dial = now + self._dial_pause * random.uniform(0.7, 1.3)
                self._dial_pause = min(2 * self._dial_pause, MAX_DIAL_PAUSE_S)
            self._to_dial.append(silo)
            self._changed.notify_all()
            return now - self._last_contact, new

    def _give_back(self, silo: Silo) -> None:
        self._next_look = 0.0
        self._to_look.append(silo)
        self._changed.notify_all()

    def _pause(self, now: float) -> float:
        """From this look to the next one, at any silo.

        After a message all silos are looked at once without a pause. Without work they are looked
        at one after the other, as often as their process's idleness and ``LOOK_SHARE`` allow.
        """
        if self._misses + 1 < self._num_silos:
            return 0.0
        own = self._own_pause(now)
        others = (1 - 1 / self._num_silos) * self._look_s / LOOK_SHARE
        return self._look_s + max(own / self._num_silos, others)

    def _own_pause(self, now: float) -> float:
        return min(max(IDLE_SHARE * (now - self._last_work), MIN_PAUSE_S), MAX_PAUSE_S)

    def _seconds_to_next(self, now: float) -> float | None:
        """None where another thread has to give a silo back first."""
        due = [self._next_dial] if self._to_dial else []
        due += [self._next_look] if self._to_look else []
        return min(due) - now if due else None
