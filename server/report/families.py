"""Sentences on the families of models that silos use, where ``auto`` chooses between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie import wire
from coterie.server.runs.record import Round, Run
from coterie.strategies.auto.families import sentence

FAMILIES, BOOSTED = "families", "boosted"
"""In a round's details: silo → its family, and what is known of trees."""


def entries_in(rounds: Sequence[Round]) -> dict[str, Mapping[str, Any]]:
    """Return silo → its family and what it measured, as the last of these rounds says it.

    The final evaluation states only what has changed. Damaged entries are left out.
    """
    found = next((own for r in reversed(rounds[-2:]) if (own := r.details.get(FAMILIES))), None)
    entries = found.items() if isinstance(found, Mapping) else ()
    return {str(name): entry for name, entry in entries if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or entry.get("family") not in wire.FAMILIES:
        return False
    if not isinstance(entry.get("hidden-layers"), bool):
        return False
    others = entry.get("with")
    if not (isinstance(others, list) and all(isinstance(one, str) for one in others)):
        return False
    if "measured" not in entry:
        return True
    values = entry["measured"]
    numbers = [entry.get("count"), *(values if isinstance(values, list) else ())]
    fits = all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
    return fits and len(numbers) == 3 and isinstance(entry.get("loss"), bool)


def sentences_in(rounds: Sequence[Round]) -> dict[str, str]:
    """Return silo → which family it uses after these rounds, with whom, and why."""
    return {name: sentence(own) for name, own in sorted(entries_in(rounds).items())}


def of_trees(run: Run) -> Run:
    """Return the record of a run as if only trees had been grown."""

    def only(one: Round) -> Round:
        found = one.details.get(BOOSTED)
        return replace(one, details=found if isinstance(found, Mapping) else {})

    final = None if run.final is None else only(run.final)
    return replace(run, rounds=tuple(map(only, run.rounds)), final=final)
