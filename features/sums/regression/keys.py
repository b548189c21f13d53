"""The keys of a regression."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from coterie.features.sums.contract import Family
from coterie.features.sums.regression.newton import COX
from coterie.features.sums.regression.survival import SURVIVAL, family_of, times_of
from coterie.strategies.rounds.algorithm import Algorithm
from coterie.strategies.rounds.options import Config


def listing(columns: Sequence[str]) -> str:
    """Return the names of columns as the key ``columns`` has them."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(columns)
    return text.getvalue()


class RegressionKeys(Algorithm[Any]):
    """A regression by sums over silos."""

    works_unseen = True

    each_alone: bool = Field(
        False, description="Whether a model is also fitted at each silo alone, to compare silos."
    )
    model: Literal["linear", "logistic", "poisson", "cox", "survival"] = Field(
        "logistic",
        description="Kind of regression: of numbers, of two classes, of counts, or of times until "
        "an event; or survival curves.",
    )
    columns: str = Field(
        "",
        max_length=4000,
        pattern=r"^[^\r\n]*$",
        description="Columns in the regression, separated by commas; a name with a comma in "
        "quotes. Empty: all inputs.",
    )
    target: str = Field(
        "", max_length=200, description="Target, if the task has several. Empty: its only one."
    )
    at: str = Field(
        "",
        max_length=400,
        pattern=r"^[0-9., ]*$",
        description="Times of a survival curve, separated by commas, in the task's unit.",
    )

    def problems(self, training: Config) -> Iterator[str]:
        """Yield which keys do not fit the kind."""
        for column, times in Counter(self._columns()).items():
            if times > 1:
                yield f"columns names {column!r} {times} times: name it once"
        if self.model != SURVIVAL and self.at:
            yield f"at is for survival curves, not for {self.model}: leave it out"
        if self.model in (SURVIVAL, COX) and self.target:
            yield f"{self.model} has time and event as its target: leave target out"
        if self.model == SURVIVAL:
            if self.columns:
                yield "a survival curve has no columns: leave columns out"
            try:
                times_of(self.settings())
            except ValueError as error:
                yield f"{error}: for example --at 30,90,365"

    def insecure(self) -> str:
        """Return why such a run is not secure."""
        if not self.each_alone:
            return ""
        return (
            "each-alone = true fits every silo alone, and in a secure run the coordinator sees "
            "sums over groups only: leave one of them out"
        )

    def family(self) -> Family:
        """Return the coordinator's side."""
        return family_of({"model": self.model})

    def noun(self) -> str:
        """Return the kind, for people."""
        if self.model == SURVIVAL:
            return "survival curve"
        named = {COX: "Cox", "poisson": "Poisson"}
        return f"{named.get(self.model, self.model)} regression"

    def settings(self) -> Mapping[str, Any]:
        """Return kind, columns, target and times.

        Raises:
            ValueError: ``at`` does not have the form of times.
        """
        found = {"model": self.model, "columns": self._columns(), "target": self.target}
        return {**found, "at": self._times()} if self.at else found

    def _columns(self) -> list[str]:
        (words,) = csv.reader([self.columns.strip()], skipinitialspace=True)
        return [word.strip() for word in words if word.strip()]

    def _times(self) -> list[float]:
        try:
            return [float(word) for word in self.at.split(",")]
        except ValueError:
            raise ValueError(
                f"at must be times with a comma between two, not {self.at!r}"
            ) from None
