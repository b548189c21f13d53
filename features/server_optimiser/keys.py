"""The settings of the server optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from coterie.strategies.rounds.algorithm import Algorithm
from coterie.strategies.rounds.options import Config, Options

USUAL_LR = {"fedavgm": 1.0, "fedadam": 0.1, "fedyogi": 0.01}
"""η of Flower's FedAvgM, FedAdam and FedYogi."""


class ServerOptimiser(Options):
    """How a group's model follows the mean of its silos' models."""

    name: Literal["none", "fedavgm", "fedadam", "fedyogi"] = Field(
        "none",
        alias="server-optimiser",
        description="Optimiser that moves each group's model by the difference to the mean of its "
        "silos' models: `fedavgm`, `fedadam` or `fedyogi`, as in Flower. `none`: the model "
        "becomes the mean. For `fedavg`, `hcct`, `fedgroup` and `fedcollab`; a silo alone is not "
        "affected.",
    )
    lr: float = Field(
        0.0,
        alias="server-optimiser-lr",
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="η, learning rate of the server optimiser. 0: Flower's default, 1 for "
        "`fedavgm`, 0.1 for `fedadam` and 0.01 for `fedyogi`.",
    )
    momentum: float = Field(
        0.9,
        alias="server-momentum",
        ge=0,
        lt=1,
        description="β₁, momentum of the server optimiser.",
    )
    tau: float = Field(
        1e-3,
        alias="server-tau",
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="τ, adaptivity of `fedadam` and `fedyogi`: added to the root of the second "
        "moment, so that small values adapt more.",
    )

    @property
    def rate(self) -> float:
        """η."""
        return self.lr or USUAL_LR[self.name]

    def problems(self, training: Config) -> Iterator[str]:
        """Yield settings of an optimiser that is not used."""
        for field, info in type(self).model_fields.items():
            unused = self.name == "none" or (field == "tau" and self.name == "fedavgm")
            if field != "name" and unused and getattr(self, field) != info.default:
                yield f"{info.alias} has no effect with server-optimiser = {self.name}"


def server_optimiser_problem(
    chosen: ServerOptimiser, algorithm: Algorithm[Any], strategy: str
) -> str:
    """Return why a strategy cannot use a server optimiser; empty if it can."""
    if chosen.name == "none":
        return "; ".join(chosen.problems({}))
    if not algorithm.takes_steps:
        return (
            f"server-optimiser = {chosen.name} moves each group's model from its last one, and "
            f"{strategy} makes its models in another way: use fedavg, hcct, fedgroup or fedcollab"
        )
    if algorithm.plain().get("alpha") == "auto":
        return (
            "alpha = auto compares models as their groups average them, so server-optimiser must "
            f"be none. Got {chosen.name}. Or give alpha as a number"
        )
    return "; ".join(chosen.problems({}))
