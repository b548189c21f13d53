"""Find the group that each silo without labels resembles most, and hand it that group's model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coterie import wire
from coterie.features.unlabelled.placing import Place, UnlabelledSilos, look, place, shown
from coterie.strategies.rounds.algorithm import Algorithm, Exchanges
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.result import mean_model
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.stage import Held, Outcome, Played, Room, Scene, Stage

log = logging.getLogger("coterie.run")


class Unlabelled(Stage):
    """The stage for silos without labels; remembers what is known about them."""

    name = "unlabelled"
    first = UnlabelledSilos()

    def ask(self, mine: UnlabelledSilos, scene: Scene) -> Exchanges[UnlabelledSilos]:
        """Compare silos without labels with some of each group."""
        groups = _shown(scene.algorithm, scene.state)
        found: UnlabelledSilos = yield from look(mine, _unlabelled(scene.room), groups, scene.now)
        return found

    def held(self, mine: UnlabelledSilos, scene: Scene, held: Held) -> Held:
        """Give them the mean of their group's models."""
        places = _places(mine, scene.room, scene.algorithm, scene.state)
        sizes = scene.algorithm.members(scene.state).sizes
        models, entries, placed = dict(held.models), dict(held.entries), dict(held.placed)
        for name, found in places.items():
            group = found.groups[0].group if found.found else ()
            own = {n: held.models[n] for n in group if n in held.models}
            mean = mean_model(own, sizes)
            if mean is not None:
                models[name], placed[name] = mean, group
                entries[name] = {**entries.get(name, {}), wire.PLACED: found.why}
        notes = {**held.notes, **_entry(places)}
        return replace(held, models=models, entries=entries, placed=placed, notes=notes)

    def after(self, mine: UnlabelledSilos, played: Played) -> tuple[UnlabelledSilos, Outcome]:
        """Note in the record where they belong now."""
        places = _places(mine, played.room, played.algorithm, played.state)
        for name, found in places.items():
            log.debug("silo %s, without labels: %s", name, found.why)
        return mine, Outcome(_entry(places))


def _unlabelled(room: Room) -> list[Silo]:
    return [silo for silo in room.here if silo.unlabelled]


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
