"""How a silo grows trees from its rows alone."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from coterie.features.sums.trees.growth import Settings


class Alone(BaseModel):
    """The settings of these trees; on the wire as JSON.

    Attributes:
        rate, penalty, min_rows, min_second: as in ``growth.Settings``.
        bins: most bins of a column.
        trees: how many grow at most, of which those are used that are best on held-out rows; 0: all
            of the model's, of which a trial says how many are used (``together.grown_alone``).
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    rate: Annotated[float, Field(gt=0, le=1)]
    penalty: Annotated[float, Field(ge=0, le=1e6)]
    min_rows: Annotated[int, Field(ge=1, le=1_000_000)]
    min_second: Annotated[float, Field(ge=0, le=1e6)]
    bins: Annotated[int, Field(ge=2, le=1024)]
    trees: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def of(cls, settings: Settings, bins: int, trees: int = 0) -> Self:
        """Return what says the same as these."""
        return cls(**vars(settings), bins=bins, trees=trees)

    @property
    def settings(self) -> Settings:
        """Return how the trees grow."""
        return Settings(self.rate, self.penalty, self.min_rows, self.min_second)
