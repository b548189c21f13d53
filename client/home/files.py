"""Where a silo's folder is, and names of files in it that several modules know."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "COTERIE_SILO"
"""The silo's folder, for commands that are not told one."""

LEDGER = "ledger.jsonl"
"""What left the silo."""
CONTACT = "contact"
"""As old as the last contact with the coordinator."""


def folder_of(given: Path | None) -> Path:
    """The folder given, else ``$COTERIE_SILO``, else the current one."""
    return given or Path(os.environ.get(ENVIRONMENT) or ".")
