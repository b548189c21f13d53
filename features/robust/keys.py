"""The settings of robust aggregation, which bound what one silo can do to the others."""

from __future__ import annotations

from pydantic import Field

from coterie.strategies.rounds.models import AGGREGATES, Aggregate
from coterie.strategies.rounds.options import CountOrNone, NotNegative, Options


class Influence(Options):
    """Bounds on what one silo can do to the others."""

    max_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest share of a group's weight that one silo can have, in groups of three "
        "or four silos; in a larger group of g silos 4/g of it, by default twice an equal share. "
        "1: no limit.",
    )
    clip_updates: NotNegative = Field(
        1.5,
        le=1e9,
        description="Largest norm of an update, as a multiple of the median norm of the updates "
        "that it is compared with (at least three). Longer updates are scaled down to this norm; "
        "the limit is up to twice as high for silos with many samples. 0: no limit.",
    )
    aggregate: Aggregate = Field(
        "mean",
        description="Rule that combines updates into a group's model, in groups of at least three "
        "silos. `mean` weights silos by samples. `trimmed-mean`, `median` (both value by value) "
        "and `krum` (the one update nearest to the others) count every silo once, and resist "
        "several dishonest silos.",
    )
    quarantine_after: CountOrNone = Field(
        3,
        description="Number of consecutive rounds in which a silo's update points away from its "
        "group's before the silo is quarantined: it trains alone for some rounds, then returns on "
        "probation. 0: never.",
    )


def aggregate_problem(influence: Influence, *, averages: bool, strategy: str) -> str:
    """Return why a strategy cannot use the aggregation rule; empty if it can."""
    if influence.aggregate == "mean" or averages:
        return ""
    others = ", ".join(name for name in AGGREGATES if name != "mean")
    return (
        f"{strategy} weights single updates itself, so aggregate must be mean ({others} are for "
        f"strategies that average groups). Got {influence.aggregate!r}"
    )
