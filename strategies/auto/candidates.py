"""The partitions that a race is run between: what the other strategies would make of these silos.

Two need no comparison: everybody alone, and all together. Most come from one, of how far every
silo's own training has taken it from w⁰: what HCCT gives over all α, and FedGroup over all numbers
of groups. One can come from elsewhere: FedCollab's, of the discriminators that silos trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coterie.strategies.partition import fedgroup
from coterie.strategies.partition.coalition import HCCTUtility, best_partition
from coterie.strategies.partition.hcct import alpha_path
from coterie.strategies.rounds.members import present_groups
from coterie.strategies.rounds.policy import form
from coterie.strategies.rounds.reports import Group

FROM_PATH, FROM_CLUSTERS = 3, 2
"""Most partitions between alone and together, by α and by clustering."""
LEAST_SEPARATION = 0.25
"""Silhouette below which a clustering is no candidate: of random updates it is hardly above."""
VISIBLE = 0.6
"""Silhouette above which groups are plain to see; see ``fedgroup.choose_num_groups``."""
MAX_CLUSTERS = 16
MAX_ON_PATH = 64
"""Silos up to which the path over α is followed: it is a hundred searches, of which each takes
seconds where there are hundreds."""
BORDER = 0.1
"""Relative precision of the borders on a path: no candidate hangs on less."""
ALONE, TOGETHER, CLUSTERS, PATH = "everybody alone", "all together", "clusters", "HCCT"
"""Who proposes a candidate, before a comma."""
RESTARTS, EXACT = 2, 12
"""Of the search at each α of a path, and up to how many silos it is exact: there are a hundred."""


@dataclass(frozen=True)
class Candidate:
    """A partition, and in words who proposes it.

    ``strength`` orders those of one kind: how long it lasts over log α, or its silhouette.
    ``supported``: the silos' discriminators propose it for all of them, which have seen data where
    the others have seen updates.
    """

    groups: tuple[Group, ...]
    source: str
    strength: float = 0.0
    supported: bool = False

    @property
    def is_trivial(self) -> bool:
        """Everybody alone, or all together as far as silos accept that."""
        return bool({ALONE, TOGETHER} & set(self._sources))

    @property
    def is_agreed(self) -> bool:
        """Clustering and the path over α propose it."""
        return {CLUSTERS, PATH} <= {source.split(",")[0] for source in self._sources}

    @property
    def num_sources(self) -> int:
        """How many propose it."""
        return len(self._sources)

    @property
    def _sources(self) -> list[str]:
        return self.source.split("; ")


def everybody_alone(names: Collection[str]) -> Candidate:
    """The partition that every other one is compared with."""
    return Candidate(tuple((name,) for name in sorted(names)), ALONE)


def trivial(names: Sequence[str], minimums: Mapping[str, int]) -> tuple[Candidate, ...]:
    """Everybody alone, and all together as far as the silos accept that."""
    together = form([tuple(sorted(names))], minimums)
    return _distinct([everybody_alone(names), Candidate(tuple(sorted(together)), TOGETHER)])


def between(
    names: Sequence[str],
    gram: NDArray[np.float64],
    sizes: NDArray[np.float64],
    minimums: Mapping[str, int],
    rng: np.random.Generator,
) -> tuple[Candidate, ...]:
    """What comparing these silos suggests, strongest first; without the trivial partitions.

    Args:
        names: of the N silos.
        gram: (N, N) inner products of what is compared.
        sizes: (N,) training samples.
        minimums: silo → the smallest group that it accepts, where it stated one.
        rng: of the searches.
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
    whole: bool,
) -> tuple[Candidate, ...]:
    """The candidates, and what somebody proposes who has not compared updates.

    Args:
        found: the candidates.
        names: of the silos that race.
        groups: proposed, others among them.
        source: who proposes.
        whole: it is of all silos, not only of those that could be compared: then it is supported.
    """
    proposal = Candidate(present_groups(groups, names), source)
    return tuple(
        replace(candidate, supported=whole and candidate.groups == proposal.groups)
        for candidate in _distinct([*found, proposal])
    )


def nested(found: Sequence[Candidate], minimums: Mapping[str, int]) -> tuple[Candidate, ...]:
    """Those that may be raced in a secure run: sums over groups that overlap show single silos.

    Of any two groups one is in the other, or they have nobody in common; and those of a group that
    are in none within it are nobody, or as many as its silos accept: that is what is left where the
    sums of all of these are taken from the group's. Of two candidates that do not go together the
    one is kept that clustering and the path over α both propose, else the first.

    Args:
        found: candidates, the most wanted first, and before all others those that are trivial.
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
    """Whether the groups show: a clustering that is well separated, and was the best before."""
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
    """The first of equal partitions; it names all who propose it."""
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
