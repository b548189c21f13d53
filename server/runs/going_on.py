"""Where a run begins: at its first round, after an interruption or its end, or in another run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.features.stopping.coordinator import Stopping
from coterie.server.paths import place, with_federation
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.config import COMMANDS, RunConfig
from coterie.server.runs.record import EVENTS, OWN_APP, Run, reading
from coterie.strategies.auto.budget import PLANNED as PLANNED_BY_AUTO
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.hcct.alpha import PLANNED
from coterie.strategies.plain.leave_one_out import as_text
from coterie.strategies.rounds.algorithm import Algorithm
from coterie.strategies.rounds.checkpoint import Checkpoint

CHECKPOINTS = "checkpoints"
"""Name of the checkpoint folder within the run's folder."""


@dataclass(frozen=True)
class Beginning:
    """Where a run begins.

    Attributes:
        config: its keys.
        earlier: the record that it goes on with; None: a new one.
        after: the round after which it goes on; 0: before round 1.
        added: rounds that it gets in addition to those of a complete run.
        standing: the committed state after that round; None: there is none.
        returns: whether it waits for the silos of that round.
    """

    config: RunConfig
    earlier: Run | None = None
    after: int = 0
    added: int = 0
    standing: Any = None
    returns: bool = False


def begin(config: RunConfig, folder: Path, checkpoints: Checkpoints) -> Beginning:
    """Return where a run begins; one from another run gets its first checkpoint here.

    Args:
        folder: the run's, which exists and is locked.
        checkpoints: in it.

    Raises:
        FederationError: it cannot begin there.
    """
    if config.resume:
        earlier, keys = earlier_run(config, folder)
        after, standing = checkpoints.load() or (0, None)
        if standing is None and config.more_rounds:
            raise _no_checkpoint(folder)
        return Beginning(keys, earlier, after, config.more_rounds, standing, returns=True)
    if config.parent and model_file(config) is None and config.strategy not in COMMANDS:
        return _from_run(config, folder, checkpoints)
    return Beginning(config)


def with_groups_of(config: RunConfig, root: Path) -> RunConfig:
    """Return the keys with the last groups of the run ``groups-of``, if they name one.

    Raises:
        FederationError: it is not a complete run.
    """
    keys = config.plain()
    if not (named := str(keys.get("groups-of", ""))):
        return config
    groups = complete(reading.find_run(named, root)).final_groups
    return RunConfig.read({**keys, "given-groups": as_text(groups)})


def recorded_config(run: Run) -> RunConfig:
    """Return the configuration of a record.

    Raises:
        FederationError: the run is of an own Flower app, which only the app can continue.
    """
    if run.config.get(OWN_APP):
        raise refused(
            f"{run.name} was started by a Flower app. To continue it, start that app with "
            f"coterie.recorded(strategy, resume={run.name!r})."
        )
    return RunConfig.read(run.config)


# ---------------------------------------------------------------- in the same folder


def earlier_run(config: RunConfig, folder: Path) -> tuple[Run, RunConfig]:
    """Return the record of the run that goes on, and the keys of its further rounds.

    With ``config.more_rounds``, record and keys have so many rounds more: a run that is killed
    from now on is resumed like any other.

    Raises:
        FederationError: there is no such run; it is complete and gets no more rounds; or it is to
            get more, and is not complete or cannot have them.
    """
    if not config.more_rounds:
        run = reading.read_unfinished(folder)
        return run, recorded_config(run)
    run = complete(folder)
    before = recorded_config(run)
    for why in _why_closed(run, before):
        every = with_federation(f"coterie run --from {folder.name}", folder)
        advice = f"{_new_run(folder)} Or all of them: `{every}`."
        if run.rounds and "trees" in run.rounds[-1].details:
            advice = "Start a new run: trees that have grown are not trained further."
        raise refused(f"the run in {folder} gets no more rounds: {why}. {advice}")
    after = _longer(before, before.rounds + config.more_rounds)
    return replace(run, config=after.plain()), after


def going_on(config: RunConfig, folder: Path) -> RunConfig:
    """Return the keys that let the run in ``folder`` go on, after a check of its record.

    Raises ``FederationError`` as ``earlier_run``.
    """
    earlier_run(config, folder)
    more = {"more-rounds": config.more_rounds} if config.more_rounds else {}
    return RunConfig.read({"resume": folder.name, "runs-dir": str(folder.resolve().parent), **more})


def complete(folder: Path) -> Run:
    """Return the record of a run; ``FederationError`` if it is not complete."""
    run = reading.read_whole(folder)
    if run.status != "completed":
        raise refused(
            f"the run in {folder} is {run.status} after {len(run.rounds)} of {run.planned_rounds} "
            f"rounds. Finish it first: `{resume_command(folder)}`."
        )
    return run


def resume_command(folder: Path) -> str:
    """Return the command that continues an interrupted run."""
    return with_federation(f"coterie run resume {folder.name}", folder)


def _why_closed(run: Run, config: RunConfig) -> Iterator[str]:
    """Yield why a complete run cannot have more rounds."""
    if not run.planned_rounds:
        yield "it trained nothing"
    if run.ended_early:
        yield f"it ended early, and would again ({run.ended_early})"
    yield from _follows_rounds(config)


def _follows_rounds(config: RunConfig) -> Iterator[str]:
    if config.schedule != "constant" or config.lr_warm_up:
        key = "lr-warm-up" if config.lr_warm_up else f"schedule = {config.schedule}"
        yield f"its learning rate follows the planned number of rounds ({key})"


def planned_by_rounds(folder: Path) -> str:
    """Return why one longer run would have differed from this one before its end; empty: never."""
    config = recorded_config(reading.read_whole(folder))
    if config.strategy == "auto" and config.rounds < PLANNED_BY_AUTO:
        return f"auto has another race and budget in a run of fewer than {PLANNED_BY_AUTO} rounds"
    if config.plain().get("alpha") == "auto" and config.rounds < PLANNED:
        return f"alpha = auto hurries in a run of fewer than {PLANNED} rounds"
    return ""


def _longer(config: RunConfig, rounds: int, **more: Any) -> RunConfig:
    return RunConfig.read(config.plain() | {"rounds": rounds, "more-rounds": 0, **more})


def _no_checkpoint(folder: Path) -> FederationError:
    return refused(f"{folder} has no checkpoint, so the run cannot continue. {_new_run(folder)}")


def _new_run(folder: Path) -> str:
    return (
        "Start a new run from one of its models: `coterie run STRATEGY --from "
        f"{folder / 'models'}/SILO.safetensors`."
    )


# ---------------------------------------------------------------- in another folder


def model_file(config: RunConfig) -> Path | None:
    """Return the file with the run's first model, if it begins from one."""
    file = place(config.parent) if config.parent else Path()
    return file if file.suffix == ".safetensors" else None


def _from_run(config: RunConfig, folder: Path, checkpoints: Checkpoints) -> Beginning:
    """Begin with the groups, models and memory of another run, and with the silos of today.

    Rounds are numbered on, and the record begins with that run's. A silo that took part keeps its
    place, whatever its data are now; any other is a newcomer.
    """
    source = reading.find_run(config.parent, folder.parent)
    parent = complete(source)
    if why := "; ".join(_why_not_from(parent, recorded_config(parent), config)):
        raise refused(f"no run can begin from the one in {source}: {why}. {_new_run(source)}")
    found: tuple[int, Any] | None = Checkpoints(source / CHECKPOINTS).load()
    if found is None:
        raise _no_checkpoint(source)
    after, standing = found
    name = source.name if source.parent.resolve() == folder.parent.resolve() else str(source)
    keys = _longer(config, after + config.rounds, parent=name)
    shutil.copyfile(source / EVENTS, folder / EVENTS)
    standing = replace(standing, checkpoint=_of_today(keys.algorithm, standing.checkpoint))
    checkpoints.save(after, standing)  # the record comes after it: then a crash is resumed
    earlier = replace(
        parent,
        folder=folder,
        config=keys.plain(),
        started="",
        refused={},
        collaboration=None,
        resumed=(),
    )
    return Beginning(keys, earlier, after, config.rounds, standing)


def _why_not_from(parent: Run, before: RunConfig, config: RunConfig) -> Iterator[str]:
    for key, was, own in (
        ("strategy", before.strategy, config.strategy),
        ("task", before.task, config.task),
        ("the task's keys", before.task_keys, config.task_keys),
    ):
        if was != own:
            yield f"{key} must be the same, {was}. Got {own}"
    if not parent.planned_rounds:
        yield "it trained nothing"
    held = sorted({*before.kept_by_silos(), *config.kept_by_silos()})
    if held:
        yield f"silos hold models or layers for that run alone ({', '.join(held)})"
    yield from _follows_rounds(config)


def _of_today(algorithm: Algorithm[Any], checkpoint: Checkpoint[Any]) -> Checkpoint[Any]:
    """Return a state from which another run begins: without patience and marks of data."""
    members = replace(algorithm.members(checkpoint.state), data={})
    kept = {name: own for name, own in checkpoint.kept.items() if name != Stopping.name}
    state = algorithm.with_members(checkpoint.state, members)
    return replace(checkpoint, state=state, ended_early="", kept=kept)


def parent_of(run: Run) -> str:
    """Return the run that a run began from; empty if there is none."""
    parent = str(run.config.get("parent", ""))
    if not parent.endswith(".safetensors"):
        return Path(parent).name
    folder = Path(parent).parent
    folder = folder.parent if folder.name == "models" else folder
    return folder.name if (folder / reading.RECORD).exists() else ""
