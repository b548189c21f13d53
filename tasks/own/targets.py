"""Targets of a declaration, and the learning problems that follow from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)

from coterie.tasks.problems import Labels, Masks, Numbers, Problem, Survival

Names = Annotated[tuple[str, ...], Field(min_length=1)]


class Target(BaseModel):
    """A target that is not one of several classes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def problem(self, num_classes: int) -> Problem:
        """Return the learning problem; ``num_classes`` comes from the declaration."""
        raise NotImplementedError

    def labels(self) -> tuple[str, ...]:
        """Return the names of the labels, if any."""
        return ()


class NumberColumns(Target):
    """Columns of real numbers."""

    kind: Literal["number"]
    columns: Names
    unit: str = ""

    def problem(self, num_classes: int) -> Problem:
        return Numbers(len(self.columns), self.unit)

    def labels(self) -> tuple[str, ...]:
        return self.columns


class LabelColumns(Target):
    """Columns of 0 and 1, any of which may be 1."""

    kind: Literal["labels"]
    columns: Names

    def problem(self, num_classes: int) -> Problem:
        return Labels(len(self.columns))

    def labels(self) -> tuple[str, ...]:
        return self.columns


class SurvivalColumns(Target):
    """A column of times, and one of 1 (the event happened then) or 0 (nothing is known after)."""

    kind: Literal["survival"]
    time: str
    event: str

    @property
    def columns(self) -> tuple[str, str]:
        """Time and event."""
        return self.time, self.event

    def problem(self, num_classes: int) -> Problem:
        return Survival()


class NumberArray(Target):
    """Real numbers in ``y``, (n, count), or (n,) for one.

    ``scale`` defines whose mean and deviation standardise them, as for a table.
    """

    kind: Literal["number"]
    count: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    unit: str = ""
    scale: Literal["silo", "federation"] = "silo"

    def problem(self, num_classes: int) -> Problem:
        return Numbers(self.count, self.unit)


class LabelArray(Target):
    """Zeros and ones in ``y``, (n, names)."""

    kind: Literal["labels"]
    names: Names

    def problem(self, num_classes: int) -> Problem:
        return Labels(len(self.names))

    def labels(self) -> tuple[str, ...]:
        return self.names


class SurvivalArray(Target):
    """Times and events in ``y``, (n, 2)."""

    kind: Literal["survival"]

    def problem(self, num_classes: int) -> Problem:
        return Survival()


class MaskTarget(Target):
    """A class per pixel; the first class is the background."""

    kind: Literal["mask"]

    def problem(self, num_classes: int) -> Problem:
        return Masks(num_classes)


def _form(value: Any) -> str | None:
    if isinstance(value, str):
        return "column"
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if isinstance(kind, str) else None


TableTarget = Annotated[
    Annotated[str, Tag("column")]
    | Annotated[NumberColumns, Tag("number")]
    | Annotated[LabelColumns, Tag("labels")]
    | Annotated[SurvivalColumns, Tag("survival")],
    Discriminator(
        _form,
        custom_error_type="target",
        custom_error_message=(
            "target must be the name of a column, or a table whose kind is number, labels or "
            "survival"
        ),
    ),
]
ArrayTarget = Annotated[
    NumberArray | LabelArray | SurvivalArray | MaskTarget, Field(discriminator="kind")
]
