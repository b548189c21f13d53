"""Reused memory for models.

Writing a model into new memory costs several times its copy: the kernel clears every page, and a
virtual machine may have to ask its host for it. Memory that malloc frees is fragmented, so that the
next model does not fit and the process grows. So large blocks are allocated separately here, and
reused once nobody refers to them; after a minute unused they go back to the kernel. A process that
calls ``reuse_blocks`` packs models into blocks, and a silo receives into them; in others a packed
model is ``bytes``, as Flower's simulation sends it between processes.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from threading import Lock, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

FROM_BYTES = 2**20
"""The smallest model that gets a block."""
UNIT_BYTES = 2**20
"""Blocks are multiples of it, to fit the next model, whose head differs in length."""
WORTH_A_LOOK = 2**24
"""Bytes for which garbage is collected before new memory is allocated."""
KEPT_BYTES = 2**30
"""Unused blocks that are kept if none fits and new memory is allocated."""
UNUSED_S = 60.0
"""Seconds that unused blocks are kept for the next round; after a run a silo may be idle for
days."""


class Buffers:
    """Blocks of memory, free and in use. Thread-safe."""

    def __init__(self, kept: int = KEPT_BYTES, unused_s: float = UNUSED_S) -> None:
        self._kept, self._unused_s, self._lock = kept, unused_s, Lock()
        self._free: list[tuple[mmap, float]] = []
        """With the times at which they were given back, the longest unused first."""
        # The last reader may return a block at any moment, also within a call of ``take``.
        self._returned = deque[tuple[mmap, float]]()
        self._in_use, self._watched = 0, False

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a block of at least this size; it is reused when nobody refers to it any more.

        Raises:
            OSError: out of memory.
        """
        size = -(-max(size, 1) // UNIT_BYTES) * UNIT_BYTES
        block = self._found(size)
        if block is None and size >= WORTH_A_LOOK:
            gc.collect()  # an app may have left its last message in a circle of references
            block = self._found(size)
        if block is None:
            block = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        seen = np.frombuffer(block, np.uint8)
        with self._lock:
            self._in_use += 1
            if not self._watched:
                self._watched = True
                Thread(target=self._free_unused, name="unused memory", daemon=True).start()
        weakref.finalize(seen, self._give_back, block).atexit = False
        return seen

    def _give_back(self, block: mmap) -> None:
        self._returned.append((block, time.monotonic()))

    def _take_back(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
            self._in_use -= 1

    def _free_unused(self) -> None:
        while True:
            time.sleep(self._unused_s / 4)
            with self._lock:
                self._take_back()
                until = time.monotonic() - self._unused_s
                self._free = [one for one in self._free if one[1] > until]
                if not self._free and not self._in_use:
                    self._watched = False
                    return

    def _found(self, size: int) -> mmap | None:
        with self._lock:
            self._take_back()
            fits = [block for block, _ in self._free if size <= len(block) <= size + size // 4]
            block = min(fits, key=len, default=None)
            if block is not None:
                self._free = [one for one in self._free if one[0] is not block]
                return block
            while sum(len(free) for free, _ in self._free) > self._kept:
                del self._free[0]  # the longest unused
        return block


_blocks: Buffers | None = None


def reuse_blocks() -> None:
    """Have this process allocate models in blocks from now on."""
    global _blocks
    _blocks = _blocks or Buffers()


def block_of(size: int) -> NDArray[np.uint8] | None:
    """Return a block of at least this size; None if it is small, or this process reuses none."""
    if _blocks is None or size < FROM_BYTES:
        return None
    try:
        return _blocks.take(size)
    except OSError:
        return None


def joined(parts: Sequence[bytes | memoryview]) -> bytes | memoryview:
    """Join parts, copying each once."""
    size = sum(map(len, parts))
    block = block_of(size)
    if block is None:
        return b"".join(parts)
    at = 0
    for part in filter(len, parts):
        block[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return block.data[:size].toreadonly()


def empty(like: NDArray[Any], kind: type[np.generic] | None = None) -> NDArray[Any]:
    """Return an uninitialised array of the same shape, and of the same or another type."""
    dtype = np.dtype(kind or like.dtype)
    size = like.size * dtype.itemsize
    block = block_of(size)
    if block is None:
        return np.empty(like.shape, dtype)
    return block[:size].view(dtype).reshape(like.shape)
