"""A verdict in words, and as the record has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.strategies.auto.state import Verdict
from coterie.strategies.partition.race import Standing


def verdict_text(verdict: Verdict, own: frozenset[str]) -> str:
    parts = []
    for candidate, standing in zip(verdict.candidates, verdict.standings, strict=True):
        parts.append(f"{candidate.source}: {100 * standing.error:.1f} %")
    winner = verdict.candidates[verdict.winner]
    groups = "; ".join(", ".join(group) for group in winner.groups)
    keeping = f". They keep their own models: {', '.join(sorted(own))}" if own else ""
    return (
        f"{len(winner.groups)} group(s): {groups}. Held-out errors of {len(verdict.judges)} "
        f"silo(s): {', '.join(parts)}{keeping}"
    )


def entry(standing: Standing) -> dict[str, Any]:
    return {
        "error": plain(standing.error),
        "behind": plain(standing.behind),
        "standard-error": plain(standing.standard_error),
        "out": standing.out,
    }


def verdict_entry(verdict: Verdict, own: frozenset[str]) -> dict[str, Any]:
    return {
        "verdict": {
            "round": verdict.round,
            "complete": verdict.complete,
            "judges": list(verdict.judges),
            "winner": verdict.winner,
            "candidates": [
                {"source": c.source, "groups": [list(g) for g in c.groups]} | entry(s)
                for c, s in zip(verdict.candidates, verdict.standings, strict=True)
            ],
            "gains": {
                name: {
                    "measured": plain(gain.measured),
                    "expected": plain(gain.expected),
                    "standard-error": plain(gain.standard_error),
                    "own": name in own,
                }
                for name, gain in sorted(verdict.gains.items())
            },
        }
    }


def plain(value: float) -> float | None:
    return round(value, 6) if np.isfinite(value) else None
