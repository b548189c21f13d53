"""What a message that does not follow this package raises."""

from __future__ import annotations


class WireError(ValueError):
    """A message that does not follow this module. Says what was expected."""
