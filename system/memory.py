"""How the C library keeps memory: models are megabytes, made and let go every round.

glibc maps each block above a threshold anew and gives it back when it is freed, and the kernel
clears every page of it on first use: to copy a model of 50 MB takes 40 ms, of which 35 are that.
Kept, the pages are there for the next round's model. A process then stays as large as it was at
its largest, up to ``KEPT_BYTES`` more than it needs.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

KEPT_BYTES = 2**30
"""Blocks up to this size come from memory that is kept, and at most so much of it stays unused."""
SERVER_BYTES = 2**28
"""What the SuperLink and the ServerApp keep unused: their models lie elsewhere."""
GROWTH_BYTES = 2**26
"""By which the kept memory grows at least."""

MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD, ARENA_MAX = -3, -1, -2, -8
"""Of glibc's ``mallopt``. With one arena, what one thread frees another gets."""


def keep_freed_memory(most: int = KEPT_BYTES) -> None:
    """Have this process keep what it frees, at most so many bytes.

    Where the C library is not glibc, nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        tune = ctypes.CDLL(None).mallopt
        tune(MMAP_THRESHOLD, KEPT_BYTES)
        tune(TRIM_THRESHOLD, most)
        tune(TOP_PAD, GROWTH_BYTES)
        tune(ARENA_MAX, 1)


def keeping_freed_memory() -> dict[str, str]:
    """The same for the SuperLink, which is started with these variables."""
    return {
        "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(SERVER_BYTES),
        "MALLOC_TOP_PAD_": str(GROWTH_BYTES),
        "MALLOC_ARENA_MAX": "1",
    }
