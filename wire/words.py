"""Numbers of things, as a person would say them."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """``1 silo``, ``2 silos``, ``1,200 samples``. ``what``: one of them, whose plural ends in s."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
