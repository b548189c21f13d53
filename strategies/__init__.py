"""Flower strategies that find out which silos should train together, and their baselines.

    from coterie.strategies import HCCT
    result = HCCT(alpha=50).start(grid=grid, initial_arrays=arrays, num_rounds=20)

Each strategy is an algorithm (``coterie.strategies.rounds.algorithm``) held by one engine
(``coterie.strategies.strategy``); ``coterie.strategies.registry`` lists them. Names are imported on
first use, so that ``coterie.strategies.partition``, the pure numerics, needs only numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coterie.strategies.errors import FederationError
from coterie.strategies.registry import PUBLIC, strategy_class

if TYPE_CHECKING:
    from coterie.features.robust.keys import Influence
    from coterie.strategies.rounds.result import RunResult
    from coterie.strategies.strategy import GroupStrategy

    APFL: type[GroupStrategy]
    CFL: type[GroupStrategy]
    FLHC: type[GroupStrategy]
    FLSC: type[GroupStrategy]
    HCCT: type[GroupStrategy]
    IFCA: type[GroupStrategy]
    MAXFL: type[GroupStrategy]
    FedAvg: type[GroupStrategy]
    FedCollab: type[GroupStrategy]
    FedEnsemble: type[GroupStrategy]
    FedFA: type[GroupStrategy]
    FedGen: type[GroupStrategy]
    FedGenP: type[GroupStrategy]
    FedGroup: type[GroupStrategy]
    FedNova: type[GroupStrategy]
    FeSEM: type[GroupStrategy]
    Independent: type[GroupStrategy]
    KMeans: type[GroupStrategy]
    PerFedAvg: type[GroupStrategy]
    PFedGraph: type[GroupStrategy]
    PFedMe: type[GroupStrategy]

__all__ = ["FederationError", "GroupStrategy", "Influence", "RunResult", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return strategy_class(name)
    if name in ("GroupStrategy", "RunResult"):
        from coterie.strategies import strategy

        return getattr(strategy, name)
    if name == "Influence":
        from coterie.features.robust.keys import Influence

        return Influence
    raise AttributeError(f"module 'coterie.strategies' has no attribute {name!r}")
