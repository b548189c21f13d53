"""The models of a run, or of a file, that silos evaluate: read where they are, not copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.features.evaluation.coordinator import (
    FILE,
    Given,
    Judgement,
    read_judgement,
    require_models,
)
from coterie.features.unlabelled.placing import shown
from coterie.server.paths import with_federation
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.config import RunConfig
from coterie.server.runs.going_on import CHECKPOINTS, complete, model_file, recorded_config
from coterie.server.runs.initial import read_model
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import reading
from coterie.strategies.errors import refused
from coterie.strategies.rounds.handles import is_seen
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.result import mean_model
from coterie.wire import Model, model_hash


@dataclass(frozen=True)
class Judged:
    """The models to evaluate, by name, and the committed state of their run if there is one."""

    judgement: Judgement
    models: Mapping[str, Model]
    standing: Any = None


def judged(config: RunConfig, folder: Path) -> Judged:
    """Return the models that ``config.parent`` names.

    ``folder`` is the run's own. If it has an earlier judgement, which a crash left without answers,
    the models must be the same.

    Raises:
        FederationError: they cannot be read, or are not of this task; or they have changed.
    """
    file = model_file(config)
    found = _of_file(file, config) if file is not None else _of_run(config, folder.parent)
    require_models(found.judgement.models, config.parent)
    if (folder / FILE).exists() and read_judgement(folder / FILE).models != found.judgement.models:
        raise refused(
            f"the models of {config.parent} have changed since this run began. Start a new one: "
            f"`{with_federation(f'coterie evaluate {config.parent}', folder)}`."
        )
    return found


def _of_file(file: Path, config: RunConfig) -> Judged:
    model = read_model(file)
    given = Given(wire.plain_text(file.stem, wire.MAX_WORD) or "model", sha256=model_hash(model))
    return Judged(Judgement(config.task, file.name, (given,)), {given.name: model})


def _of_run(config: RunConfig, root: Path) -> Judged:
    source = reading.find_run(config.parent, root)
    run = complete(source)
    before = recorded_config(run)
    if (before.task, before.task_keys) != (config.task, config.task_keys):
        raise refused(
            f"{source.name} is a run of task {before.task} {before.task_keys or ''}, not of "
            f"{config.task} {config.task_keys or ''}. Leave out --task."
        )
    if before.personal:
        raise refused(
            f"the models of {source.name} lack the layers that stayed at its silos (personal = "
            f"{before.personal}), so no other silo can evaluate them."
        )
    found: tuple[int, Any] | None = Checkpoints(source / CHECKPOINTS).load()
    if found is None:
        raise refused(f"{source} has no checkpoint, and with it no models that can be evaluated.")
    standing = found[1]
    models = dict(_models(before, standing))
    return Judged(
        Judgement(config.task, source.name, tuple(models)),
        {given.name: model for given, model in models.items()},
        standing,
    )


def _models(config: RunConfig, standing: Any) -> Iterator[tuple[Given, Model]]:
    """Yield every group's model; silos that are apart, or alone, have their own."""
    algorithm, checkpoint = config.algorithm, standing.checkpoint
    state, apart = checkpoint.state, checkpoint.apart
    members = algorithm.members(state)
    held = {**algorithm.models(state), **apart}
    groups = [tuple(n for n in group if n not in apart) for group in algorithm.groups(state)]
    groups = [*filter(None, groups), *((name,) for name in apart)]
    letters = letters_of(groups)
    open_to_all = set[Group](shown(groups, members.minimums))
    for group in sorted(groups, key=lambda group: (len(group) == 1, group)):
        own = {name: held[name] for name in group if name in held and is_seen(held[name])}
        mean = mean_model(own, members.sizes)
        if mean is not None:
            name = letters[group[0]] or group[0]
            if not letters[group[0]] and name in letters.values():  # a silo that is called A
                name += " alone"
            yield Given(name, group, model_hash(mean), only=group not in open_to_all), mean
