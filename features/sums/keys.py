"""The keys of a run that fits models by sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from coterie.features.sums.contract import Family
from coterie.strategies.rounds.algorithm import Algorithm


class BySums(Algorithm[Any]):
    """The base class of such runs; a family's own keys are fields of its class."""

    works_unseen = True

    each_alone: bool = Field(
        False, description="Whether a model is also fitted at each silo alone, to compare silos."
    )

    def insecure(self) -> str:
        """Return why such a run is not secure."""
        if not self.each_alone:
            return ""
        return (
            "each-alone = true fits every silo alone, and in a secure run the coordinator sees "
            "sums over groups only: leave one of them out"
        )

    def family(self) -> Family:
        """Return the coordinator's side of the family."""
        raise NotImplementedError

    def noun(self) -> str:
        """Return what a fit is, for people."""
        raise NotImplementedError

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of every fit, as JSON values."""
        raise NotImplementedError
