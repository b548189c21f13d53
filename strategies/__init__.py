"""Flower strategies that find out which silos should train together, and their baselines.

    from coterie.strategies import HCCT
    result = HCCT(alpha=50).start(grid=grid, initial_arrays=arrays, num_rounds=20)

Each strategy is an algorithm (``coterie.strategies.rounds.algorithm``) held by one engine
(``coterie.strategies.strategy``); ``coterie.strategies.registry`` lists them. Names are imported on
first use, so that ``coterie.strategies.partition``, the pure numerics, needs only numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie.strategies.errors import FederationError
from coterie.strategies.registry import PUBLIC, strategy_class

if TYPE_CHECKING:
    from coterie.features.robust.keys import Influence
    from coterie.features.server_optimiser.keys import ServerOptimiser
    from coterie.strategies.per_group.strategy import FirstStage, PerGroup
    from coterie.strategies.rounds.result import RunResult
    from coterie.strategies.strategy import GroupStrategy

    APFL: type[GroupStrategy]
    Auto: type[GroupStrategy]
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
    Trees: type[GroupStrategy]

OTHERS = {
    "FirstStage": "coterie.strategies.per_group.strategy",
    "GroupStrategy": "coterie.strategies.strategy",
    "Influence": "coterie.features.robust.keys",
    "PerGroup": "coterie.strategies.per_group.strategy",
    "RunResult": "coterie.strategies.rounds.result",
    "ServerOptimiser": "coterie.features.server_optimiser.keys",
}
"""Name → module, of what the registry does not list."""
__all__ = [
    "FederationError",
    "FirstStage",
    "GroupStrategy",
    "Influence",
    "PerGroup",
    "RunResult",
    "ServerOptimiser",
]
__all__.extend(PUBLIC)


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return strategy_class(name)
    if name in OTHERS:
        return getattr(import_module(OTHERS[name]), name)
    raise AttributeError(f"module 'coterie.strategies' has no attribute {name!r}")
