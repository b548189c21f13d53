"""The pauses of an engine that has to look for replies again and again."""

from __future__ import annotations

import time

SHARE = 0.02
"""A pause as a share of the time waited so far: a round of a second is answered within 20 ms, and a
round of an hour costs the SuperLink next to nothing."""
MIN_S, MAX_S = 0.005, 1.0
LOOKS_SHARE = 0.25
"""Largest share of the time spent on looks that return nothing: asking for a thousand messages
takes capacity that the SuperLink needs to forward them."""


class Pauses:
    """A pause before each look but the first after messages were sent."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Messages were sent."""
        self._since, self._first, self._in_vain_s = time.monotonic(), True, 0.0

    def rest(self, most_s: float, *, held: bool = False) -> None:
        """Pause for at most ``most_s`` seconds.

        Where the SuperLink holds looks (``held``), pause only after one that it answered at once.
        """
        if not self._first:
            waited_s = time.monotonic() - self._since
            pause = max(SHARE * waited_s, MIN_S, self._in_vain_s / LOOKS_SHARE)
            if held:
                pause = MIN_S if 0 < self._in_vain_s < MIN_S else 0.0
            time.sleep(min(pause, MAX_S, max(most_s, 0.0)))
        self._first = False

    def looked(self, seconds: float, *, found: bool) -> None:
        """A look took so long."""
        self._in_vain_s = 0.0 if found else seconds
