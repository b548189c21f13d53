"""One file per algorithm, each a Flower strategy; ``strategies.partition`` is pure numerics.

    from strategies import HCCT
    result = HCCT(alpha=50).start(grid=grid, initial_arrays=arrays, num_rounds=20)

Names are imported when first used, so that ``coterie.strategies.partition`` needs numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.strategies.baselines.cfl import CFL
    from coterie.strategies.baselines.fedavg import FedAvg
    from coterie.strategies.baselines.fedensemble import FedEnsemble
    from coterie.strategies.baselines.fedfa import FedFA
    from coterie.strategies.baselines.fednova import FedNova
    from coterie.strategies.baselines.fesem import FeSEM
    from coterie.strategies.baselines.flhc import FLHC
    from coterie.strategies.baselines.flsc import FLSC
    from coterie.strategies.baselines.ifca import IFCA
    from coterie.strategies.baselines.independent import Independent
    from coterie.strategies.baselines.kmeans import KMeans
    from coterie.strategies.baselines.maxfl import MAXFL
    from coterie.strategies.baselines.perfedavg import PerFedAvg
    from coterie.strategies.baselines.pfedme import PFedMe
    from coterie.strategies.errors import FederationError
    from coterie.strategies.fedcollab.algorithm import FedCollab
    from coterie.strategies.fedgenp.algorithm import FedGenP
    from coterie.strategies.fedgenp.fedgen import FedGen
    from coterie.strategies.fedgroup.algorithm import FedGroup
    from coterie.strategies.hcct.algorithm import HCCT
    from coterie.strategies.rounds.loop import GroupStrategy, RunResult

__all__ = [
    "CFL",
    "FedAvg",
    "FedCollab",
    "FedEnsemble",
    "FedGen",
    "FedGenP",
    "FederationError",
    "FedFA",
    "FedGroup",
    "FedNova",
    "FeSEM",
    "FLHC",
    "FLSC",
    "GroupStrategy",
    "HCCT",
    "IFCA",
    "Independent",
    "KMeans",
    "MAXFL",
    "PerFedAvg",
    "PFedMe",
    "RunResult",
]

_HOME = {
    "CFL": "coterie.strategies.baselines.cfl",
    "FedAvg": "coterie.strategies.baselines.fedavg",
    "FedCollab": "coterie.strategies.fedcollab.algorithm",
    "FedEnsemble": "coterie.strategies.baselines.fedensemble",
    "FedGen": "coterie.strategies.fedgenp.fedgen",
    "FedGenP": "coterie.strategies.fedgenp.algorithm",
    "FederationError": "coterie.strategies.errors",
    "FedFA": "coterie.strategies.baselines.fedfa",
    "FedGroup": "coterie.strategies.fedgroup.algorithm",
    "FedNova": "coterie.strategies.baselines.fednova",
    "FeSEM": "coterie.strategies.baselines.fesem",
    "FLHC": "coterie.strategies.baselines.flhc",
    "FLSC": "coterie.strategies.baselines.flsc",
    "GroupStrategy": "coterie.strategies.rounds.loop",
    "HCCT": "coterie.strategies.hcct.algorithm",
    "IFCA": "coterie.strategies.baselines.ifca",
    "Independent": "coterie.strategies.baselines.independent",
    "KMeans": "coterie.strategies.baselines.kmeans",
    "MAXFL": "coterie.strategies.baselines.maxfl",
    "PerFedAvg": "coterie.strategies.baselines.perfedavg",
    "PFedMe": "coterie.strategies.baselines.pfedme",
    "RunResult": "coterie.strategies.rounds.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
