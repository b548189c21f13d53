"""A verdict as text and as a record entry."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie import wire
from coterie.strategies.auto.state import Entrant, Placement, Verdict
from coterie.strategies.partition.race import Standing


def verdict_text(verdict: Verdict, own: frozenset[str]) -> str:
    parts = [
        f"{one.candidate.source}{', own models' if one.candidate.penalty else ''}: "
        + (
            f"{100 * one.standing.error:.1f}%"
            if verdict.shares
            else wire.readable(one.standing.error)
        )
        for one in verdict.entrants
        if np.isfinite(one.standing.error)
    ]
    what = "errors" if verdict.shares else "scores"
    winner = verdict.entrants[verdict.winner].candidate
    groups = "; ".join(", ".join(group) for group in winner.groups)
    keeping = f". They keep their own models: {', '.join(sorted(own))}" if own else ""
    if verdict.left:
        keeping += f", as do silos whose groups these leave: {', '.join(verdict.left)}"
    return (
        f"{wire.counted(len(winner.groups), 'group')}: {groups}. Held-out {what} of "
        f"{wire.counted(len(verdict.judges), 'silo')}: {', '.join(parts) or 'none'}{keeping}"
    )


def entrant_entry(one: Entrant) -> dict[str, Any]:
    """Return an entrant as JSON values; ``latest`` uses the last round's measurements only."""
    return {
        "source": one.candidate.source,
        "groups": [list(group) for group in one.candidate.groups],
        "samples": plain(one.samples),
        **({"supported": True} if one.candidate.supported else {}),
        **({"own-penalty": one.candidate.penalty} if one.candidate.penalty else {}),
        **_standing_entry(one.standing),
        "out": one.standing.out,
        "latest": _standing_entry(one.latest),
        **({"dropped": one.dropped} if one.dropped else {}),
    }


def _standing_entry(standing: Standing) -> dict[str, float | None]:
    return {
        "error": plain(standing.error),
        "behind": plain(standing.behind),
        "standard-error": plain(standing.standard_error),
    }


def verdict_entry(verdict: Verdict) -> dict[str, Any]:
    return {
        "began": verdict.began,
        "round": verdict.round,
        "complete": verdict.complete,
        "shares": verdict.shares,
        **({"converged": True} if verdict.converged else {}),
        "judges": list(verdict.judges),
        **({"left": list(verdict.left)} if verdict.left else {}),
        "winner": verdict.winner,
        "candidates": [entrant_entry(one) for one in verdict.entrants],
        "gains": {
            name: {
                "measured": plain(gain.measured),
                "noise": plain(gain.noise),
                "expected": plain(gain.expected),
                "standard-error": plain(gain.standard_error),
                "own": gain.own,
                "share": plain(gain.share),
            }
            for name, gain in sorted(verdict.gains.items())
        },
        "trials": {
            name: {"count": plain(trial.count), "errors": [plain(e) for e in trial.errors]}
            for name, trial in sorted(verdict.trials.items())
        },
    }


def placement_entry(one: Placement) -> dict[str, Any]:
    return {
        "group": list(one.group),
        "joins": one.joins,
        "count": plain(one.count),
        "alone": plain(one.alone),
        "grouped": plain(one.grouped),
    }


def plain(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None
