"""Which silos are together in sums: in blocks, of which all silos are in a sum, or none is.

Silos bind themselves to a block at their first sum (``coterie.features.secure.memory``), and state
it with every training. Silos that are still free are put into new blocks, as small as they accept,
of those whose updates point in the most similar directions: whatever groups are formed later, they
seldom separate such silos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.features.secure.atoms import Atom
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.handles import Masked
from coterie.wire.statements import Block, proportional

Least = Callable[[Sequence[str]], int]
"""Silos → the fewest of them that may be a block."""


@dataclass(frozen=True)
class Planned:
    """A sum to be asked for: its blocks; and the silos of the atom that are in none, with why."""

    atom: Atom
    blocks: tuple[Block, ...]
    waiting: Mapping[str, str] = field(default_factory=dict)


def planned(atoms: Sequence[Atom], least: Least) -> list[Planned]:
    """Return the sums of atoms that show no part of a block; one without blocks is not to be asked.

    Args:
        atoms: those that are summed at once, in their order; each has a ``counting``.
    """
    new = _new_blocks(atoms, least)
    fixed: dict[tuple[str, ...], Block] = {}
    found = []
    for atom in atoms:
        bound = {_names(one.stated.block): one.stated.block for one in atom.unseen}
        blocks: list[Block] = []
        for names in sorted({*bound, *new} - {()}):
            if set(names) <= set(atom.names) and _agree(atom, names):
                block = _counted(atom, names, fixed.get(names) or bound.get(names))
                blocks.append(block)
                fixed.setdefault(names, block)
        inside = {name for block in blocks for name, _ in block}
        waiting = {n: _why(atom, n, least) for n in atom.names if n not in inside}
        found.append(Planned(atom, tuple(blocks), waiting))
    return found


def _new_blocks(atoms: Sequence[Atom], least: Least) -> set[tuple[str, ...]]:
    """Return blocks of free silos that are in the same atoms, so that no sum separates them."""
    free: dict[str, list[int]] = {}
    last: dict[str, Masked] = {}
    bound = {name for atom in atoms for one in atom.unseen for name, _ in one.stated.block}
    for i, atom in enumerate(atoms):
        for one in atom.unseen:
            if one.silo not in bound:
                free.setdefault(one.silo, []).append(i)
                last[one.silo] = one
    cells: dict[tuple[int, ...], list[Masked]] = {}
    for name in sorted(free):
        cells.setdefault(tuple(free[name]), []).append(last[name])
    found: set[tuple[str, ...]] = set()
    for cell in cells.values():
        size = least([one.silo for one in cell])
        if len(cell) >= size:
            found |= _split(cell, size)
    return found


def _split(cell: list[Masked], size: int) -> set[tuple[str, ...]]:
    """Return blocks of ``size`` to ``2 · size - 1`` silos; in order, each with its nearest."""
    near = _cosines(cell)
    rest = list(range(len(cell)))
    found = []
    while len(rest) >= 2 * size:
        first = rest[0]
        mates = sorted(rest[1:], key=lambda i: (-near[first, i], i))[: size - 1]
        found.append([first, *mates])
        rest = [i for i in rest if i not in found[-1]]
    return {tuple(sorted(cell[i].silo for i in block)) for block in (*found, rest)}


def _cosines(cell: Sequence[Masked]) -> np.ndarray:
    """Return cosines (n, n) of the sketched updates; zeros without sketches."""
    names = set.intersection(*(set(one.moved) for one in cell))
    if not names:
        return np.zeros((len(cell), len(cell)))
    products = gram([{name: one.moved[name] for name in sorted(names)} for one in cell])
    norms = np.sqrt(np.maximum(products.diagonal(), 1e-30))
    return np.asarray(np.round(products / np.outer(norms, norms), 6))


def _agree(atom: Atom, names: tuple[str, ...]) -> bool:
    """Return whether each of these silos is free, or bound to exactly them."""
    stated = {one.silo: _names(one.stated.block) for one in atom.unseen}
    return all(stated[name] in ((), names) for name in names)


def _counted(atom: Atom, names: tuple[str, ...], before: Block | None) -> Block:
    """Return a block with its counts: those wanted, or in the proportions to which it is bound."""
    samples, cap = atom.samples, atom.counting or 0.0
    wanted = tuple((name, min(samples[name], cap)) for name in names)
    if before is None or proportional(before, wanted):
        return wanted
    times = sum(count for _, count in wanted) / sum(count for _, count in before)
    times = min(times, *(samples[name] / count for name, count in before))
    return tuple((name, count * times) for name, count in before)


def _why(atom: Atom, name: str, least: Least) -> str:
    (stated,) = (one.stated for one in atom.unseen if one.silo == name)
    if not stated.block:
        return (
            f"it waits: it joins this group's sums as soon as {least([name])} silos can that were "
            "in none before."
        )
    away = [other for other, _ in stated.block if other not in atom.names]
    mates = ", ".join(away) or "the silos of its block"
    return f"it is in sums only together with {mates}, as before, which are not in this one."


def _names(block: Block) -> tuple[str, ...]:
    return tuple(name for name, _ in block)
