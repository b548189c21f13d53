"""Files and folders that a user names."""

from __future__ import annotations

from pathlib import Path

from coterie.strategies.errors import refused
from coterie.tasks.base import TaskError, place_of


def place(named: str | Path) -> Path:
    """The file or folder that a user names.

    Raises:
        FederationError: it begins with ``~`` and somebody who has no home here.
    """
    try:
        return place_of(str(named))
    except TaskError as error:
        raise refused(str(error)) from None
