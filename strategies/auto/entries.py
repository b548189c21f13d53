"""A verdict as text and as a record entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from coterie import wire
from coterie.features.sums.trees.coordinator import is_trees
from coterie.strategies.auto.budget import least_bytes
from coterie.strategies.auto.evidence import compares_losses, entrants_of, judges_of
from coterie.strategies.auto.state import AutoState, Entrant, Placement, Verdict, at_home
from coterie.strategies.fedcollab.algorithm import FedCollab
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
        **({"by-silo": True} if one.candidate.by_silo else {}),
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


def details_of(state: AutoState, byte_budget: float) -> dict[str, Any]:
    """Return what the record of a round has about the state."""
    details: dict[str, Any] = {
        "phase": state.phase,
        **({"score": score} if (score := _score(state)) else {}),
        "trainings": {name: round(n, 1) for name, n in sorted(state.trainings.items())},
        "bytes": {
            "moved": state.moved,
            "usual": state.usual,
            "discriminators": state.paired,
            "budget": byte_budget,
            **({"least": least} if (least := least_bytes(state, len(state.trainings))) else {}),
        },
    }
    if state.pairs is not None and state.paired_in == state.number:
        details |= FedCollab().details(replace(state.pairs, structure=None))
    if state.phase == "race":
        details["began"] = state.since
        details["candidates"] = [entrant_entry(one) for one in entrants_of(state)]
        details["judges"] = sorted(judges_of(state))
    dropped = [one for one in state.dropped if one.dropped == state.number]
    details |= {"dropped": [entrant_entry(one) for one in dropped]} if dropped else {}
    if state.verdict is not None and state.verdict.round == state.number:
        details["verdict"] = verdict_entry(state.verdict)
    if is_trees(state.members.initial):
        grown = state.trees.finals or state.trees.arms
        details["trees"] = {",".join(key): own.done for key, own in grown.items()}
        details |= {"at-home": alone} if (alone := sorted(at_home(state))) else {}
    details |= {"not-summed": dict(state.trees.lost)} if state.trees.lost else {}
    if state.drifted:
        details["other-data"] = sorted(state.drifted)
    if state.probation:
        details["probation"] = {n: list(state.beside.get(n, ())) for n in sorted(state.probation)}
    if fresh := {n: p for n, p in state.placed.items() if p.round == state.number}:
        details["placed"] = {name: placement_entry(fresh[name]) for name in sorted(fresh)}
    return details


def _score(state: AutoState) -> str:
    if state.phase == "hold" and state.verdict is not None:
        return state.verdict.score
    return wire.LOSS if compares_losses(state) else ""
