"""The one error of a federation: what went wrong, and with which exit code."""

from __future__ import annotations

EXIT_CONFIG = 2
EXIT_RUN = 3
EXIT_NO_SILOS = 4
EXIT_LINK = 5


class FederationError(RuntimeError):
    """A run cannot go on, or a command cannot be carried out and exits with ``exit_code``."""

    def __init__(self, text: str, *, exit_code: int = EXIT_RUN) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def refused(text: str) -> FederationError:
    """The error of what a person asked for and cannot have: a command ends with status 2."""
    return FederationError(text, exit_code=EXIT_CONFIG)
