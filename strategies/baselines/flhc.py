"""FL+HC: some rounds of FedAvg, one hierarchical clustering of the updates, then groups that stay.

Briggs, Fan, Andras: "Federated learning with hierarchical clustering of local updates to improve
training on non-IID data", IJCNN 2020, https://arxiv.org/abs/2004.11791, Algorithm 1: after n rounds
every silo trains the global model once more; its updates are clustered agglomeratively, groups
farther apart than T are not merged, and each group goes on as a FedAvg of its own.

Differs from the paper in:

- Distances are 1 − cosine or Euclidean; the paper also tries the Manhattan distance, for which
  inner products do not suffice.
- *Newcomers* after the clustering, which the paper does not have, train the global model of then
  once and join the group with the nearest mean update.

FedAvg's messages: it works with any ClientApp.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Unpack

from coterie.strategies.baselines.oneshot import (
    OneShot,
    admitted,
    described,
    formed,
    ordered,
    placed,
    trained,
)
from coterie.strategies.baselines.placing import compared, constant_lr
from coterie.strategies.errors import require
from coterie.strategies.partition.clustering import Linkage, Metric, hierarchical
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.grouping import Members, average_groups
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


class FLHC(GroupStrategy[OneShot]):
    """Groups by one hierarchical clustering after ``rounds_before`` rounds of FedAvg.

    Args:
        rounds_before: n ≥ 0, rounds of FedAvg before the one whose updates are clustered.
        max_distance: T > 0; with cosines in (0, 2].
        metric: ``cosine`` or ``euclidean``.
        linkage: ``average``, ``complete``, ``single``, or, with Euclidean distances, ``ward``.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        rounds_before: int = 3,
        max_distance: float = 0.9,
        metric: Metric = "cosine",
        linkage: Linkage = "average",
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        require(rounds_before >= 0, f"rounds_before must be at least 0. Got {rounds_before}.")
        require(
            0 < max_distance < float("inf"),
            f"max_distance must be finite and above 0. Got {max_distance}.",
        )
        require(
            metric in ("cosine", "euclidean"),
            f"metric must be cosine or euclidean. Got {metric!r}.",
        )
        require(
            linkage in ("average", "complete", "single", "ward"),
            f"linkage must be average, complete, single or ward. Got {linkage!r}.",
        )
        require(
            linkage != "ward" or metric == "euclidean",
            f"linkage ward needs metric euclidean. Got {metric!r}.",
        )
        self.rounds_before, self.max_distance = int(rounds_before), float(max_distance)
        self.metric, self.linkage = metric, linkage

    def first(self, initial: Model) -> OneShot:
        """Nobody yet."""
        return OneShot(Members(initial))

    def admit(self, state: OneShot, silos: Sequence[Silo], *, round: int) -> OneShot:
        """Before the clustering, the global model."""
        return admitted(state, silos)

    def prepare(
        self, state: OneShot, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], OneShot]:
        """Place newcomers, with the learning rate of the clustering's round."""
        config = constant_lr(self.train_config, self.rounds_before + 1)
        return (yield from placed(state, silos, metric=self.metric, config=config))

    def orders(
        self, state: OneShot, silos: Sequence[Silo], *, round: int
    ) -> tuple[OneShot, list[Order]]:
        """Train the global model, later your group's."""
        return ordered(state, silos)

    def absorb(self, state: OneShot, updates: Sequence[Update], *, round: int) -> OneShot:
        """FedAvg, the clustering, or FedAvg in every group."""
        if state.origin is not None:
            return trained(state, updates)
        if round <= self.rounds_before or not updates:
            return OneShot(average_groups(state.members, updates))
        matrix = gram([list(compared(u).values()) for u in updates])
        groups = hierarchical(
            matrix, metric=self.metric, linkage=self.linkage, max_distance=self.max_distance
        )
        return formed(state, updates, groups)

    def models(self, state: OneShot) -> Mapping[str, Model]:
        """Silo → the global model, later its group's."""
        return state.members.models

    def groups(self, state: OneShot) -> Sequence[Group]:
        """Of who is here."""
        return state.members.groups

    def sharing(self, state: OneShot) -> Sequence[Group]:
        """Once there are groups, those of one silo too: newcomers get the group's model."""
        return self.groups(state) if state.origin is not None else super().sharing(state)

    def sizes(self, state: OneShot) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.members.sizes

    def details(self, state: OneShot) -> Mapping[str, Any]:
        """Groups by number, empty ones too."""
        return described(state)
