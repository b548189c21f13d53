"""Numbers and counts in a form for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite, isnan

from coterie.wire.limits import plain_text

MOST_SETTINGS = 5000
"""Most characters of the settings of a fit that people are shown."""


def counted(number: int, what: str) -> str:
    """Return ``1 silo``, ``2 silos``, ``1,200 samples``. The plural of ``what`` must end in s."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def by_reason(of: Mapping[str, str]) -> dict[str, list[str]]:
    """Return reason → the names that share it, in the order given."""
    names: dict[str, list[str]] = {}
    for name, why in of.items():
        names.setdefault(why, []).append(name)
    return names


def reasons(of: Mapping[str, str]) -> str:
    """Return one sentence for all names that share a reason: ``a, b: too large; c: late.``

    ``of`` is name → reason, with or without a full stop.
    """
    names = by_reason({name: why.rstrip(" .") for name, why in of.items()})
    return "; ".join(f"{', '.join(own)}: {why}" for why, own in names.items()) + "." * bool(names)


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def page(title: str) -> str:
    """Return the reference to a page of the documentation, by its title up to a colon."""
    return f"'{title}' in the documentation"


def readable(value: float, *, figures: int = 3, sign: str = "") -> str:
    """Return a few figures, such as ``0.123``, ``12.3``, ``19,200``.

    From 1e9, and below 1e-4, the value is written with a power of ten; NaN and infinity become
    words. A ``sign`` of ``+`` also shows that of positive numbers.
    """
    if not isfinite(value):
        return "not a number" if isnan(value) else "infinite"
    short = f"{value:{sign}.{figures}g}"
    rounded = float(short)
    return f"{rounded:{sign},.0f}" if 1e3 <= abs(rounded) < 1e9 else short


def asked_sums(settings: object, inputs: Sequence[str] = (), targets: Sequence[str] = ()) -> str:
    """Return what a fit by sums is of: ``logistic regression; target: y; columns: age, dose``.

    Args:
        settings: of the fit, as JSON. Any other text is returned as it is.
        inputs: the task's, if known; a fit that names no column has all of them.
        targets: the same.
    """
    try:
        found = json.loads(str(settings))
        model, columns, target = (found[key] for key in ("model", "columns", "target"))
        named, at = (", ".join(map(str, one)) for one in (columns or inputs, found.get("at", ())))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return plain_text(settings, MOST_SETTINGS)
    which = "columns" if columns else "all columns"
    of = f"target: {target or ', '.join(targets) or 'that of the task'}"
    parts = (
        [f"survival curves at {at}", of]
        if model == "survival"
        else [f"{model} regression", of, f"{which}: {named}" if named else which]
    )
    return plain_text("; ".join(parts), MOST_SETTINGS)  # if cut, then after the target
