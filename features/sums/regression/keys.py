"""The keys of a regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from coterie.features.sums.contract import Family
from coterie.features.sums.keys import BySums
from coterie.features.sums.regression.newton import Regression


class RegressionKeys(BySums):
    """A regression by sums over silos."""

    model: Literal["linear", "logistic", "poisson", "cox"] = Field(
        "logistic",
        description="Kind of regression: of numbers, of two classes, of counts, or of times until "
        "an event.",
    )
    columns: str = Field(
        "",
        max_length=4000,
        description="Columns in the regression, separated by commas. Empty: all inputs.",
    )
    target: str = Field(
        "", max_length=200, description="Target, if the task has several. Empty: its only one."
    )

    def family(self) -> Family:
        """Return the coordinator's side."""
        return Regression()

    def settings(self) -> Mapping[str, Any]:
        """Return kind, columns and target."""
        columns = [word.strip() for word in self.columns.split(",") if word.strip()]
        return {"model": self.model, "columns": columns, "target": self.target}
