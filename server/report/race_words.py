"""Words for the partitions of a race and for what a silo takes of its group's model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from coterie import wire
from coterie.server.runs.record import Entrant, Verdict
from coterie.server.runs.record.metrics import Lead

MOST_NAMED = 6
CURVATURES = {True: 2.0, False: 0.25}
"""By whether targets are real: a loss's curvature along a scaled column, of log loss the largest.
Along it a silo of n rows that is drawn to its group by λ takes the share λ/(λ + n · curvature)."""
PARTS = {
    0.0: " hardly at all",
    0.25: " about a quarter",
    1 / 3: " about a third",
    0.5: " about half",
    2 / 3: " about two thirds",
    0.75: " about three quarters",
    1.0: "",
}
"""Share → words."""


def titles(entrants: Sequence[Entrant], *, short: bool = False) -> list[str]:
    """Return a distinct title for each partition of a race.

    ``short`` omits the sources of the partitions.
    """
    plain = [_shape(one) if short else _title(one) for one in entrants]
    seen: Counter[str] = Counter()
    found = []
    for title in plain:
        seen[title] += 1
        found.append(title if plain.count(title) == 1 else f"{title} no. {seen[title]}")
    return found


def _title(one: Entrant) -> str:
    by = []
    for part in one.source.split("; "):
        if part.startswith("clusters"):
            by.append("by clustering")
        elif part.startswith("HCCT, α "):
            by.append(f"by HCCT, α = {part.removeprefix('HCCT, α ')}")
        elif part.startswith("FedCollab"):
            by.append("by FedCollab")
        elif part == "as it is":
            by.append("used until then")
    return _shape(one) + (f" ({'; '.join(by)})" if by else "")


def _shape(one: Entrant) -> str:
    split = " with splits by silo" if one.by_silo else ""
    return _partition(one) + split + (" with own models" if one.own_penalty else "")


def _partition(one: Entrant) -> str:
    several = [group for group in one.groups if len(group) > 1]
    alone = len(one.groups) - len(several)
    if not several:
        return "everybody alone"
    if len(several) == 1 and not alone:
        return "all together"
    text = wire.counted(len(several), "group")
    return text + (f" and {alone} alone" if alone else "")


def groups_text(verdict: Verdict) -> str:
    several = [group for group in verdict.chosen.groups if len(group) > 1]
    alone = [group[0] for group in verdict.chosen.groups if len(group) == 1]
    parts = ["{" + listed(group, "") + "}" for group in several]
    parts += [f"alone {listed(alone)}"] if alone else []
    return " ".join(parts)


def taking(verdict: Verdict, others: Sequence[str], rows: float, lead: Lead) -> str:
    """Say what, and how much of its slopes, a silo takes from its group, if it has its own model.

    Args:
        others: of the silo's group.
        rows: that the silo trains with; NaN if unknown.
    """
    real, penalty = lead.metric in wire.OF_NUMBERS, verdict.chosen.own_penalty
    if not verdict.converged:
        own = "own leaf values and a few own trees"
        return f"takes its trees from the group of {listed(others)}, with {own}"
    share = penalty / (penalty + CURVATURES[real] * rows)
    part = "" if math.isnan(share) else PARTS[min(PARTS, key=lambda one: abs(one - share))]
    kept = "level" if real else "base rate"
    return f"takes its slopes{part} from the group of {listed(others)} and keeps its own {kept}"


def own_parts(verdict: Verdict) -> str:
    """Say what is its own of a silo's model: of a linear one, or of trees."""
    if verdict.converged:
        return "its own intercept, and slopes shrunk towards its group's"
    return "its group's trees, with own leaf values shrunk towards these, and a few own trees"


def listed(names: Sequence[str], last: str = " and ") -> str:
    """Join names for a sentence; shorten long lists."""
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[: MOST_NAMED - 1])} and {len(names) - MOST_NAMED + 1} more"
    if len(names) < 2 or not last:
        return ", ".join(names)
    return f"{', '.join(names[:-1])}{last}{names[-1]}"
