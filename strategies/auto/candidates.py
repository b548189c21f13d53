"""The candidate partitions of a race: what other strategies would form from these silos.

All silos alone and all together need no comparison. Most others are based on how far each silo's
local training moved it from w⁰: HCCT's over all α, and FedGroup's over all numbers of groups. One
may be FedCollab's, based on the silos' discriminators.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.strategies.partition import fedgroup
from coterie.strategies.partition.hcct import alpha_path
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.strategies.partition.solvers import best_partition
from coterie.strategies.rounds.members import present_groups
from coterie.strategies.rounds.minimum_sizes import form
from coterie.strategies.rounds.reports import Group

FROM_PATH, FROM_CLUSTERS = 3, 2
"""Most partitions between alone and together, found by α and by clustering."""
LEAST_SEPARATION = 0.25
"""Minimum silhouette of a candidate clustering; random updates hardly exceed it."""
VISIBLE = 0.6
"""Silhouette from which groups are clearly visible; see ``fedgroup.choose_num_groups``."""
MAX_CLUSTERS = 16
MAX_ON_PATH = 64
"""Maximum silos for the path over α: a hundred searches, each taking seconds for hundreds."""
BORDER = 0.1
"""Relative precision of the borders on a path; no candidate needs more."""
ALONE, TOGETHER, CLUSTERS, PATH = "everybody alone", "all together", "clusters", "HCCT"
"""Origins of a candidate, written before a comma."""
RESTARTS, EXACT = 2, 12
"""Restarts of the search at each α of a path, and the most silos for an exact search; a path has a
hundred values of α."""
AS_IT_IS = "as it is"
"""Source of the partition that is held when a race is run again."""


@dataclass(frozen=True)
class Candidate:
    """A partition and its sources.

    ``strength`` orders candidates of one kind: the stretch of α in which it lasts (α_high / α_low),
    or its silhouette. ``supported``: the silos' discriminators, which have seen data and not
    updates, propose it for all silos. ``penalty``: λ with which silos make their own models of
    their group's (``own_models``); 0: they use the group's. ``by_silo``: the groups' trees may
    split by silo.
    """

    groups: tuple[Group, ...]
    source: str
    strength: float = 0.0
    supported: bool = False
    penalty: float = 0.0
    by_silo: bool = False

    @property
    def is_trivial(self) -> bool:
        """Whether it is all silos alone, or all together as far as silos accept that."""
        return bool({ALONE, TOGETHER} & set(self._sources))

    @property
    def is_together(self) -> bool:
        """Whether it is all together, as far as silos accept that."""
        return TOGETHER in self._sources

    @property
    def is_agreed(self) -> bool:
        """Whether both clustering and the path over α propose it."""
        return {CLUSTERS, PATH} <= {source.split(",")[0] for source in self._sources}

    @property
    def num_sources(self) -> int:
        """The number of sources that propose it."""
        return len(self._sources)

    @property
    def _sources(self) -> list[str]:
        return self.source.split("; ")


def everybody_alone(names: Collection[str]) -> Candidate:
    """Return the partition into single silos, which all others are compared with."""
    return Candidate(tuple((name,) for name in sorted(names)), ALONE)


def trivial(names: Sequence[str], minimums: Mapping[str, int]) -> tuple[Candidate, ...]:
    """Return all silos alone, and all together as far as the silos accept that."""
    together = form([tuple(sorted(names))], minimums)
    return _distinct([everybody_alone(names), Candidate(tuple(sorted(together)), TOGETHER)])


def between(
    names: Sequence[str],
    gram: NDArray[np.float64],
    sizes: NDArray[np.float64],
    minimums: Mapping[str, int],
    rng: np.random.Generator,
) -> tuple[Candidate, ...]:
    """Return the non-trivial partitions that a comparison of N silos suggests, strongest first.

    Args:
        gram: (N, N) inner products of what is compared.
        sizes: (N,) training samples.
        minimums: silo → the smallest group that it accepts, if it stated one.
    """
    if len(names) < 3:
        return ()
    found = [*_by_clusters(gram, rng), *_by_path(gram, sizes, rng)]
    formed = [
        Candidate(_named(candidate.groups, names, minimums), candidate.source, candidate.strength)
        for candidate in found
    ]
    known = {candidate.groups for candidate in trivial(names, minimums)}
    return tuple(c for c in _distinct(formed) if c.groups not in known)


def with_proposal(
    found: Sequence[Candidate],
    names: Sequence[str],
    groups: Sequence[Group],
    source: str,
    *,
    supports: bool,
) -> tuple[Candidate, ...]:
    """Return the candidates with a proposal from ``source`` that does not compare updates.

    Args:
        groups: proposed groups; may contain silos outside ``names``.
        supports: the proposal covers all silos and its source tells some of them apart.
    """
    proposal = Candidate(present_groups(groups, names), source)
    return tuple(
        replace(candidate, supported=supports and candidate.groups == proposal.groups)
        for candidate in _distinct([*found, proposal])
    )


def nested(found: Sequence[Candidate], minimums: Mapping[str, int]) -> tuple[Candidate, ...]:
    """Return the candidates that a secure run may race: overlapping sums reveal single silos.

    Any two groups must be nested or disjoint. What is left of a group without the groups nested in
    it must be empty or as large as its silos accept. Of two incompatible candidates, the one that
    both clustering and the path over α propose is kept, else the first.

    Args:
        found: candidates, most wanted first, trivial ones before all others.
        minimums: silo → the smallest group that it accepts.
    """
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda one: not (one.is_trivial or one.is_agreed)):
        if _show_nobody({g for c in (*kept, candidate) for g in c.groups if len(g) > 1}, minimums):
            kept.append(candidate)
    return tuple(kept)


def _show_nobody(groups: Collection[Group], minimums: Mapping[str, int]) -> bool:
    for group in groups:
        own = set(group)
        beside = [set(other) for other in groups if other != group and own & set(other)]
        if not all(other < own or own < other for other in beside):
            return False
        rest = own.difference(*(other for other in beside if other < own))
        if 0 < len(rest) < max(minimums.get(name, 1) for name in group):
            return False
    return True


def visible(found: Sequence[Candidate], before: Sequence[Candidate]) -> bool:
    """Return whether the best clustering is well separated and was the best ``before``."""
    now, earlier = (
        [c for c in some if c.source.startswith(CLUSTERS)][:1] for some in (found, before)
    )
    return (
        bool(now and earlier) and now[0].groups == earlier[0].groups and now[0].strength >= VISIBLE
    )


def _by_clusters(gram: NDArray[np.float64], rng: np.random.Generator) -> list[Candidate]:
    scored: list[Candidate] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # silos whose updates are zero or equal
        for number in range(2, min(len(gram) - 1, MAX_CLUSTERS) + 1):
            for measure in ("edc", "madc"):
                groups = fedgroup.cold_start(gram, num_groups=number, measure=measure, rng=rng)
                score = fedgroup.silhouette(gram, groups)
                source = f"{CLUSTERS}, {len(groups)} groups"
                scored.append(Candidate(_rows(groups), source, score))
    scored.sort(key=lambda c: -round(c.strength, 9))
    kept = [c for c in _distinct(scored) if c.strength >= LEAST_SEPARATION]
    return kept[:FROM_CLUSTERS]


def _by_path(
    gram: NDArray[np.float64], sizes: NDArray[np.float64], rng: np.random.Generator
) -> list[Candidate]:
    def solve(utility: HCCTUtility) -> list[list[int]]:
        return best_partition(utility, rng=rng, num_restarts=RESTARTS, exact=EXACT).groups

    if len(gram) > MAX_ON_PATH:
        return []
    path = alpha_path(gram, sizes, solver=solve, rtol=BORDER)
    inner = [stretch for stretch in path if 1 < len(stretch.groups) < len(gram)]
    inner.sort(key=lambda stretch: -stretch.ratio)
    return [
        Candidate(
            _rows(stretch.groups),
            f"{PATH}, α {np.sqrt(stretch.alpha_low * stretch.alpha_high):.3g}",
            stretch.ratio,
        )
        for stretch in inner[:FROM_PATH]
    ]


def _rows(groups: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(tuple(str(row) for row in sorted(group)) for group in groups))


def _named(
    groups: Sequence[Sequence[str]], names: Sequence[str], minimums: Mapping[str, int]
) -> tuple[Group, ...]:
    raw = [tuple(sorted(names[int(row)] for row in group)) for group in groups]
    return tuple(sorted(form(raw, minimums)))


def _distinct(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Merge equal partitions; the first keeps the names of all sources."""
    sources: dict[tuple[Group, ...], list[Candidate]] = {}
    for candidate in found:
        sources.setdefault(candidate.groups, []).append(candidate)
    return tuple(
        Candidate(
            groups,
            "; ".join(dict.fromkeys(c.source for c in same)),
            max(c.strength for c in same),
        )
        for groups, same in sources.items()
    )
