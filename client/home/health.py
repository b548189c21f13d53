"""The checks of ``coterie silo health``, which need only the silo's folder."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from coterie.client.home.files import CONTACT, LEDGER
from coterie.system.files import UNKNOWN, held_by
from coterie.system.health import BAD, OK, WARNING, Finding, age_text, disk

SILENT_S, GONE_S = 60.0, 300.0
"""Seconds without contact that give a warning, and that are bad."""


def findings(folder: Path) -> Iterator[Finding]:
    yield _process(folder)
    yield _contact(folder)
    yield disk(folder)
    yield _ledger(folder)


def _process(folder: Path) -> Finding:
    holder = held_by(folder)
    if holder is None:
        line = f"coterie silo serve --home {shlex.quote(str(folder))}"
        return Finding(BAD, "process", f"no process serves {folder}: `{line}`")
    return Finding(OK, "process", "running" if holder == UNKNOWN else f"{holder}")


def _contact(folder: Path) -> Finding:
    try:
        age = time.time() - (folder / CONTACT).stat().st_mtime
    except OSError:
        return Finding(BAD, "contact", "never: the coordinator has not answered yet")
    level = BAD if age > GONE_S else WARNING if age > SILENT_S else OK
    return Finding(level, "contact", f"the coordinator last answered {age_text(age)}")


def _ledger(folder: Path) -> Finding:
    file = folder / LEDGER
    place = file if file.exists() else folder
    if not os.access(place, os.W_OK):
        return Finding(
            BAD, "ledger", f"{place} cannot be written; without it, nothing leaves the silo"
        )
    return Finding(OK, "ledger", f"{file} is writable")
