"""The turns of a process's silos: which one is dialled or polled next, and when.

A silo in the middle of a run is polled often, one that waits for hours rarely. If the SuperLink
announces messages (``rest``, ``word``), it is polled then. The threads of a ``Host`` share one
schedule; they act on what ``take`` returns, and report the outcome.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable
from threading import Condition
from typing import Generic, TypeVar

IDLE_SHARE = 0.05
"""Pause between polls of a silo, relative to its idle time; so polling delays a round by less."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.004, 1.0
REST_S = 35.0
"""Pause while a call waits at the SuperLink: longer than that call's deadline."""
IN_VAIN = 3
"""Early announcements without a message, in a row, after which they are ignored."""
LOOK_SHARE = 0.05
"""Share of one thread's time for polling further silos while there is no work."""
DIAL_PAUSE_S, MAX_DIAL_PAUSE_S = 0.25, 5.0
"""Pause after the first failed attempt to connect; it doubles with each further one."""

Silo = TypeVar("Silo")


class Schedule(Generic[Silo]):
    """The turns of silos that share a process and a SuperLink; thread-safe."""

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
        """Wait for the next turn and return its silo; None once ``stop`` was called."""
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
        """Record that a silo was connected; return whether all are connected now."""
        with self._changed:
            self._num_connected += 1
            self._next_dial, self._dial_pause = 0.0, DIAL_PAUSE_S
            self._last_work = self._last_contact = time.monotonic()
            self._give_back(silo)
            return self._num_connected == self._num_silos

    def returned(self) -> None:
        """Record that a connection which was lost, but kept, works again."""
        with self._changed:
            self._num_connected += 1
            self._next_dial, self._dial_pause = 0.0, DIAL_PAUSE_S
            self._last_contact = time.monotonic()

    def worked(self, silo: Silo) -> None:
        """Record a message; all silos have a turn at once, as a round's messages come together."""
        with self._changed:
            self._misses = self._in_vain = 0
            self._last_work = self._last_contact = time.monotonic()
            self._give_back(silo)

    def missed(self, silo: Silo, *, seconds: float) -> None:
        """Record that there was no message, and how long the poll took."""
        with self._changed:
            self._misses += 1
            self._look_s += 0.1 * (seconds - self._look_s)
            self._last_contact = time.monotonic()
            self._to_look.append(silo)
            self._changed.notify_all()

    def rest(self) -> None:
        """Stop polling until ``word``, or for ``REST_S``; for a process of one silo."""
        with self._changed:
            self._next_look = time.monotonic() + REST_S

    def word(self, *, notified: bool, early: bool) -> None:
        """End what ``rest`` began; ``notified``: there may be one, ``early``: before time was up.

        After several early announcements without a message, they are ignored until the next
        message.
        """
        with self._changed:
            believed = notified and self._in_vain < IN_VAIN
            self._in_vain += notified and early
            pause_s = 0.0 if believed else self._own_pause(time.monotonic())
            self._next_look = time.monotonic() + pause_s
            self._changed.notify_all()

    def failed(self, silo: Silo, *, was_connected: bool) -> tuple[float, bool]:
        """Record that a connection was lost or could not be opened.

        All silos dial the same SuperLink, so one failure delays the others for a while. Return
        the seconds since it last answered any of them, and whether this is news: a moment ago
        another silo's failure may have shown the same.
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
        """Return the pause from this poll to the next one, of any silo.

        After a message all silos are polled once without a pause. Without work they are polled
        in turn, as often as their process's idleness and ``LOOK_SHARE`` allow.
        """
        if self._misses + 1 < self._num_silos:
            return 0.0
        own = self._own_pause(now)
        others = (1 - 1 / self._num_silos) * self._look_s / LOOK_SHARE
        return self._look_s + max(own / self._num_silos, others)

    def _own_pause(self, now: float) -> float:
        return min(max(IDLE_SHARE * (now - self._last_work), MIN_PAUSE_S), MAX_PAUSE_S)

    def _seconds_to_next(self, now: float) -> float | None:
        """Return the seconds to the next turn; None if a silo must be given back first."""
        due = [self._next_dial] if self._to_dial else []
        due += [self._next_look] if self._to_look else []
        return min(due) - now if due else None
