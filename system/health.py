"""Findings of a health command, as lines for people and as an exit status for machines."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coterie.system.commandline import print_json

OK, WARNING, BAD = 0, 1, 2
"""Exit statuses: healthy; needs attention; broken, or soon will be."""
WORDS = ("ok", "warning", "bad")
LITTLE_DISK, NO_DISK = 2e9, 2e8
"""Free bytes below which the disk gives a warning, and below which it is bad."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: int
    what: str
    text: str


def report(findings: Iterable[Finding], *, as_json: bool = False) -> int:
    """Print the findings, one line each; return the worst level as the exit status."""
    worst, shown = OK, []
    for found in findings:
        worst = max(worst, found.level)
        shown.append({"check": found.what, "level": WORDS[found.level], "text": found.text})
        if not as_json:
            print(f"{WORDS[found.level]:8} {found.what:12} {found.text}", flush=True)
    if as_json:
        print_json(shown)
    return worst


def disk(folder: Path) -> Finding:
    """Check the free space on a folder's disk."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(BAD, "disk", f"{folder} cannot be checked: {error.strerror}")
    level = BAD if free < NO_DISK else WARNING if free < LITTLE_DISK else OK
    return Finding(level, "disk", f"{free / 1e9:.1f} GB free in {folder}")


def age_text(seconds: float) -> str:
    """Return a text for people: how long ago something was."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
