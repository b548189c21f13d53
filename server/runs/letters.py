"""Letters of groups, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, product
from string import ascii_uppercase


def alphabet() -> Iterator[str]:
    """Yield A, B, …, Z, AA, AB, …"""
    return ("".join(word) for n in count(1) for word in product(ascii_uppercase, repeat=n))


def letters_of(groups: Iterable[Iterable[str]]) -> dict[str, str]:
    """Return silo → letter of its group; empty for a silo that is alone.

    Groups of several silos have letters in the order of their first members.
    """
    letters, found = alphabet(), dict[str, str]()
    for group in sorted(map(sorted, groups)):
        found |= dict.fromkeys(group, next(letters) if len(group) > 1 else "")
    return found
