"""The numerics of every partition algorithm: which silos should train together.

Works on small N x N matrices of N silos and needs numpy only (FedGroup's clustering imports
scikit-learn when called). Row i of a matrix is silo i throughout.
"""

from coterie.strategies.partition import coalition, distance, fedcollab, fedgroup, gram, hcct
from coterie.strategies.partition.coalition import (
    FedCollabBound,
    HCCTUtility,
    Move,
    Objective,
    Partition,
    agglomerative,
    evaluate,
    optimal,
    relocation,
)

__all__ = [
    "FedCollabBound",
    "HCCTUtility",
    "Move",
    "Objective",
    "Partition",
    "agglomerative",
    "coalition",
    "distance",
    "evaluate",
    "fedcollab",
    "fedgroup",
    "gram",
    "hcct",
    "optimal",
    "relocation",
]
