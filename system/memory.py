"""The C library's memory: models are megabytes, allocated and freed every round.

glibc maps each block above a threshold separately and unmaps it when it is freed, and the kernel
clears every page on first use: copying a model of 50 MB takes 40 ms, 35 of them for that. Kept
memory is ready for the next round's model; a process then stays at its largest size, up to
``KEPT_BYTES`` more than it needs.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

KEPT_BYTES = 2**30
"""Blocks up to this size use kept memory, and at most this much stays unused."""
SERVER_BYTES = 2**28
"""Unused memory that the SuperLink and the ServerApp keep: their models are elsewhere."""
GROWTH_BYTES = 2**26
"""The smallest growth of the kept memory."""

MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD, ARENA_MAX = -3, -1, -2, -8
"""Parameters of glibc's ``mallopt``. With one arena, threads reuse what others free."""


def keep_freed_memory(most: int = KEPT_BYTES) -> None:
    """Have this process keep up to ``most`` bytes of the memory that it frees; needs glibc."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        tune = ctypes.CDLL(None).mallopt
        tune(MMAP_THRESHOLD, KEPT_BYTES)
        tune(TRIM_THRESHOLD, most)
        tune(TOP_PAD, GROWTH_BYTES)
        tune(ARENA_MAX, 1)


def keeping_freed_memory() -> dict[str, str]:
    """Return environment variables that do the same for the SuperLink."""
    return {
        "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(SERVER_BYTES),
        "MALLOC_TOP_PAD_": str(GROWTH_BYTES),
        "MALLOC_ARENA_MAX": "1",
    }
