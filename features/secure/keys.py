"""What a secure run cannot be combined with."""

from __future__ import annotations

from typing import Any

from coterie import wire
from coterie.strategies.rounds.algorithm import Algorithm


def insecure(
    algorithm: Algorithm[Any], *, aggregate: str, name: str, wire_format: str = wire.FLOAT32
) -> str:
    """Return why a strategy cannot run in a secure run; empty if it can."""
    if why := algorithm.insecure():
        return why
    if not algorithm.works_unseen:
        return (
            "secure = true needs a strategy that only averages models and compares updates; "
            f"{name} needs more from single silos (see {wire.page('Secure runs')})"
        )
    if aggregate != "mean":
        return (
            f"aggregate = {aggregate} needs every silo's values, which the coordinator does not "
            "see in a secure run: it must be mean"
        )
    if wire_format != wire.FLOAT32:
        return (
            f"wire-format = {wire_format} rounds updates, and in a secure run silos send exact "
            f"sums instead: it must be {wire.FLOAT32}"
        )
    return ""
