"""The smallest set of sums from which all means in a state can be computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coterie.features.secure.protocol import num_numbers
from coterie.strategies.rounds.handles import Arrays, Masked, MaskedMean, Model, is_seen
from coterie.strategies.rounds.models import holders, weighted_mean
from coterie.wire.updates import Limit

EXACT = 1e-9
"""Relative difference of weights that is attributed to rounding."""

Term = tuple[str, int, str]
"""Silo, round and purpose of a training."""


@dataclass(frozen=True)
class Atom:
    """Masked models that occur in the same means with proportional weights: their sum is enough.

    ``weights`` are those in the first mean.
    """

    unseen: tuple[Masked, ...]
    weights: tuple[float, ...]

    @property
    def terms(self) -> frozenset[Term]:
        return frozenset(one.training for one in self.unseen)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(one.silo for one in self.unseen))

    @property
    def samples(self) -> dict[str, float]:
        return {one.silo: one.samples for one in self.unseen}

    @property
    def training(self) -> tuple[int, str]:
        return self.unseen[0].training[1:]

    @property
    def size(self) -> int:
        return num_numbers(self.unseen[0].origin)

    @property
    def limit(self) -> Limit | None:
        """The limit on their last updates, which is the same for all models trained alike."""
        return self.unseen[0].limit

    @property
    def counting(self) -> float | None:
        """The cap on samples that explains the weights.

        None if there is none, or if the models come from several trainings and cannot be summed
        at once.
        """
        if len({(one.round, one.purpose) for one in self.unseen}) > 1:
            return None
        if len({one.silo for one in self.unseen}) < len(self.unseen):
            return None
        if len({one.limit for one in self.unseen}) > 1:
            return None
        counts = [one.samples for one in self.unseen]
        if max(self.weights) <= min(self.weights) * (1 + EXACT):
            return min(counts)
        fewest = counts.index(min(counts))
        per_sample = self.weights[fewest] / counts[fewest]
        cap = max(self.weights) / per_sample
        cap = next((n for n in counts if math.isclose(n, cap, rel_tol=EXACT)), cap)
        alike = all(
            math.isclose(min(n, cap) * per_sample, w, rel_tol=EXACT)
            for n, w in zip(counts, self.weights, strict=True)
        )
        return cap if alike else None


def weights_of(mean: MaskedMean) -> dict[Term, tuple[Masked, float]]:
    found: dict[Term, tuple[Masked, float]] = {}
    for part, weight in mean.parts:
        if isinstance(part, Masked):
            before = found.get(part.training, (part, 0.0))[1]
            found[part.training] = (part, before + weight)
    return found


def atoms_of(means: Sequence[MaskedMean]) -> list[Atom]:
    """Return the fewest sums from which all these means can be computed, in a fixed order."""
    of_mean = [weights_of(mean) for mean in means]
    where: dict[Term, list[int]] = {}
    for i, weights in enumerate(of_mean):
        for term in weights:
            where.setdefault(term, []).append(i)
    # Silos that received different messages, or have different shares, are not in one sum.
    together: list[tuple[str, list[int], list[float], list[Term]]] = []
    for term, places in where.items():
        how = of_mean[places[0]][term][0].trained_as
        shares = [of_mean[i][term][1] for i in places]
        for known in together:
            if known[:2] == (how, places) and _proportional(known[2], shares):
                known[3].append(term)
                break
        else:
            together.append((how, places, shares, [term]))
    atoms = []
    for _, (first_mean, *_), _, terms in together:
        terms.sort()
        first = of_mean[first_mean]
        atom = Atom(tuple(first[t][0] for t in terms), tuple(first[t][1] for t in terms))
        atoms.append(atom)
    return sorted(atoms, key=lambda atom: sorted(atom.terms))


def _proportional(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two silos' weights in the same means have one ratio, up to rounding."""
    return all(
        math.isclose(a * other[0], b * one[0], rel_tol=EXACT)
        for a, b in zip(one, other, strict=True)
    )


def mean_of(
    mean: MaskedMean, atoms: Sequence[Atom], sums: Mapping[frozenset[Term], Arrays]
) -> Model:
    """Return the model that replaces a mean.

    Silos that are alone in a sum or could not be summed are left out. If none remains, the result
    is the mean of the models that the silos started from.
    """
    weights = weights_of(mean)
    parts: list[tuple[Model, float]] = [(m, weight) for m, weight in mean.parts if is_seen(m)]
    for atom in atoms:
        if atom.terms <= weights.keys() and atom.terms in sums:
            total = math.fsum(weights[term][1] for term in atom.terms)
            parts.append((sums[atom.terms], total))
    if not parts:
        parts = [(one.origin, weight) for one, weight in weights.values()]
    shared = holders({str(i): part for i, (part, _) in enumerate(parts)})
    joint = [(m, math.fsum(parts[int(name)][1] for name in names)) for m, names in shared]
    return weighted_mean([m for m, _ in joint], [w for _, w in joint])
