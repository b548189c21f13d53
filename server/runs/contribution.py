"""A run that trains the groups of a finished run again, without each silo in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.features.evaluation.answers import MOST_MODELS
from coterie.features.evaluation.coordinator import FILE as EVALUATION
from coterie.features.evaluation.coordinator import Given, Judgement
from coterie.features.statistics.survey import FILE as STATISTICS
from coterie.server.runs.config import RunConfig
from coterie.server.runs.going_on import complete, recorded_config
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import reading
from coterie.strategies.errors import refused
from coterie.strategies.plain.leave_one_out import TIMES, LeaveOneOut, as_text
from coterie.strategies.rounds.handles import Arrays, Model, arrays_of
from coterie.wire import model_hash

FILE = "contribution.json"
"""File name of the evaluation in the run's folder."""
SUMS = "sums.json"
"""File name of models that are fitted by sums."""
ANSWERS = (STATISTICS, EVALUATION, FILE, SUMS)
"""Files of what silos answered in a run that leaves no models."""
OWN = frozenset({"rounds", "min-silos", "wait-for-silos", "runs-dir", "parent", "label"})
"""Keys that such a run has by itself; how silos train is that of its parent."""


def with_groups(config: RunConfig, root: Path) -> RunConfig:
    """Return the configuration with groups, task and local training of the run ``parent``.

    Raises:
        FederationError: it is not a complete run, has no group of several silos or too large ones,
            or cannot be trained again in this way.
    """
    source = reading.find_run(config.parent, root)
    run = complete(source)
    before = recorded_config(run)
    groups = tuple(sorted(tuple(sorted(g)) for g in run.final_groups if len(g) > 1))
    if problems := "; ".join(_problems(before, groups)):
        raise refused(f"what each silo brings to {source.name} cannot be measured: {problems}.")
    own = {key: value for key, value in config.plain().items() if key in OWN}
    return RunConfig.read(
        {
            **before.of_training(),
            **own,
            "strategy": wire.CONTRIBUTION,
            "parent": source.name if source.parent == root else str(source),
            "given-groups": as_text(groups),
        }
    )


def _problems(before: RunConfig, groups: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    if not groups:
        yield "it has no group of several silos"
    if held := sorted(before.kept_by_silos()):
        yield f"silos hold models or layers for that run alone ({', '.join(held)})"
    largest, most = max(map(len, groups), default=0), MOST_MODELS // TIMES - 1
    if largest > most:
        yield f"its largest group has {largest} silos, and at most {most} are possible"


def name_of(letter: str, left_out: Iterable[str] = (), time: int = 0) -> str:
    """Return the name of the model of a group, without some silos, in one of several trainings."""
    names = " and ".join(sorted(left_out))
    without = f" without {names}" if names else ""
    return f"{letter}{without}" + (f" ({time + 1})" if time else "")


def judgement_of(config: RunConfig, state: Any) -> tuple[Judgement, dict[str, Arrays]]:
    """Return the trained models, each with the silos that measure it, and their arrays by name."""
    algorithm = config.algorithm
    assert isinstance(algorithm, LeaveOneOut)
    letters = letters_of(algorithm.given)
    models: dict[str, Arrays] = {}
    found: list[Given] = []

    def add(name: str, silos: tuple[str, ...], model: Model) -> None:
        models[name] = arrays_of(model)
        found.append(Given(name, silos, model_hash(models[name]), only=True))

    held = state.members.models
    for group in algorithm.given:
        if here := [name for name in group if name in held]:
            add(letters[group[0]], group, held[here[0]])
    for one in algorithm.variants():
        if one.purpose in state.variants:
            name = name_of(letters[one.silos[0]], one.left_out, one.time)
            add(name, one.silos, state.variants[one.purpose])
    return Judgement(config.task, Path(config.parent).name, tuple(found)), models
