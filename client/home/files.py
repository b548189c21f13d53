"""The path of a silo's folder, and the names of files in it that several modules use."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "COTERIE_SILO"
"""The environment variable with the silo's folder, for commands without ``--home``."""

LEDGER = "ledger.jsonl"
"""The record of everything that left the silo."""
CONTACT = "contact"
"""Its modification time is the last contact with the coordinator."""


def folder_of(given: Path | None) -> Path:
    """Return the given folder, else ``$COTERIE_SILO``, else the current one."""
    return given or Path(os.environ.get(ENVIRONMENT) or ".")
