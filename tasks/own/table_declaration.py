"""The columns of a table that a task file declares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from coterie.tasks.own.declared import Declaration
from coterie.tasks.own.targets import NumberColumns, SurvivalColumns, TableTarget, Target

Finite = Annotated[float, Field(allow_inf_nan=False)]


class TableDeclaration(Declaration):
    """The declaration of a table's columns.

    ``numeric``: column names. ``categorical``: column → its values. ``bounds``: numeric column →
    lowest and highest possible value. ``indicators``: columns with an extra input that marks
    missing values. ``scale``: standardise numbers and real targets by each ``silo``'s mean and
    deviation, or by one pair of the ``federation``.
    """

    kind: Literal["table"]
    target: TableTarget
    numeric: tuple[str, ...] = ()
    categorical: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    bounds: dict[str, tuple[Finite, Finite]] = Field(default_factory=dict)
    indicators: tuple[str, ...] = ()
    scale: Literal["silo", "federation"] = "silo"

    @property
    def answer(self) -> Target | None:
        return None if isinstance(self.target, str) else self.target

    @property
    def targets(self) -> tuple[str, ...]:
        """The target columns."""
        return (self.target,) if isinstance(self.target, str) else self.target.columns

    @property
    def real_targets(self) -> tuple[str, ...]:
        """The target columns that hold real numbers."""
        if isinstance(self.target, NumberColumns):
            return self.target.columns
        return (self.target.time,) if isinstance(self.target, SurvivalColumns) else ()

    @model_validator(mode="after")
    def _columns_differ(self) -> TableDeclaration:
        inputs = [*self.numeric, *self.categorical]
        if len({*self.targets, *inputs}) != len(self.targets) + len(inputs):
            raise ValueError("a column is named twice among target, numeric and categorical")
        if not inputs:
            raise ValueError("there must be at least one numeric or categorical column")
        if self.scale == "federation" and not (
            self.numeric or isinstance(self.target, NumberColumns)
        ):
            raise ValueError("there are no numeric columns to scale over the federation")
        if not all(self.categorical.values()):
            raise ValueError("a categorical column needs at least one value")
        if unknown := set(self.bounds) - set(self.numeric):
            raise ValueError(f"bounds names {min(unknown)!r}, which is not a numeric column")
        if wrong := [name for name, (low, high) in self.bounds.items() if low >= high]:
            raise ValueError(f"the lower of the bounds of {wrong[0]!r} must come first")
        if unknown := set(self.indicators) - set(inputs):
            raise ValueError(
                f"indicators names {min(unknown)!r}, which is not a numeric or categorical column"
            )
        if len(set(self.indicators)) != len(self.indicators):
            raise ValueError("a column is named twice among indicators")
        return self
