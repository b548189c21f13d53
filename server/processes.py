"""Processes of this machine: who descends from whom, and how much memory they take.

Both are read from Linux's /proc; elsewhere there are no descendants and no memory is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["family", "proportional_memory"]


def family(pids: Sequence[int]) -> set[int]:
    """These processes and all that descend from them."""
    if not Path("/proc").is_dir():
        return set(pids)
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = set(pids)
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def proportional_memory(pid: int) -> int:
    """Bytes of a process's memory, pages shared by n processes counted as 1/n; 0 if it ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it ended meanwhile
    return 0
