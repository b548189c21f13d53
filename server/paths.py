"""Files and folders that a user names, and those that are meant where nobody names one."""

from __future__ import annotations

import os
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


def default_home() -> Path:
    """``$COTERIE_HOME``, by default ``~/.coterie``. Absolute: other processes are told of it.

    Raises:
        FederationError: neither is there.
    """
    named = os.environ.get("COTERIE_HOME")
    if named:
        return place(named).absolute()
    try:
        return Path.home() / ".coterie"
    except RuntimeError:
        raise refused(
            "this account has no home folder to keep coterie's files in. Set COTERIE_HOME to a "
            "folder that it may write to."
        ) from None


def default_runs_dir() -> Path:
    """``$COTERIE_RUNS``, else ``$COTERIE_HOME/runs``, by default ``~/.coterie/runs``."""
    if os.environ.get("COTERIE_RUNS"):
        return place(os.environ["COTERIE_RUNS"]).absolute()
    return default_home() / "runs"
