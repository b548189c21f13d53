"""Subgroups of a silo's samples that its ``silo.toml`` names: a column, with limits of numbers."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

MOST_LIMITS = 10


def read_subgroup(text: str) -> tuple[str, tuple[float, ...]]:
    """Return a column's name, and the limits between its subgroups: ``age < 50 < 70``.

    Raises:
        ValueError: it has no name, or limits that are not ascending numbers.
    """
    name, *limits = (part.strip() for part in text.split("<"))
    try:
        numbers = tuple(float(one) for one in limits)
    except ValueError:
        numbers = (float("nan"),)
    ascending = all(low < high for low, high in pairwise(numbers))
    named = name and "," not in name  # by which lists are divided
    if not named or len(numbers) > MOST_LIMITS or not all(map(isfinite, numbers)) or not ascending:
        raise ValueError(
            f"must be a column without a comma in its name, with at most {MOST_LIMITS} ascending "
            f'limits if it has numbers, such as "age < 50 < 70". Got {text!r}'
        )
    return name, numbers


def readable_subgroup(text: str) -> str:
    """Return the text unchanged; raise as ``read_subgroup``."""
    read_subgroup(text)
    return text
