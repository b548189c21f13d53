"""Numbers of 16 bits, worked on by their bits, and in parts that stay in the processor's cache.

numpy casts them one by one, at 3 ns each, and takes 14 ns to compare two. Their bits it takes many
at a time. Subnormal numbers are exact as well: a product with a power of two is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PART = 2**16
"""Numbers that are worked on at a time: what is made of them on the way stays in the cache."""
INFINITE: Final = 0x7C00
"""The bits of an infinite number; those of NaN are beyond."""
_SIGN, _MORE = 0x8000, 127 - 15
"""The bit of the sign, and by how much float32 adds more to exponents."""
_KEPT = ~(0x7 << 28)
"""All bits but those between the sign and an exponent of 16 bits."""
_SMALLEST = (_MORE + 1) << 23
"""float32's bits of the smallest normal number."""


def parts(size: int) -> Iterator[slice]:
    """Of a flat array, one behind the other."""
    for begin in range(0, size, PART):
        yield slice(begin, min(begin + PART, size))


def widened(array: NDArray[Any], within: NDArray[np.float32] | None = None) -> NDArray[Any]:
    """Numbers of 16 bits in float32, each as it is; all others as they came.

    Args:
        array: of any shape.
        within: flat memory in which they may lie, of at least as many; None: new.
    """
    if array.dtype != np.float16:
        return array
    flat = array.reshape(-1)
    wide = np.empty(flat.size, np.float32) if within is None else within[: flat.size]
    for part in parts(flat.size):
        widen(flat[part], wide[part])
    return wide.reshape(array.shape)


def widen(numbers: NDArray[np.float16], into: NDArray[np.float32]) -> None:
    """The same of a part, flat, into memory that is there."""
    bits = numbers.view(np.int16)
    if max(bits.max(initial=0), int(bits.view(np.uint16).max(initial=0)) - _SIGN) >= INFINITE:
        into[...] = numbers
        return
    made = into.view(np.int32)
    np.copyto(made, bits)  # the sign in every bit that is new
    made <<= 13
    made &= np.int32(_KEPT)
    into *= np.float32(2.0**_MORE)


def narrow(numbers: NDArray[np.float32], into: NDArray[np.float16]) -> None:
    """The nearest numbers of 16 bits, of two the even one, of a part none of which is beyond
    them."""
    bits = numbers.view(np.uint32)
    size = bits & np.uint32(2**31 - 1)
    made = size >> 13
    made &= np.uint32(1)
    made += size
    made += np.uint32(2**32 - (_MORE << 23) + 2**12 - 1)  # which goes round
    made >>= 13
    is_small = size < _SMALLEST
    if is_small.any():
        # The sum has the last bits of a subnormal number where float32 rounds, to the nearest.
        small = (size.view(np.float32) + np.float32(0.5)).view(np.uint32)
        small -= np.float32(0.5).view(np.uint32)
        np.copyto(made, small, where=is_small)
    made |= (bits >> 16) & np.uint32(_SIGN)
    into.view(np.uint16)[...] = made


def largest_of(array: NDArray[Any]) -> float:
    """The largest size of a number, NaN or infinity where there is one; 0 of none."""
    if not array.size:
        return 0.0
    if array.dtype != np.float16:
        return max(float(array.max()), -float(array.min()))
    flat = array.reshape(-1).view(np.uint16)
    most = max(int((flat[part] & np.uint16(_SIGN - 1)).max()) for part in parts(flat.size))
    return float(np.uint16(most).view(np.float16))
