"""What a roster says while silos are missing, and why connected ones do not take part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from coterie import wire

MOST_REASONS = 5
OWN_NAME = re.compile(r"silo '([A-Za-z0-9][A-Za-z0-9._-]{0,63})' ")
"""Matches the name that a silo gives itself at the beginning of its reason."""


def sentences(reasons: Mapping[str, str]) -> list[str]:
    """Return one sentence per reason why silos do not take part, naming all its silos."""
    return [_sentence(names, why) for why, names in by_reason(reasons).items()]


def first_of(reasons: Sequence[str]) -> str:
    """Return the first reasons, each after a semicolon, and how many more there are."""
    more = len(reasons) - MOST_REASONS
    return "".join(f"; {reason.rstrip('.')}" for reason in reasons[:MOST_REASONS]) + (
        f"; and {more} more" if more > 0 else ""
    )


def own_name(reason: str) -> str:
    """Return the name that a silo gives itself in its reason; empty if it gives none."""
    found = OWN_NAME.match(reason)
    return found[1] if found else ""


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    return wire.by_reason(dict(sorted(reasons.items())))


def _sentence(names: Sequence[str], why: str) -> str:
    serves = "serves" if len(names) == 1 else "serve"
    said = re.sub(r"^(it )?serves ", f"{serves} ", why)
    return f"{wire.some(names)} {said}" if said.startswith(serves) else f"{wire.some(names)}: {why}"


def waiting_text(
    here: int, min_silos: int, missing: Sequence[str], lingering: Sequence[str], number: int
) -> str:
    if missing:
        return f"round {number} waits for {', '.join(missing)} to join"
    if lingering:
        return f"round {number} waits for {', '.join(lingering)} to leave"
    return f"waiting for silos: {here} of at least {min_silos if number <= 1 else 1} have joined"
