"""``PerGroup``: the Flower strategy that runs another inside each group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from coterie.strategies.per_group.algorithm import InGroups, groups_of
from coterie.strategies.per_group.inner import Factory
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.strategy import GroupStrategy


@dataclass(frozen=True)
class FirstStage:
    """A run that finds the groups, on another model of the same silos.

    Attributes:
        strategy: such as ``HCCT()``.
        initial_arrays: of the model that it compares, such as a logistic regression.
        num_rounds: of this stage.
        action: of the ClientApp's functions for that model: ``@app.train("linear")`` and
            ``@app.evaluate("linear")``. Empty: those for both stages are the same.
        train_config: of this stage.
    """

    strategy: GroupStrategy
    initial_arrays: ArrayRecord
    num_rounds: int
    action: str = ""
    train_config: ConfigRecord | None = None

    def run(self, grid: Grid, timeout: float | None) -> RunResult:
        """Return the result of the stage."""
        self.strategy.action = self.action
        return self.strategy.start(
            grid=grid,
            initial_arrays=self.initial_arrays,
            num_rounds=self.num_rounds,
            timeout=timeout,
            train_config=self.train_config,
        )


class PerGroup(GroupStrategy):
    """A Flower strategy, or one of your own, inside each group, on the group's nodes only.

    Args:
        groups: names of the silos in each group, or a ``FirstStage`` that finds them. The groups of
            an earlier result are ``result.rounds[-1].groups``.
        inner: makes a group's strategy; called with the names of the group's silos. It is called
            for every step, and the strategy gets the attributes that the earlier one had.
        seed: of the strategies' random draws.
        engine: see ``GroupStrategy``. Bounds on what a silo can do and secure aggregation need to
            know what an update is, so they are refused.

    Raises:
        FederationError: a group is empty, a silo is in two, or an argument is refused.
    """

    kind = InGroups

    def __init__(
        self,
        groups: Iterable[Iterable[str]] | FirstStage,
        inner: Factory,
        *,
        seed: int = 0,
        **engine: Any,
    ) -> None:
        self.first_stage = groups if isinstance(groups, FirstStage) else None
        given = () if isinstance(groups, FirstStage) else groups_of(groups)
        super().__init__(groups_given=given, inner=inner, seed=seed, **engine)

    def start(self, grid: Any, *arguments: Any, **more: Any) -> RunResult:
        """Find the groups if a first stage does that, then run the strategies inside them.

        Arguments and result are as in ``GroupStrategy.start``; ``num_rounds`` are those after the
        first stage.
        """
        if self.first_stage is not None and more.get("resume") is None:
            found = self.first_stage.run(grid, more.get("timeout"))
            groups = groups_of(found.rounds[-1].groups)
            self.algorithm = self.algorithm.model_copy(update={"groups_given": groups})
        return super().start(grid, *arguments, **more)
