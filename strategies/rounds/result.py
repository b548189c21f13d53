"""The result of a run: Flower's ``Result``, every silo's own model, and the reports."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from coterie import wire
from coterie.strategies.rounds.algorithm import Algorithm
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.handles import Arrays, Model, arrays_of, is_seen
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.models import holders, weighted_mean
from coterie.strategies.rounds.reports import Group, RoundReport


class RunResult(Result):
    """Flower's ``Result``, with every silo's own model, the groups and the reports.

    Attributes:
        evaluate_metrics_groups: round → group → result of ``evaluate_group_fn``.
        state: the algorithm's last state.
        rounds: one report per round, then the final evaluation. Those of a resumed run begin after
            its checkpoint.
    """

    def __init__(self, initial: ArrayRecord) -> None:
        self.initial = initial
        self.state: Any = None
        self.members: Members | None = None
        self.rounds: list[RoundReport] = []
        self._algorithm: Algorithm[Any] | None = None
        self.evaluate_metrics_groups: dict[int, dict[Group, MetricRecord]] = {}
        self._shared: Mapping[str, Model] = {}
        self._apart: Mapping[str, Model] = {}
        super().__init__()

    @property
    def arrays(self) -> ArrayRecord:
        """The size-weighted mean of all silos' models, computed on access.

        Silos that were moved out of their groups are left out. If models may have any shape, with
        ``PerGroup`` or several families, it is the one whose silos have the most samples.
        """
        whole = self._algorithm is not None and self._algorithm.whole
        names = {tuple(model) for model in self._shared.values() if is_seen(model)}
        if (whole or len(names) > 1) and self.members is not None:
            largest = largest_model(self._shared, self.members.sizes)
            return self.initial if largest is None else wire.encode_arrays(largest, packed=False)
        shared = {n: model for n, model in self._shared.items() if n not in self._apart}
        mean = None if self.members is None else mean_model(shared, self.members.sizes)
        return self.initial if mean is None else wire.encode_arrays(mean, packed=False)

    @arrays.setter
    def arrays(self, value: ArrayRecord) -> None:
        """Flower's own class sets an empty record."""

    @property
    def held(self) -> dict[str, Arrays]:
        """Silo → its own final model, which others may share: do not modify it.

        In a secure run, models that only a silo has are missing.
        """
        own = {**self._shared, **self._apart}
        return {n: model for n, model in own.items() if is_seen(model)}

    @cached_property
    def models(self) -> dict[str, ArrayRecord]:
        """Silo → its own final model, copied for Flower."""
        return {n: wire.encode_arrays(m, packed=False) for n, m in self.held.items()}

    @property
    def global_model(self) -> Arrays | None:
        """The model kept by silos that have none in ``models``; None if there is none."""
        model = None if self._algorithm is None else self._algorithm.global_model(self.state)
        return model if model is None or is_seen(model) else None

    @property
    def groups(self) -> dict[int, list[list[str]]]:
        """Round → the groups that trained together."""
        return {r.round: [list(group) for group in r.groups] for r in self.rounds}

    def group_model(self, group: Group) -> ArrayRecord | None:
        """Return the size-weighted mean of a group's models, usually one; None without sizes."""
        held = {**self._shared, **self._apart}
        own = {name: held[name] for name in group if name in held}
        mean = None if self.members is None else mean_model(own, self.members.sizes)
        return None if mean is None else wire.encode_arrays(mean, packed=False)

    def stand(self, algorithm: Algorithm[Any], standing: Checkpoint[Any]) -> None:
        """Update the result from a checkpoint."""
        self.state, self.members = standing.state, algorithm.members(standing.state)
        self._shared = algorithm.models(standing.state)
        self._apart = standing.apart
        self._algorithm = algorithm
        with suppress(AttributeError):  # they are computed when they are asked for
            del self.models


def largest_model(models: Mapping[str, Model], sizes: Mapping[str, float]) -> Arrays | None:
    """Return the model that silos with the most samples hold; None while no size is known."""
    sized = {name: model for name, model in models.items() if sizes.get(name, 0) > 0}
    held = holders(sized)
    if not held:
        return None
    model, _ = max(held, key=lambda one: sum(sizes[name] for name in one[1]))
    return arrays_of(model)


def mean_model(models: Mapping[str, Model], sizes: Mapping[str, float]) -> Arrays | None:
    """Return the size-weighted mean of the models that are seen; None while no size is known."""
    seen = {name: model for name, model in models.items() if is_seen(model)}
    sized = {name: model for name, model in seen.items() if sizes.get(name, 0) > 0}
    held = holders(sized)
    if not held:
        return None
    distinct = [arrays_of(model) for model, _ in held]
    return weighted_mean(distinct, [sum(sizes[n] for n in names) for _, names in held])
