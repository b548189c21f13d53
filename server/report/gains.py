"""Benefit of a run: each silo's error compared with local training and with a global model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from coterie import wire
from coterie.features.sums.trees.coordinator import Growth
from coterie.server.report.families import entries_in
from coterie.server.runs.config import ALONE_WITH_TREES, keys_alone
from coterie.server.runs.record import (
    EVENTS,
    Run,
    SiloFacts,
    errors_of,
    event_of,
    metrics,
    read_run,
)
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.options import dashed

Keys = Mapping[str, Any]
"""Key of a run → its value."""
DATA_NOTE = "silos.txt"
"""File in a simulated run's folder: a digest of the sources of its silos' data."""

ONE_OF_TREES: Keys = {"strategy": "trees", "given-groups": "", "groups-of": ""}
OF_ALL = ("task", "seed", "rounds")
"""Keys that affect a silo's own training; runs with equal values are comparable."""
OTHERS = ("wire-format", "primary-metric", "evaluate-trained", "personal")
"""Keys without an effect on it, and that of the metric: the records have the metric itself."""
BY_STEPS = tuple({*map(dashed, wire.SiloKeys.model_fields)} - {*OF_ALL, *OTHERS})
"""More such keys of networks."""
OF_TREES = tuple(name.replace("_", "-") for name in Growth.model_fields)
"""More such keys of boosted trees."""


@dataclass(frozen=True)
class Gains:
    """The last errors of a run and of those it is compared with.

    Errors are shares in [0, 1], on each silo's own test data.

    Attributes:
        together: silo → its last error in this run.
        stayed: silos that took part to the end: only their gains count.
        alone, common: silo → its last error with local training, or with one global model; empty
            without such a run.
        alone_run, common_run: names of those runs, or empty.
    """

    together: Mapping[str, float]
    stayed: frozenset[str]
    alone: Mapping[str, float]
    common: Mapping[str, float]
    alone_run: str = ""
    common_run: str = ""

    @property
    def lasting(self) -> dict[str, float]:
        """The errors of silos that took part to the end."""
        return {name: error for name, error in self.together.items() if name in self.stayed}

    @property
    def gain(self) -> dict[str, float]:
        """Silo → its gain over local training; positive is better."""
        return metrics.gains(self.lasting, self.alone)

    @property
    def ipr(self) -> float:
        """Share of silos with a gain (``metrics.ipr``); NaN if there is nothing to compare."""
        return metrics.ipr(self.lasting, self.alone)

    @property
    def rsd(self) -> float:
        """Deviation of the gains (``metrics.rsd``); NaN if there is nothing to compare."""
        return metrics.rsd(self.lasting, self.alone)

    @property
    def mean_gain(self) -> float:
        """The mean gain; NaN if there is nothing to compare."""
        return fmean(self.gain.values()) if self.gain else math.nan

    @property
    def mean_alone(self) -> float:
        """The mean error of local training, of the silos in ``gain``; NaN without any."""
        return mean_of(self.alone[name] for name in self.gain)

    @property
    def mean_error(self) -> float:
        """The mean error of silos with a baseline, or of all if there is none; NaN without any."""
        errors = {n: self.lasting[n] for n in self.gain} or self.lasting
        return fmean(errors.values()) if errors else math.nan


def compare(run: Run, *, alone: Run | None, common: Run | None) -> Gains:
    """Return this run's last errors with those of the others."""
    return Gains(
        together=run.last_errors(),
        stayed=frozenset(
            next((o.errors for o in reversed(run.rounds) if o.errors), errors_of(run.initial))
        ),
        alone={} if alone is None else alone.last_errors(),
        common={} if common is None else common.last_errors(),
        alone_run="" if alone is None else alone.name,
        common_run="" if common is None else common.name,
    )


def baselines(run: Run) -> tuple[Keys, Keys]:
    """Return the keys of runs to compare with: local training, and one model of all silos.

    A model of trees is compared with trees. Of a task that has both families, those runs name the
    one that most silos use.
    """
    used = [str(entry["family"]) for entry in entries_in(run.rounds).values()]
    most = max(wire.FAMILIES, key=used.count)
    trees = most == wire.TREES if used else grows_trees(run)
    alone = keys_alone(trees=trees, family=most if used else "")
    return alone, {**alone, **(ONE_OF_TREES if trees else {"strategy": "fedavg"})}


def grows_trees(run: Run) -> bool:
    """Return whether the models of a run are boosted trees, so far as its last round tells."""
    return bool(run.rounds) and "trees" in run.rounds[-1].details


def has(run: Run, keys: Keys) -> bool:
    """Return whether a run is one with these keys; a missing key is an empty one."""
    return all({**run.config, "strategy": run.strategy}.get(k, "") == v for k, v in keys.items())


def find_comparison(run: Run, keys: Keys) -> Run | None:
    """Return the completed run with these keys in the same folder that is comparable, or None.

    Silos with the same name may have different data in another run, so their numbers of samples
    must be equal too, and the primary metric. The run with the most of this run's silos is taken;
    of several, the newest.
    """
    if has(run, keys):
        return None
    folders = [path.parent for path in run.folder.resolve().parent.glob(f"*/{EVENTS}")]
    fitting = [f for f in folders if f != run.folder.resolve() and _fits(f, run.config, keys)]
    best, most = None, 0
    for folder in sorted(fitting, key=lambda f: (f / EVENTS).stat().st_mtime, reverse=True):
        try:
            found = read_run(folder, brief=True)
        except FederationError:
            continue
        count = _num_alike(run, found) if found.status == "completed" else 0
        if count > most:
            best, most = found, count
        if most == len(run.silos):
            break
    return best


def _num_alike(run: Run, other: Run) -> int:
    """Return how many silos both runs measured; 0 if one of them had different data."""
    notes = [note for note in (_data_note(run.folder), _data_note(other.folder)) if note]
    if len(set(notes)) > 1 or run.metric != other.metric:
        return 0
    count, tested, its_tested = 0, run.test_counts(), other.test_counts()
    for name in set(other.last_errors()) & set(run.silos):
        own, its = run.silos[name], other.silos.get(name, SiloFacts())
        both = tested.get(name), its_tested.get(name)
        known = math.isfinite(own.num_examples + its.num_examples)
        differ = known and own.num_examples != its.num_examples
        if differ or (all(both) and both[0] != both[1]):
            return 0
        count += known
    return count


def _data_note(folder: Path) -> str:
    try:
        return (folder / DATA_NOTE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _fits(folder: Path, config: Keys, keys: Keys) -> bool:
    """Compare the first lines of events only: reading whole records would take long."""
    try:
        with (folder / EVENTS).open(encoding="utf-8", errors="replace") as file:
            first = event_of(file.readline(1_000_000))
    except OSError:
        return False
    if first is None or any(first.config.get(key, "") != value for key, value in keys.items()):
        return False
    if keys["strategy"] != "trees":
        return _by_steps(first.config) == _by_steps(config)
    alone = ALONE_WITH_TREES.items() <= keys.items()
    return _of_trees(first.config, alone=alone) == _of_trees(config, alone=alone)


def _of_trees(config: Keys, *, alone: bool) -> dict[str, Any]:
    """Return the compared keys of trees; those of a silo alone are not personalised."""
    more = () if alone else ("personalise",)
    return {key: config.get(key) for key in (*OF_ALL, *OF_TREES, *more, *_of_task(config))}


def _of_task(config: Keys) -> list[str]:
    """Return the task's keys, without the family, by which the run is searched for."""
    return [k for k in config if k.startswith(wire.TASK_KEYS) and k != f"task.{wire.FAMILY}"]


def _by_steps(config: Keys) -> dict[str, Any]:
    """Return the compared keys of networks without those that have no effect."""
    values = {key: config.get(key) for key in (*OF_ALL, *BY_STEPS, *_of_task(config))}
    ignored = {"local-epochs"} if values["local-steps"] else set()
    if values["personalise"] == "none":
        ignored |= {"personal-epochs", "personal-lr"}
    if values["personalise"] != "ditto":
        ignored |= {"ditto-lambda"}
    if values["personalise"] != "partial":
        ignored |= {"own-penalty"}
    return {key: value for key, value in values.items() if key not in ignored}


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
