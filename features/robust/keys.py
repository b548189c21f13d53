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
        description="Largest share of a group's weight that one silo has, in groups of three and "
        "more; 1 sets no limit.",
    )
    clip_updates: NotNegative = Field(
        3.0,
        le=1e9,
        description="Largest norm of an update, as a multiple of the median of three and more that "
        "it is compared with; longer ones are shortened to it, those of silos with many samples "
        "to at most twice that. 0 sets no limit.",
    )
    aggregate: Aggregate = Field(
        "mean",
        description="What a group's model is made of its updates by, in groups of three and more: "
        "`mean` weighs by samples; `trimmed-mean`, `median` (both value by value) and `krum` (the "
        "one update that is nearest to the others) count every silo once, and resist several "
        "dishonest ones.",
    )
    quarantine_after: CountOrNone = Field(
        3,
        description="A silo whose updates point away from its group's so many rounds in a row "
        "trains alone for some rounds, then comes back on probation; 0 never moves one out.",
    )


def aggregate_problem(influence: Influence, *, averages: bool, strategy: str) -> str:
    """Return why a strategy cannot use the aggregation rule; empty if it can."""
    if influence.aggregate == "mean" or averages:
        return ""
    others = ", ".join(name for name in AGGREGATES if name != "mean")
    return (
        f"{strategy} makes its models by weights of its own or of single updates, so aggregate "
        f"must be mean ({others} are for strategies that average groups). "
        f"Got {influence.aggregate!r}"
    )
