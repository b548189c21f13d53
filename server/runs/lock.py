"""One process at a time writes a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.strategies.errors import FederationError
from coterie.system.files import LockedError, held_by, locked

DEADLINE_S = 60.0
"""How long to wait for the process before: one that lost its SuperLink needs some time to end."""


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Hold a run's folder; the lock ends with the process, however that ends.

    Raises:
        FederationError: another process holds it for longer than a minute.
    """
    try:
        with locked(folder, deadline_s=DEADLINE_S):
            yield
    except LockedError:
        raise FederationError(
            f"the run in {folder} is still going on, in process {held_by(folder)}. "
            "Stop that one first."
        ) from None
