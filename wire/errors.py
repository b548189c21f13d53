"""The error for messages that do not follow this package."""

from __future__ import annotations

from coterie.wire.limits import plain_text


class WireError(ValueError):
    """A message does not follow this package. The text says in one line what was expected."""

    def __init__(self, text: str) -> None:
        super().__init__(plain_text(text))
