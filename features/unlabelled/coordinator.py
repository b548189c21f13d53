"""Silos that train nothing: find the group whose model each of them is given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from coterie import wire
from coterie.features.unlabelled.placing import (
    Place,
    UnlabelledSilo,
    UnlabelledSilos,
    look,
    place,
    shown,
)
from coterie.features.unlabelled.testing import Testers, measure, words
from coterie.strategies.rounds.algorithm import Algorithm, Exchanges
from coterie.strategies.rounds.handles import Arrays, Model, is_seen
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.result import mean_model
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.stage import Held, Outcome, Played, Room, Scene, Stage

log = logging.getLogger("coterie.run")


@runtime_checkable
class Grows(Protocol):
    """An algorithm that may grow trees."""

    def agreed_bins(self, state: Any) -> Arrays | None:
        """Return the bins in which discriminators see rows of trees; empty while there are none.

        None if the run's models are not trees.
        """
        ...


class Unlabelled(Stage):
    """The stage for silos without labels; remembers what is known about them."""

    name = "unlabelled"
    first = UnlabelledSilos()

    def ask(self, mine: UnlabelledSilos, scene: Scene) -> Exchanges[UnlabelledSilos]:
        """Compare silos without labels with some of each group."""
        groups = _shown(scene.algorithm, scene.state)
        here = _unlabelled(scene.room)
        found: UnlabelledSilos = yield from look(mine, here, groups, scene.now, _bins(scene))
        return found

    def held(self, mine: UnlabelledSilos, scene: Scene, held: Held) -> Held:
        """Give them the mean of their group's models."""
        places = _places(mine, scene.room, scene.algorithm, scene.state)
        chosen = {
            name: (found.groups[0].group if found.found else (), found.why)
            for name, found in places.items()
        }
        held = _given(held, chosen, scene)
        return replace(held, notes={**held.notes, **_entry(places)})

    def after(self, mine: UnlabelledSilos, played: Played) -> tuple[UnlabelledSilos, Outcome]:
        """Note in the record where they belong now."""
        places = _places(mine, played.room, played.algorithm, played.state)
        for name, found in places.items():
            log.debug("silo %s, without labels: %s", name, found.why)
        return mine, Outcome(_entry(places))


@dataclass(frozen=True)
class Tested:
    """What is known of silos that only test: the fits of groups, and else their features."""

    fits: Testers = field(default_factory=Testers)
    features: UnlabelledSilos = field(default_factory=UnlabelledSilos)


class Testing(Stage):
    """The stage for silos that only test: after the last round each is given a group's model."""

    name = "testing"
    first = Tested()

    def ask(self, mine: Tested, scene: Scene) -> Exchanges[Tested]:
        """Let them measure all groups' models; compare features where they keep that back."""
        here = [silo for silo in scene.room.here if silo.tests]
        groups = _shown(scene.algorithm, scene.state)
        models = _models(scene, groups)
        if not scene.room.final or not here or len(models) < 2:
            return mine
        fits = yield from measure(here, models)
        silent = [silo for silo in here if silo.name not in fits.of]
        features = yield from look(mine.features, silent, groups, scene.now, _bins(scene))
        return Tested(fits, features)

    def held(self, mine: Tested, scene: Scene, held: Held) -> Held:
        """Give each of them its group's model, and note why."""
        if not scene.room.final:
            return held
        chosen: dict[str, tuple[Group, str]] = {}
        entries: dict[str, Any] = {}
        groups = _shown(scene.algorithm, scene.state)
        for silo in scene.room.here:
            if not silo.tests:
                continue
            fits = mine.fits.of.get(silo.name, ())
            if fits:
                chosen[silo.name] = fits[0].group, words(fits, silo.metric)
                entries[silo.name] = [fit.entry() for fit in fits]
                continue
            known = mine.features.of.get(silo.name, UnlabelledSilo())
            found = place(known, groups, alone=scene.algorithm.alone)
            chosen[silo.name] = found.groups[0].group if found.found else (), found.why
            entries[silo.name] = found.entry()["groups"]
        held = _given(held, chosen, scene)
        notes = {
            name: {"group": list(group), "why": why, "groups": entries[name]}
            for name, (group, why) in sorted(chosen.items())
        }
        return replace(held, notes={**held.notes, "testing": notes}) if notes else held


def _given(held: Held, chosen: Mapping[str, tuple[Group, str]], scene: Scene) -> Held:
    """Give each silo the mean of its chosen group's models; no group, no model."""
    sizes = scene.algorithm.members(scene.state).sizes
    models, entries, placed = dict(held.models), dict(held.entries), dict(held.placed)
    for name, (group, why) in chosen.items():
        mean = mean_model({n: held.models[n] for n in group if n in held.models}, sizes)
        if mean is not None:
            models[name], placed[name] = mean, group
            entries[name] = {**entries.get(name, {}), wire.PLACED: why}
    return replace(held, models=models, entries=entries, placed=placed)


def _models(scene: Scene, groups: list[Group]) -> dict[Group, Model]:
    """Return the groups' models that the coordinator sees."""
    models, sizes = scene.algorithm.models(scene.state), scene.algorithm.members(scene.state).sizes
    found: dict[Group, Model] = {}
    for group in groups:
        mean = mean_model({n: models[n] for n in group if n in models}, sizes)
        if mean is not None and is_seen(mean):
            found[group] = mean
    return found


def _unlabelled(room: Room) -> list[Silo]:
    return [silo for silo in room.here if silo.unlabelled]


def _bins(scene: Scene) -> Arrays | None:
    algorithm = scene.algorithm
    return algorithm.agreed_bins(scene.state) if isinstance(algorithm, Grows) else None


def _shown(algorithm: Algorithm[Any], state: Any) -> list[Group]:
    if algorithm.alone:
        return []
    return shown(algorithm.groups(state), algorithm.members(state).minimums)


def _places(
    known: UnlabelledSilos, room: Room, algorithm: Algorithm[Any], state: Any
) -> dict[str, Place]:
    groups = _shown(algorithm, state)
    return {
        silo.name: place(known.of[silo.name], groups, alone=algorithm.alone)
        for silo in _unlabelled(room)
    }


def _entry(places: Mapping[str, Place]) -> dict[str, Any]:
    entries = {name: found.entry() for name, found in sorted(places.items())}
    return {"unlabelled": entries} if entries else {}
