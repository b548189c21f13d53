"""Which silos take part in a round, where a strategy samples them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.strategies.rounds.algorithm import Round
from coterie.strategies.rounds.roster import Silo


def drawn(names: Sequence[str], count: int, rng: np.random.Generator) -> frozenset[str]:
    """Return ``count`` of these silos at random; all if there are no more or ``count`` is 0."""
    if not count or count >= len(names):
        return frozenset(names)
    return frozenset(rng.choice(list(names), size=count, replace=False).tolist())


def drawn_silos(now: Round, count: int, *, seed: int) -> list[Silo]:
    """Return the silos drawn for a round, by seed and round number."""
    turn = drawn(sorted(now.names), count, np.random.default_rng([seed, now.number]))
    return [silo for silo in now.silos if silo.name in turn]
