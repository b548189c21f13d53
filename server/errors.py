"""What a person asked for and cannot have."""

from __future__ import annotations

from coterie.strategies.errors import EXIT_CONFIG, FederationError


def refused(text: str) -> FederationError:
    """The error of a command that ends with status 2: its text says what to do instead."""
    return FederationError(text, phase="configuration", exit_code=EXIT_CONFIG)
