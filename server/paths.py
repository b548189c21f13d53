"""Files and folders named by the user, and their defaults."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from coterie.strategies.errors import refused
from coterie.tasks.base import TaskError
from coterie.tasks.options import place_of

ENVIRONMENT = "COTERIE_FEDERATION"
"""Variable that names a federation's folder, for the ServerApp and commands without an option."""


def place(named: str | Path) -> Path:
    """Expand a path that a user names. Raises ``FederationError`` for an unknown ``~user``."""
    try:
        return place_of(str(named))
    except TaskError as error:
        raise refused(str(error)) from None


def with_federation(command: str, folder: Path) -> str:
    """Return a command line with ``--federation``, if a folder is a federation's or its run's."""
    folder = folder.resolve()
    for made in (folder, folder.parent.parent):
        if (made / "coterie.toml").exists():
            return f"{command} --federation {shlex.quote(str(made))}"
    return command


def default_home() -> Path:
    """Return ``$COTERIE_HOME``, by default ``~/.coterie``; absolute, for other processes.

    Raises ``FederationError`` if neither exists.
    """
    named = os.environ.get("COTERIE_HOME")
    if named:
        return place(named).absolute()
    try:
        return Path.home() / ".coterie"
    except RuntimeError:
        raise refused(
            "this account has no home folder to keep coterie's files in. Set COTERIE_HOME to a "
            "writable folder."
        ) from None


def default_runs_dir() -> Path:
    """Return ``$COTERIE_RUNS``, else ``$COTERIE_HOME/runs``, by default ``~/.coterie/runs``."""
    if os.environ.get("COTERIE_RUNS"):
        return place(os.environ["COTERIE_RUNS"]).absolute()
    return default_home() / "runs"
