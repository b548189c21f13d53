"""``PerGroup``: the Flower strategy that runs another inside each group."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord

from coterie.strategies.per_group.algorithm import InGroups, groups_of
from coterie.strategies.per_group.inner import Factory
from coterie.strategies.rounds.conversation import Run
from coterie.strategies.rounds.nodes import NodeRoster
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

    def run(self, of: Run) -> RunResult:
        """Return the result of the stage, with the silos of a run and their names."""
        own = copy(self.strategy)
        own.action, own.record = self.action, False
        if isinstance(own.roster, NodeRoster):
            own.roster = of.roster
        return own.start(
            grid=of.line.engine,
            initial_arrays=self.initial_arrays,
            num_rounds=self.num_rounds,
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
        engine: see ``GroupStrategy``; ``min_silos`` and ``ask_names`` are by default those of the
            first stage, which sees the same silos under the same names. Bounds on what a silo can
            do and secure aggregation need to know what an update is, so they are refused.

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
        if self.first_stage and isinstance(first := self.first_stage.strategy.roster, NodeRoster):
            engine = {"min_silos": first.min_silos, "ask_names": first.ask, **engine}
        super().__init__(groups_given=given, inner=inner, seed=seed, **engine)

    def _run(self, run: Run, *arguments: Any) -> RunResult:
        """Find the groups if a first stage does that, then run the strategies inside them."""
        resume = arguments[-1]
        if self.first_stage is not None and resume is None:
            groups = groups_of(self.first_stage.run(run).rounds[-1].groups)
            self.algorithm = self.algorithm.model_copy(update={"groups_given": groups})
            run = replace(run, algorithm=self.algorithm)
        return super()._run(run, *arguments)
