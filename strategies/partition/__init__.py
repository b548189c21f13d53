"""Who should train with whom: the numerics of every partition algorithm, and nothing else.

Everything here works on small N x N matrices of N silos and needs numpy only (the FedGroup
clustering imports scikit-learn when it is called). Row i of a matrix is silo i throughout.
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
