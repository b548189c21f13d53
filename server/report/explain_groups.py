"""The reasons for each silo's group with FedCollab and FedGroup, as sentences, from a record.

FedCollab's coalitions minimise a sum of error bounds: a silo's reason is its bound in its
coalition, alone, and in the best other one. FedGroup's groups are clusters of first updates, and
later silos join the group whose direction is nearest: a silo's reason is its cosines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie import wire
from coterie.server.report.race import Explanation
from coterie.server.report.similarity import interval_text
from coterie.server.runs.record import Round, Run, Square
from coterie.strategies.errors import refused
from coterie.strategies.partition.objectives import FedCollabBound


def explain_groups(run: Run, *, number: int | None = None) -> Explanation:
    """Return the reasons for the groups of a round, by default the last.

    Raises:
        FederationError: there is no such round, or the record does not hold what decided.
    """
    upto = [one for one in run.rounds if number is None or one.round <= number]
    if not upto or (number is not None and upto[-1].round != number):
        raise refused(f"round must be in [1, {len(run.rounds)}]. Got {number}.")
    found = _coalitions(run, upto) if run.strategy == "fedcollab" else _clusters(upto)
    if found is None:
        raise refused(
            f"the record has neither distances nor cosines up to round {upto[-1].round}: no "
            "groups were formed yet."
        )
    return found


# ---------------------------------------------------------------- FedCollab


def _coalitions(run: Run, rounds: Sequence[Round]) -> Explanation | None:
    known = [one for one in rounds if (s := one.grouping.structure) and s.distances is not None]
    if not known:
        return None
    last = known[-1]
    structure = last.grouping.structure
    assert structure is not None and structure.distances is not None
    names, c = structure.distances.names, structure.c
    sizes = [max(run.silos[name].num_examples, 1.0) for name in names]
    bound = FedCollabBound.from_distances(structure.distances.values, sizes, c=c)
    rows = {name: row for row, name in enumerate(names)}
    groups = [[rows[n] for n in group if n in rows] for group in last.groups]
    groups = [group for group in groups if group]
    whole = [
        "A silo's error bound is c / √D + the mean distance to its coalition's data, weighted by "
        f"samples; D is the coalition's samples and c = {c:.3g}. The coalitions have the smallest "
        f"sum.{interval_text(structure)}"
    ]
    silos = {}
    for group in groups:
        for row in group:
            silos[names[row]] = _coalition_of(row, group, groups, bound, structure.distances)
    silos |= {
        name: "it trains alone: the distances of its data to the other silos' are unknown."
        for group in last.groups
        for name in group
        if name not in rows
    }
    return Explanation(last.round, tuple(whole), silos)


def _coalition_of(
    row: int,
    group: Sequence[int],
    groups: Sequence[Sequence[int]],
    bound: FedCollabBound,
    distances: Square,
) -> str:
    def value(members: Sequence[int]) -> float:
        return float(bound.member_values(list(members))[list(members).index(row)])

    names, apart = distances.names, distances.values[row]

    def called(members: Sequence[int]) -> str:
        among = ", ".join(names[other] for other in members)
        low, high = min(apart[list(members)]), max(apart[list(members)])
        far = f"{low:.2f}" if len(members) == 1 else f"{low:.2f} to {high:.2f}"
        return f"with {among} (distance {far})"

    inside = [other for other in group if other != row]
    text = f"its bound is {value([row]):.3g} alone"
    if inside:
        text = f"its bound is {value(group):.3g} {called(inside)}, {value([row]):.3g} alone"
    others = [list(other) for other in groups if row not in other]
    if not others:
        return f"{text}."
    best = min(others, key=lambda other: value([*other, row]))
    return f"{text}, and it would be {value([*best, row]):.3g} {called(best)}."


# ---------------------------------------------------------------- FedGroup


def _clusters(rounds: Sequence[Round]) -> Explanation | None:
    formed = next((one for one in rounds if one.grouping.similarity is not None), None)
    if formed is None:
        return None
    square = formed.grouping.similarity
    assert square is not None
    group_of = _numbers(formed)
    silos: dict[str, str] = {}
    for row, name in enumerate(square.names):
        by_group: dict[int, list[float]] = {}
        for other, cosine in zip(square.names, square.values[row], strict=True):
            if other != name and other in group_of:
                by_group.setdefault(group_of[other], []).append(float(cosine))
        silos[name] = _cluster_of(group_of.get(name), by_group)
    for one in rounds:
        members = _members(one)
        for name, number, cosines in _placed(one):
            among = ", ".join(n for n in members.get(number, ()) if n != name) or "no other silo"
            others = [c for other, c in enumerate(cosines) if other != number]
            text = f"it was placed in round {one.round}, with {among}: "
            if number < len(cosines):
                text += "the cosine of its update with that group's direction is "
                text += f"{cosines[number]:.2f}"
                text += f", with the next one's {max(others):.2f}." if others else "."
            else:
                text += "it resembled no group."
            silos[name] = text
    whole = [
        f"The groups were formed in round {formed.round} by the directions of the first updates; "
        f"{wire.counted(len(square.names), 'silo')} took part. A silo stays in its group."
    ]
    return Explanation(rounds[-1].round, tuple(whole), silos)


def _cluster_of(mine: int | None, by_group: Mapping[int, Sequence[float]]) -> str:
    means = {number: float(np.mean(cosines)) for number, cosines in by_group.items()}
    others = [mean for number, mean in means.items() if number != mine]
    if mine in means:
        text = f"the mean cosine of its first update with its group's others is {means[mine]:.2f}"
    else:
        text = "it is alone in its group"
    return f"{text}, with the nearest other group's {max(others):.2f}." if others else f"{text}."


def _members(one: Round) -> dict[int, tuple[str, ...]]:
    listed = one.grouping.details.get("members", [])
    return {number: tuple(map(str, names)) for number, names in enumerate(listed)}


def _numbers(one: Round) -> dict[str, int]:
    return {name: number for number, names in _members(one).items() for name in names}


def _placed(one: Round) -> list[tuple[str, int, list[float]]]:
    placed: Mapping[str, Any] = one.grouping.details.get("placed") or {}
    return [
        (name, int(own["group"]), [float(cosine) for cosine in own["cosines"]])
        for name, own in placed.items()
    ]
