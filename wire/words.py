"""Numbers, and numbers of things, as a person would say them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isnan


def counted(number: int, what: str) -> str:
    """``1 silo``, ``2 silos``, ``1,200 samples``. ``what``: one of them, whose plural ends in s."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def by_reason(of: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason → the names that share it, in the order given."""
    names: dict[str, list[str]] = {}
    for name, why in of.items():
        names.setdefault(why, []).append(name)
    return names


def reasons(of: Mapping[str, str]) -> str:
    """Why, name by name, in one sentence for all who share a reason: ``a, b: too large; c: late.``

    Args:
        of: name → why, with or without a full stop.
    """
    names = by_reason({name: why.rstrip(" .") for name, why in of.items()})
    return "; ".join(f"{', '.join(own)}: {why}" for why, own in names.items()) + "." * bool(names)


def readable(value: float, *, figures: int = 3, sign: str = "") -> str:
    """A few figures: ``0.123``, ``12.3``, ``19,200``; a power of ten from 1e9 on and below 1e-4.

    Args:
        value: NaN and infinity are words.
        figures: significant ones.
        sign: ``+`` shows that of positive numbers too.
    """
    if not isfinite(value):
        return "not a number" if isnan(value) else "infinite"
    short = f"{value:{sign}.{figures}g}"
    rounded = float(short)
    return f"{rounded:{sign},.0f}" if 1e3 <= abs(rounded) < 1e9 else short
