"""Move every group's model by a server optimiser's step instead of to its silos' mean.

The stage acts on a state whose means are known, so in a secure run as well. A silo that trains
alone is not affected. A silo has the moments of its group, as it has the group's model: a new group
has the mean of its members' moments, weighted by samples, like the mean of their models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.features.server_optimiser.keys import ServerOptimiser
from coterie.features.server_optimiser.steps import Moments, step
from coterie.strategies.rounds.handles import Arrays, Model, is_seen
from coterie.strategies.rounds.models import is_statistic, same_model
from coterie.strategies.rounds.stage import Came, Scene, Settled, Stage


@dataclass(frozen=True)
class Memory:
    """What the stage remembers.

    Attributes:
        moments: silo → those of its group.
        starts: silo → the model that its group has just trained; empty between trainings.
    """

    moments: Mapping[str, Moments] = field(default_factory=dict)
    starts: Mapping[str, Arrays] = field(default_factory=dict)


@dataclass(frozen=True)
class Stepped:
    """A group's mean, and the model that the optimiser makes of it."""

    mean: Arrays
    model: Arrays
    moments: Moments


class ServerOptimisation(Stage):
    """The stage for server optimisers."""

    name = "server_optimiser"
    first = Memory()

    def __init__(self, chosen: ServerOptimiser) -> None:
        self.chosen = chosen

    def incoming(self, mine: Memory, scene: Scene, came: Came) -> tuple[Memory, Came]:
        """Note what the groups trained whose silos' training counts."""
        if not scene.training:
            return mine, came
        groups = scene.algorithm.groups(came.state)
        grouped = {name for group in groups for name in group}  # nobody while groups are formed
        counting = [u for u in came.updates if not u.purpose and u.silo.name in grouped]
        starts = {u.silo.name: u.start for u in counting if is_seen(u.start)}
        return replace(mine, starts=starts), came

    def settle(self, mine: Memory, scene: Scene, state: Any) -> Settled:
        """After a training, replace the means in a state by the optimiser's models."""
        if not mine.starts:
            return Settled(state)
        algorithm = scene.algorithm
        buffers = sorted({name for silo in scene.now.silos for name in silo.buffers})
        made: dict[str, Stepped] = {}
        for mean, names in _shared(algorithm.models(state)):
            trained = [name for name in names if name in mine.starts]
            if trained and not same_model(mean, mine.starts[trained[0]]):
                own = self._step(mine.starts[trained[0]], mean, _latest(names, mine), buffers)
                made |= dict.fromkeys(names, own)
        moments = {**mine.moments, **{name: own.moments for name, own in made.items()}}
        new: dict[int, tuple[Model, Arrays]] = {
            id(own.mean): (own.mean, own.model) for own in made.values()
        }
        for mean, names in _shared(algorithm.next_models(state)):
            if id(mean) not in new and made.keys() & set(names):
                shares = _shares(names, algorithm.members(state).sizes)
                new[id(mean)] = (mean, _mixed(mean, shares, made))
                mixed = mean_moments({n: moments.get(n, Moments()) for n in names}, shares)
                moments |= dict.fromkeys(names, mixed)
        state = algorithm.with_models(state, lambda model: new.get(id(model), (None, model))[1])
        return Settled(state, mine=Memory(moments))

    def _step(
        self, start: Arrays, mean: Arrays, before: Moments, buffers: Sequence[str]
    ) -> Stepped:
        settings = self.chosen
        model, after = step(
            settings.name,
            start,
            mean,
            before,
            lr=settings.rate,
            momentum=settings.momentum,
            tau=settings.tau,
            moves=lambda name: mean[name].dtype.kind == "f" and not is_statistic(name, buffers),
        )
        return Stepped(mean, model, after)


def _shared(held: Mapping[str, Model]) -> Iterable[tuple[Arrays, list[str]]]:
    """Return the models that several silos hold, each with the silos' sorted names."""
    found: dict[int, tuple[Model, list[str]]] = {}
    for name in sorted(held):
        found.setdefault(id(held[name]), (held[name], []))[1].append(name)
    return [(model, own) for model, own in found.values() if len(own) > 1 and is_seen(model)]


def _latest(names: Sequence[str], mine: Memory) -> Moments:
    """Return a group's moments: those after most steps; a silo that joined has made fewer."""
    own = (mine.moments[name] for name in names if name in mine.moments)
    return max(own, key=lambda moments: moments.steps, default=Moments())


def _shares(names: Sequence[str], sizes: Mapping[str, float]) -> dict[str, float]:
    total = sum(sizes.get(name, 0.0) for name in names)
    return {name: sizes.get(name, 0.0) / total for name in names} if total else {}


def _mixed(mean: Arrays, shares: Mapping[str, float], made: Mapping[str, Stepped]) -> Arrays:
    """Return the model of a new group: the mean of what its members' former groups stepped to.

    ``mean`` is that of the former groups' means.
    """
    parts = [(share, made[name]) for name, share in shares.items() if name in made]
    mixed = dict(mean)
    for key, array in mean.items():
        if array.dtype.kind == "f":
            moved = sum(w * (own.model[key].astype(float) - own.mean[key]) for w, own in parts)
            mixed[key] = (array + moved).astype(array.dtype)
    return mixed


def mean_moments(own: Mapping[str, Moments], shares: Mapping[str, float]) -> Moments:
    """Return the weighted mean of silos' moments; a silo without any counts as zero."""

    def mean(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, share in shares.items():
            for key, array in parts[name].items():
                found[key] = found.get(key, 0.0) + share * array
        return {key: np.asarray(array) for key, array in found.items()}

    return Moments(
        max(one.steps for one in own.values()),
        mean({name: one.first for name, one in own.items()}),
        mean({name: one.second for name, one in own.items()}),
    )
