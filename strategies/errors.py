"""The one error of a federation: what went wrong, where, and with which exit code."""

from __future__ import annotations

EXIT_CONFIG = 2
EXIT_RUN = 3
EXIT_NO_SILOS = 4
EXIT_LINK = 5


class FederationError(RuntimeError):
    """A run cannot go on.

    Attributes:
        round: the round in which it happened, 0 before the first.
        silo: the silo concerned, or empty.
        phase: what was being done, e.g. ``train``.
        exit_code: what a command should exit with.
    """

    def __init__(
        self,
        text: str,
        *,
        round_number: int = 0,
        silo: str = "",
        phase: str = "",
        exit_code: int = EXIT_RUN,
    ) -> None:
        super().__init__(text)
        self.round, self.silo, self.phase = round_number, silo, phase
        self.exit_code = exit_code


def refused(text: str, phase: str = "configuration") -> FederationError:
    """The error of what a person asked for and cannot have: a command ends with status 2."""
    return FederationError(text, phase=phase, exit_code=EXIT_CONFIG)
