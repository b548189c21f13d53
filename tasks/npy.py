"""Numpy's files, whose arrays are added up before any of them is read.

Deflated zeros take a thousandth of their size, so a file of megabytes can fill the memory.
"""

from __future__ import annotations

import math
import os
import resource
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

COPIES = 2
"""Times that arrays are in memory while samples are made of them."""


def read_npy(file: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return the array of an ``.npy`` file, or all arrays of an ``.npz`` file by name.

    Raises whatever numpy and zipfile make of damage; ``ValueError`` for pickled objects, and for
    arrays that do not fit into memory.
    """
    if not zipfile.is_zipfile(file):
        with file.open("rb") as opened:
            _check(_bytes_of(opened), file)
        array: NDArray[Any] = np.load(file, allow_pickle=False)
        return array
    with zipfile.ZipFile(file) as packed:
        sizes = []
        for name in packed.namelist():
            with packed.open(name) as opened:
                sizes.append(_bytes_of(opened))
    _check(sum(sizes), file)
    with np.load(file, allow_pickle=False) as loaded:
        return {name: loaded[name] for name in loaded.files}


def room() -> int:
    """Return the bytes that this process may use, about: of machine, container and limit."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    if own != resource.RLIM_INFINITY:
        found.append(own)
    with suppress(OSError, ValueError):  # "max" is no number
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")))
    return min(found)


def _check(num_bytes: int, file: Path) -> None:
    left = room()
    if COPIES * num_bytes > left:
        raise ValueError(
            f"its arrays have {num_bytes / 1e9:,.1f} GB and need {COPIES} times as much memory, of "
            f"which {left / 1e9:,.1f} GB can be used. Give this process more, or split them"
        )


def _bytes_of(opened: IO[bytes]) -> int:
    """Return the size of an array, read from its header.

    Raises ``ValueError`` for a member of an archive that is not an array: numpy would unpack it
    whole and return its bytes.
    """
    version = npy.read_magic(opened)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(opened)
    return math.prod(shape) * int(dtype.itemsize)
