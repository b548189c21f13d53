"""FL+HC and k-means on updates: groups formed once, each with its own FedAvg from then on.

- ``FLHC``: Briggs, Fan, Andras: "Federated learning with hierarchical clustering of local updates
  to improve training on non-IID data", IJCNN 2020, https://arxiv.org/abs/2004.11791, Algorithm 1:
  after n rounds every silo trains the global model once more; its updates are clustered
  agglomeratively, and groups farther apart than T are not merged. Distances are 1 − cosine or
  Euclidean; the paper also tries the Manhattan distance, for which inner products do not suffice.
- ``KMeans``: Ghosh, Hong, Yin, Ramchandran: "Robust Federated Learning in a Heterogeneous
  Environment", 2019, https://arxiv.org/abs/1906.06629, with FedAvg inside the groups: the baseline
  "KMeans" of FedCollab. All silos start from one w⁰, so clustering updates is clustering local
  models.

A newcomer after the clustering, which neither paper has, trains once from the model that the
clustered updates started from, and joins the group whose mean update is nearest to its own.

Both use FedAvg's messages and work with any ClientApp.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.partition._check import Groups
from coterie.strategies.partition.clustering import Linkage, Metric, hierarchical, k_means
from coterie.strategies.plain.placing import (
    Direction,
    constant_lr,
    direction_of,
    gram_of,
    nearest,
    placing_order,
)
from coterie.strategies.rounds.algorithm import (
    SUMS_BEFORE_GROUPS,
    Algorithm,
    Exchanges,
    Order,
    Round,
    Updates,
    orders_from,
)
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Members, by_number, give_out, global_model, together
from coterie.strategies.rounds.minimum_sizes import accepted, average, average_groups
from coterie.strategies.rounds.options import (
    Config,
    Count,
    CountOrNone,
    Positive,
    Seed,
    TimesOrNone,
)

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class OneShot:
    """The state of such an algorithm between rounds.

    Attributes:
        origin: the model from which the clustered updates started; None before.
        group_of: silo → index of its group.
        formed: round of the clustering.
        group_models, directions: per group, its model and its members' mean update.
    """

    members: Members
    origin: Model | None = None
    formed: int = 0
    group_of: Mapping[str, int] = field(default_factory=dict)
    group_models: tuple[Model, ...] = ()
    directions: tuple[Direction, ...] = ()


class _FormedOnce(Algorithm[OneShot]):
    """The common part of both: all but when and how the groups are formed."""

    remembers = OneShot
    hands_on = True
    models_in = ("group_models",)

    def insecure(self) -> str:
        """Return why it is refused in a secure run: its first sums would bind the groups."""
        return SUMS_BEFORE_GROUPS

    def clusters(self, updates: Updates, now: Round) -> Groups | None:
        """Return the groups, as rows of these updates; None before they are due."""
        raise NotImplementedError

    def placing(self, now: Round) -> tuple[Metric, Config]:
        """Return the metric for a newcomer's update, and the configuration of its training."""
        raise NotImplementedError

    def newcomer_model(self, state: OneShot) -> Model:
        return global_model(state.members) if state.origin is None else state.origin

    def renew(self, state: OneShot, changed: frozenset[str], now: Round) -> OneShot:
        """Place silos with changed data again, like newcomers."""
        group_of = {name: own for name, own in state.group_of.items() if name not in changed}
        return replace(state, group_of=group_of)

    def prepare(self, state: OneShot, now: Round) -> Exchanges[OneShot]:
        """Find a group for silos without one; those that do not answer are asked next round."""
        new = [silo for silo in now.silos if silo.name not in state.group_of]
        if state.origin is None or not new:
            return state
        metric, config = self.placing(now)
        answers = yield [
            placing_order(silo, state.origin, config, formed=state.formed) for silo in new
        ]
        found = {u.silo.name: nearest(u, state.directions, metric=metric) for u in answers}
        return replace(state, group_of={**state.group_of, **found})

    def orders(self, state: OneShot, now: Round) -> tuple[OneShot, list[Order]]:
        """Order training of the global model, or once there are groups, of each silo's group."""
        if state.origin is None:
            members, silos = together(state.members, now.silos), list(now.silos)
        else:
            silos = [silo for silo in now.silos if silo.name in state.group_of]
            members = _handed_out(state, [silo.name for silo in silos])
        return replace(state, members=members), orders_from(members.models, silos)

    def absorb(self, state: OneShot, updates: Updates, now: Round) -> OneShot:
        """Run FedAvg, the clustering, or FedAvg in every group."""
        if state.origin is not None:
            return _trained(state, updates)
        groups = self.clusters(updates, now) if updates else None
        if groups is None:
            return replace(state, members=average_groups(state.members, accepted(updates)))
        return _formed(replace(state, formed=now.number), updates, groups)

    def details(self, state: OneShot) -> Mapping[str, Any]:
        count = len(state.group_models)
        return {"members": by_number(state.members.here, state.group_of, count)}


class FLHC(_FormedOnce):
    """Groups by one hierarchical clustering after ``rounds_before`` rounds of FedAvg."""

    rounds_before: CountOrNone = Field(
        3, description="n, number of FedAvg rounds before the clustering."
    )
    max_distance: Positive = Field(
        0.9,
        le=1e6,
        description="T, largest distance at which two groups are merged. Cosine distances are at "
        "most 2.",
    )
    metric: Metric = Field("cosine", description="Distance between two updates.")
    linkage: Linkage = Field(
        "average", description="Distance between two groups. `ward` requires `metric = euclidean`."
    )

    def problems(self, training: Config) -> Iterator[str]:
        if self.linkage == "ward" and self.metric != "euclidean":
            yield f"linkage = ward needs metric = euclidean. Got {self.metric!r}"

    def clusters(self, updates: Updates, now: Round) -> Groups | None:
        if now.number <= self.rounds_before:
            return None
        return hierarchical(
            gram_of(updates),
            metric=self.metric,
            linkage=self.linkage,
            max_distance=self.max_distance,
        )

    def placing(self, now: Round) -> tuple[Metric, Config]:
        return self.metric, constant_lr(now.config, self.rounds_before + 1)


class KMeans(_FormedOnce):
    """Groups by k-means on the updates of round 1."""

    num_groups: Count = Field(
        3,
        description="K, number of groups. With fewer silos than that, there are as many groups as "
        "silos.",
    )
    cold_start_epochs: TimesOrNone = Field(0, description="Epochs of round 1. 0: `local-epochs`.")
    seed: Seed = 0

    def demands(self) -> Config:
        return {wire.COLD_START_EPOCHS: self.cold_start_epochs} if self.cold_start_epochs else {}

    def clusters(self, updates: Updates, now: Round) -> Groups | None:
        matrix = gram_of(updates)
        wanted = min(self.num_groups, len(updates))
        return k_means(
            matrix, num_groups=wanted, rng=np.random.default_rng([self.seed, now.number])
        )

    def placing(self, now: Round) -> tuple[Metric, Config]:
        config = constant_lr(now.config, 1)
        if self.cold_start_epochs:  # a silo with a number of steps does not count epochs
            config |= {wire.LOCAL_EPOCHS: self.cold_start_epochs, wire.LOCAL_STEPS: 0}
        return "euclidean", config

    def orders(self, state: OneShot, now: Round) -> tuple[OneShot, list[Order]]:
        pretraining = state.origin is None
        state, orders = super().orders(state, now)
        if pretraining:
            orders = [replace(order, config=self.placing(now)[1]) for order in orders]
        return state, orders


def _formed(state: OneShot, updates: Updates, groups: Sequence[Sequence[int]]) -> OneShot:
    """Form the groups, given as rows of ``updates``, which all started from one model."""
    start = updates[0].start
    members = [[updates[row] for row in rows] for rows in groups]
    means = [average(own, [u.silo.name for u in own]) for own in members]
    log.info("%d groups: %s", len(groups), [[u.silo.name for u in own] for own in members])
    formed = replace(
        state,
        origin=start,
        group_of={u.silo.name: number for number, own in enumerate(members) for u in own},
        group_models=tuple(start if mean is None else mean for mean in means),
        directions=tuple(direction_of(own) for own in members),
    )
    return replace(formed, members=_handed_out(formed, state.members.here))


def _trained(state: OneShot, updates: Updates) -> OneShot:
    """Run every group's FedAvg; a group without an answer keeps its model."""
    groups = [
        ([u for u in updates if u.silo.name in group], group) for group in state.members.groups
    ]
    kept = [update for own, group in groups for update in accepted(own, group)]
    members = average_groups(state.members, kept)
    models = list(state.group_models)
    for group in members.groups:
        if group[0] in state.group_of:
            models[state.group_of[group[0]]] = members.models[group[0]]
    return replace(state, members=members, group_models=tuple(models))


def _handed_out(state: OneShot, here: Sequence[str]) -> Members:
    return give_out(state.members, here, state.group_of, state.group_models)
