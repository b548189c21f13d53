"""What the log and the record say of distances and coalitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie import wire
from coterie.strategies.partition.fedcollab import StructureReport

if TYPE_CHECKING:
    from coterie.strategies.fedcollab.algorithm import FedCollabState, Structure

MAX_RECORDED_SILOS = 32
"""Maximum silos whose distances every round's record holds; for more, only rounds that solve."""


def details_of(state: FedCollabState) -> dict[str, Any]:
    """Return what a round's record has of the discriminators and the structure, as JSON values."""
    found: dict[str, Any] = {}
    if state.measured is not None:
        found["discriminators"] = {
            "pairs": len(state.measured.distances),
            "rounds": state.measured.rounds,
            "bytes": state.measured.bytes,
            "budget": None if state.measured.budget is None else asdict(state.measured.budget),
            "missing": dict(state.measured.missing),
            "unfinished": [list(pair) for pair in sorted(state.measured.unfinished)],
        }
    if state.structure is not None:
        few = len(state.structure.silos) <= MAX_RECORDED_SILOS
        found["structure"] = _structure_entry(state.structure, matrices=few or state.solved)
    return found


def report_text(report: StructureReport, names: Sequence[str], *, kept: bool) -> str:
    groups = "; ".join(", ".join(names[row] for row in group) for group in report.groups)
    firm = ""
    if kept:
        firm = (
            ", a different structure now has a smaller bound; no other silo moves (newcomers=keep)"
        )
    elif np.isfinite(report.c_low):
        firm = f", the same for c from {report.c_low:.3g} to {report.c_high:.3g}"
    return (
        f"{wire.counted(len(report.groups), 'coalition')}, bound {report.chosen:.4g} (all alone "
        f"{report.alone:.4g}, all together {report.together:.4g}, second best "
        f"{report.second_best:.4g}){firm}: {groups}"
    )


def _structure_entry(structure: Structure, *, matrices: bool) -> dict[str, Any]:
    """Return a structure as JSON values without NaN or infinity."""
    entry: dict[str, Any] = {
        "compared": list(structure.silos),
        "alone": list(structure.alone),
        **({"aside": list(structure.aside)} if structure.aside else {}),
        "c": structure.c,
    }
    if structure.report is not None:
        report = structure.report
        entry["bound"] = {
            "chosen": report.chosen,
            "alone": report.alone,
            "together": report.together,
            "second-best": _finite(report.second_best),
        }
        if np.isfinite(report.c_low):
            entry["c-interval"] = [report.c_low, _finite(report.c_high)]
        entry |= {"kept": True} if structure.kept else {}
        if report.second_groups is not None:
            entry["second-groups"] = [
                [structure.silos[row] for row in group] for group in report.second_groups
            ]
    if structure.distances and matrices:
        entry["distances"] = [[round(v, 6) for v in row] for row in structure.distances]
        entry["standard-errors"] = [[_finite(round(v, 6)) for v in row] for row in structure.errors]
    return entry


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
