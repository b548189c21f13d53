"""Groups over the rounds; each keeps its name and colour from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from coterie.pictures.flow import Block, Column
from coterie.pictures.style import GROUPS, LIGHT
from coterie.server.runs.letters import alphabet
from coterie.server.runs.record import Groups, Round


@dataclass(frozen=True)
class Stretch:
    """Rounds ``first`` to ``last`` with equal groups; ``labels[i]`` is group i's lasting number."""

    first: int
    last: int
    groups: Groups
    labels: tuple[int, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """The groups over the rounds, in chronological stretches; neighbours have different groups.

    ``letters`` and ``colours`` are by lasting number; groups that never had two silos have neither.
    """

    stretches: tuple[Stretch, ...]
    letters: Mapping[int, str]
    colours: Mapping[int, str]

    @cached_property
    def now(self) -> dict[str, tuple[str, str]]:
        """Silo → (letter, colour) at the end; the letter is empty for a silo that is alone."""
        return self._at(self.stretches[-1]) if self.stretches else {}

    @cached_property
    def last_seen(self) -> dict[str, tuple[str, str]]:
        """Silo → (letter, colour) of its last group, including silos that left."""
        found: dict[str, tuple[str, str]] = {}
        for stretch in self.stretches:
            found |= self._at(stretch)
        return found

    @cached_property
    def since(self) -> dict[str, int]:
        """Silo → the round since which it has been in its present group without a break."""
        since: dict[str, int] = {}
        before: dict[str, tuple[str, str]] = {}
        for stretch in self.stretches:
            at = self._at(stretch)
            for name, where in at.items():
                if before.get(name) != where:
                    since[name] = stretch.first
            before = at
        return {name: since[name] for name in before}

    def _at(self, stretch: Stretch) -> dict[str, tuple[str, str]]:
        return {
            name: (block.label, block.colour)
            for block in self.blocks(stretch)
            for name in block.members
        }

    def blocks(self, stretch: Stretch) -> tuple[Block, ...]:
        """Return a stretch's groups, in their order."""
        return tuple(
            (
                Block(self.letters[label], self.colours[label], group)
                if len(group) > 1 and label in self.letters
                else Block("", LIGHT["alone"], group)
            )
            for label, group in zip(stretch.labels, stretch.groups, strict=True)
        )

    def columns(self, most: int) -> tuple[tuple[Column, ...], int]:
        """Return at most ``most`` columns for a picture, and the number of stretches.

        The first and the last stretch stay. The others are cut into equal parts, and each part
        keeps the stretch with the most changes. Rows are ordered by each silo's last group, so that
        streams rarely cross.
        """
        kept = self._kept(most)
        place = {name: i for i, name in enumerate(self.order(self.last_seen))}
        columns = []
        for position, index in enumerate(kept):
            stretch = self.stretches[index]
            skipped = self.stretches[kept[position - 1] + 1 : index] if position else ()
            following = kept[position + 1] if position + 1 < len(kept) else index + 1
            last = self.stretches[following - 1].last
            here = {name for group in stretch.groups for name in group}
            blocks = [
                Block(b.label, b.colour, tuple(sorted(b.members, key=place.__getitem__)))
                for b in self.blocks(stretch)
            ]
            blocks.sort(key=lambda b: float(np.mean([place[name] for name in b.members])))
            leaving = [n for s in self.stretches[index + 1 : following + 1] for n in s.left]
            joining = [n for s in (*skipped, stretch) for n in s.joined]
            columns.append(
                Column(
                    str(stretch.first) if stretch.first == last else f"{stretch.first}–{last}",
                    tuple(blocks),
                    joined=tuple(n for n in joining if n in here) if position else (),
                    left=tuple(n for n in leaving if n in here),
                )
            )
        return tuple(columns), len(self.stretches)

    def _kept(self, most: int) -> list[int]:
        total = len(self.stretches)
        if total <= most:
            return list(range(total))
        moved = [0, *(_num_moved(before, after) for before, after in pairwise(self.stretches))]
        parts = np.array_split(np.arange(1, total - 1), most - 2)
        return [0, *(max(part.tolist(), key=moved.__getitem__) for part in parts), total - 1]

    def order(self, names: Iterable[str]) -> list[str]:
        """Sort silos by group, then by name, with silos that are alone last."""

        def key(name: str) -> tuple[bool, int, str, str]:
            letter = self.last_seen.get(name, ("", ""))[0]
            return letter == "", len(letter), letter, name

        return sorted(names, key=key)


def follow_groups(rounds: Sequence[Round]) -> History:
    """Give groups lasting numbers: each continues the group that it shares most silos with."""
    stretches: list[Stretch] = []
    fresh = 0
    for one in rounds:
        if not one.groups:
            continue
        alike = {frozenset(group) for group in one.groups}
        if stretches and alike == set(map(frozenset, stretches[-1].groups)):
            stretches[-1] = replace(stretches[-1], last=one.round)
            continue
        labels, fresh = _continued(stretches[-1] if stretches else None, one.groups, fresh)
        stretches.append(Stretch(one.round, one.round, one.groups, labels, one.joined, one.left))
    letters, weight = _letters(stretches)
    coloured = sorted(letters, key=lambda label: -weight[label])[: len(GROUPS)]
    names = iter(GROUPS)
    colours = {
        label: LIGHT[next(names)] if label in coloured else LIGHT["muted"] for label in letters
    }
    return History(tuple(stretches), letters, colours)


def _continued(before: Stretch | None, groups: Groups, fresh: int) -> tuple[tuple[int, ...], int]:
    labels: list[int | None] = [None] * len(groups)
    if before is not None:
        row_of = {name: row for row, group in enumerate(before.groups) for name in group}
        overlap = np.zeros((len(before.groups), len(groups)))
        for column, group in enumerate(groups):
            for name in group:
                if name in row_of:
                    overlap[row_of[name], column] += 1
        # A group of several goes before silos that are alone: its name is the one people know.
        overlap += 0.5 * (overlap > 0) * (np.array([len(g) > 1 for g in before.groups])[:, None])
        for row, column in zip(*linear_sum_assignment(-overlap), strict=True):
            if overlap[row, column] > 0:
                labels[column] = before.labels[row]
    for column, label in enumerate(labels):
        if label is None:
            labels[column], fresh = fresh, fresh + 1
    return tuple(label for label in labels if label is not None), fresh


def _letters(stretches: Sequence[Stretch]) -> tuple[dict[int, str], dict[int, int]]:
    """Assign letters to groups of several silos; return them, and each group's silo-rounds.

    Final groups come first, as in ``letters_of``; others follow by their silo-rounds.
    """
    if not stretches:
        return {}, {}
    weight: dict[int, int] = {}
    for stretch in stretches:
        for label, group in zip(stretch.labels, stretch.groups, strict=True):
            if len(group) > 1:
                length = stretch.last - stretch.first + 1
                weight[label] = weight.get(label, 0) + len(group) * length
    end = stretches[-1]
    final = [
        label
        for label, group in sorted(
            zip(end.labels, end.groups, strict=True), key=lambda p: sorted(p[1])
        )
        if len(group) > 1
    ]
    others = sorted((label for label in weight if label not in final), key=lambda n: -weight[n])
    return dict(zip([*final, *others], alphabet(), strict=False)), weight


def _num_moved(before: Stretch, after: Stretch) -> int:
    groups = set(map(frozenset, before.groups))
    moved = [group for group in after.groups if frozenset(group) not in groups]
    left = {name for group in groups for name in group} - {n for g in after.groups for n in g}
    return sum(map(len, moved)) + len(left)
