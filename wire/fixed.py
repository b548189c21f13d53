"""Numbers as integers of several words, so that masked ones add up exactly.

An integer is modulo 2^(64 w), in units of 2^-places; w words of 64 bits, the lowest first. The sum
of such integers depends on no order, and masks that are drawn evenly hide it completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.wire.errors import WireError

Words = NDArray[np.uint64]
"""(w, n): the words of n integers, the lowest first."""
MOST_SUMMED: Final = 1024
"""Most silos of a sum."""
WORD: Final = 2.0**64


@dataclass(frozen=True)
class Fixed:
    """A format of summed numbers, the same at all silos.

    Attributes:
        words: of an integer, 64 bits each.
        places: binary places after the point.
        largest: absolute value of a silo's number. ``MOST_SUMMED`` such numbers do not overflow.
    """

    words: int
    places: int
    largest: float

    def __post_init__(self) -> None:
        assert self.largest * MOST_SUMMED * 2.0**self.places < 2.0 ** (64 * self.words - 1)

    def encode(self, numbers: NDArray[np.float64]) -> Words:
        """Return numbers (n,), rounded to the last place.

        Raises:
            ValueError: one is not finite, or above ``largest``.
        """
        if numbers.size and not np.abs(numbers).max() <= self.largest:  # NaN is not
            raise ValueError(f"has numbers that are not finite, or above {self.largest:g}")
        found = np.empty((self.words, numbers.size), np.uint64)
        rest = np.rint(np.abs(numbers) * 2.0**self.places)
        for place in reversed(range(self.words)):
            whole = np.floor(rest * WORD**-place)
            found[place] = whole.astype(np.uint64)
            rest -= whole * WORD**place  # exact: what is left are lower bits of the same number
        return _negated(found, numbers < 0)

    def decode(self, words: Words) -> NDArray[np.float64]:
        """Return the numbers (n,)."""
        negative = words[-1] >> np.uint64(63) > 0
        absolute = _negated(words.copy(), negative)
        found = np.zeros(words.shape[1])
        for place in reversed(range(self.words)):
            found += absolute[place] * WORD**place * 2.0**-self.places
        return np.where(negative, -found, found)

    def receive(self, sent: NDArray[Any] | None, count: int) -> Words:
        """Return the words of ``count`` integers that came as ``as_sent``.

        Raises:
            WireError: they are something else.
        """
        size = 2 * self.words * count
        if sent is None or sent.shape != (size,) or sent.dtype != np.uint32:
            raise WireError(f"its masked answer must be {size:,} numbers of type uint32.")
        return sent.astype("<u4").view("<u8").reshape(self.words, count).astype(np.uint64)


def as_sent(words: Words) -> NDArray[np.uint32]:
    """Return words as they travel: half words (2 w n,), the lower half of each first."""
    return np.ascontiguousarray(words, "<u8").view("<u4").reshape(-1).astype(np.uint32)


SUMS: Final = Fixed(words=8, places=160, largest=1e100)
HISTOGRAMS: Final = Fixed(words=2, places=64, largest=1e15)


def add(total: Words, other: Words) -> None:
    """Add to a total, in place."""
    carry = np.zeros(total.shape[1], np.bool_)
    for into, more in zip(total, other, strict=True):
        into += more
        over = into < more
        into += carry
        carry = over | (carry & (into == 0))


def subtract(total: Words, other: Words) -> None:
    """Subtract from a total, in place."""
    borrow = np.zeros(total.shape[1], np.bool_)
    for into, less in zip(total, other, strict=True):
        under = into < less
        into -= less
        under |= borrow & (into == 0)
        into -= borrow
        borrow = under


def total_of(parts: Sequence[Words]) -> Words:
    """Return the sum of parts."""
    first, *others = parts
    total = first.copy()
    for other in others:
        add(total, other)
    return total


def _negated(words: Words, where: NDArray[np.bool_]) -> Words:
    """Return words with the integers negated at some places."""
    if where.any():
        negated = np.zeros((len(words), int(where.sum())), np.uint64)
        subtract(negated, words[:, where])
        words[:, where] = negated
    return words
