"""What a message that does not follow this package raises."""

from __future__ import annotations

from coterie.wire.limits import plain_text


class WireError(ValueError):
    """A message that does not follow this module. Says what was expected, in one plain line."""

    def __init__(self, text: str) -> None:
        super().__init__(plain_text(text))
