"""Blocks of silos for exact sums over rows: no difference of sums shows one silo.

An answer about the same rows is nearly the same in every run and to every question, so a silo binds
itself for ever: at its first sum over them to a block of silos. All silos of a block are in a sum,
or none is, so that sums, however they are combined, show no more than the sum over each block (So,
Ali, Güler, Jiao, Avestimehr: "Securing Secure Aggregation: Mitigating Multi-Round Privacy Leakage
in Federated Learning", AAAI 2023, https://arxiv.org/abs/2106.03328).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from coterie.features.secure.protocol import FEWEST, MAX_PEER_TEXT, MAX_PEERS, OUTWEIGHED
from coterie.wire.description import is_silo_name
from coterie.wire.errors import WireError

Names = tuple[str, ...]
"""The silos of a block, in order."""


@dataclass(frozen=True)
class Member:
    """A silo of a sum: the smallest group that it accepts, and its training samples."""

    minimum: int
    samples: int


@dataclass(frozen=True)
class Together:
    """The silos of a sum.

    Attributes:
        members: silo → what it has stated, by name.
        blocks: every silo is in one.
    """

    members: Mapping[str, Member]
    blocks: tuple[Names, ...]

    def encode(self) -> str:
        """Return them as text, for an entry of a message."""
        rows = [[[name, *astuple(self.members[name])] for name in own] for own in self.blocks]
        return json.dumps(rows)

    def objection(self) -> str:
        """Return why the sum would show few silos; empty if it would not."""
        for block in self.blocks:
            least = max(self.members[name].minimum for name in block)
            if len(block) < max(FEWEST, least):
                return (
                    f"has a block of {len(block)}, {', '.join(block)}, whose part could be "
                    f"computed from further sums: fewer than min_group_size ({least})"
                )
        if name := self.outweighing():
            return (
                f"has a block whose part would be nearly that of silo {name!r}, which has more "
                f"than {OUTWEIGHED:g} times as many rows as its others together"
            )
        return ""

    def outweighing(self) -> str:
        """Return a silo with far more rows than the rest of its block; empty: there is none."""
        return next(filter(None, (_outweighing(block, self.members) for block in self.blocks)), "")


def decode_together(text: object) -> Together:
    """Return the silos from the text of ``Together.encode``.

    Raises:
        WireError: it is something else.
    """
    try:
        if not isinstance(text, str) or len(text) > MAX_PEERS * MAX_PEER_TEXT:
            raise ValueError("expected a text")
        rows: Any = json.loads(text)
        members = {str(n): Member(_whole(m), _whole(s)) for own in rows for n, m, s in own}
        blocks = tuple(tuple(str(name) for name, _, _ in own) for own in rows)
    except Exception as error:  # text from elsewhere: of any kind
        raise WireError(f"the silos of a sum cannot be read: {error}") from None
    names = [name for block in blocks for name in block]
    if not all(map(is_silo_name, names)) or len(set(names)) < len(names) or not all(blocks):
        raise WireError("a sum needs its silos, each in one block.")
    if not FEWEST <= len(names) <= MAX_PEERS or any(list(b) != sorted(b) for b in blocks):
        raise WireError(f"a sum needs {FEWEST} to {MAX_PEERS} silos, in order.")
    return Together(dict(sorted(members.items())), blocks)


def planned(here: Mapping[str, Member], bound: Mapping[str, Names]) -> Together:
    """Return the most of these silos that may be in a sum together.

    A silo that outweighs the rest of its block, or states a block that others contradict, is left
    out, so that one silo's statement does not decide for the others.

    Args:
        bound: silo → the block that it states, of silos that are not free.
    """
    whole = {
        block
        for name, block in bound.items()
        if name in block and set(block) <= here.keys()
        if all(len(block) >= here[n].minimum and bound.get(n, block) == block for n in block)
    }
    # After a crash some silos of a block do not know it yet: the others speak for them, or their
    # block is the one that is planned anyway.
    blocks, taken = list[Names](), set[str]()
    for block in sorted(whole):
        if 2 * sum(name in bound for name in block) > len(block) and taken.isdisjoint(block):
            blocks.append(block)
            taken |= set(block)
    alone = {name: block for block in whole - set(blocks) for name in block if name in bound}
    free = [n for n in sorted(here) if n not in taken and (n not in bound or n in alone)]
    while few := [name for name in free if max(FEWEST, here[name].minimum) > len(free)]:
        free = [name for name in free if name not in few]
    size = max([FEWEST, *(here[name].minimum for name in free)])
    blocks += _divided(sorted(free, key=lambda name: -here[name].samples), size, here)
    members = {name: here[name] for name in sorted(n for block in blocks for n in block)}
    found = Together(members, tuple(sorted(blocks)))
    odd = {name for name in alone if alone[name] != block_of(blocks, name)}
    if wrong := odd & members.keys() or {found.outweighing()} & members.keys():
        return planned({n: own for n, own in here.items() if n not in wrong}, bound)
    return found


def _divided(free: Sequence[str], size: int, members: Mapping[str, Member]) -> list[Names]:
    """Divide silos, the largest first, into blocks of ``size`` or more that no silo outweighs.

    If there is no such division, all are in one block.
    """
    blocks = list[Names]()
    while free:
        ends = range(size, len(free))
        end = next((n for n in ends if not _outweighing(tuple(free[:n]), members)), len(free))
        block, free = tuple(free[:end]), free[end:]
        if blocks and (len(block) < size or _outweighing(block, members)):
            block += blocks.pop()
        blocks.append(tuple(sorted(block)))
    return blocks


def _outweighing(block: Names, members: Mapping[str, Member]) -> str:
    rows = sum(members[name].samples for name in block)
    heavy = (n for n in block if members[n].samples > OUTWEIGHED * (rows - members[n].samples))
    return next(heavy, "")


def decode_block(text: object) -> Names:
    """Return the block that a silo states as JSON, maybe empty; ``WireError`` if it is none."""
    try:
        names = json.loads(text) if isinstance(text, str) and len(text) < MAX_PEER_TEXT**2 else None
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(
        isinstance(n, str) and is_silo_name(n) for n in names
    ):
        raise WireError("the block that it states must be a list of silos.")
    return tuple(sorted(set(names)))


def _whole(number: object) -> int:
    if type(number) is not int or not 1 <= number < 2**53:
        raise ValueError("numbers must be whole, and at least 1")
    return number


def block_of(blocks: Sequence[Names], name: str) -> Names:
    """Return the block of a silo; empty if it is in none."""
    return next((block for block in blocks if name in block), ())
