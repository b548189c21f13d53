"""A comparison's checked file, and the runs that it requests.

The file is TOML::

    title = "Three kinds of digits"
    task = "digits"
    data = "data"                  # folder, relative to the file; --data and $COTERIE_DATA win
    seeds = [0, 1, 2]              # of the split and of the runs
    folds = 5                      # of a declared task: cross-validation, five runs for every seed
    target = 0.1                   # mean of the primary metric over silos, for rounds to target
    label-counts = false           # whether silos share their samples per label
    column-sums = false            # whether they share means, for a task's scale = "federation"
    silos = 10                     # with [split]: cut from one folder ...

    [split]
    kind = "dirichlet"             # a split for simulations
    dirichlet-alpha = 0.1

    [options]                      # more options of the task, the same at every silo
    train = 100

    [[silos]]                      # ... or, in place of silos and [split], one by one
    name = "north"
    options = { train = 40, rotation = 90 }    # files and folders are relative to this file

    [run]                          # run keys, for every strategy
    rounds = 20

    [[strategies]]
    name = "HCCT, α 50"            # by default the strategy's
    strategy = "hcct"
    alpha = 50.0
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from coterie import wire
from coterie.server.machine.local import SiloSpec
from coterie.server.runs.config import (
    RunConfig,
    foreign_keys,
    keys_alone,
    require_silos,
    trains_alone,
)
from coterie.server.runs.record.metrics import Lead
from coterie.server.study.comparison import Repeat
from coterie.server.study.silos import describe_head
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.fedgenp.generative import Generative
from coterie.strategies.rounds.options import dashed
from coterie.tasks import load_task
from coterie.tasks.base import Option, Task, TaskError
from coterie.tasks.families import families_of
from coterie.tasks.options import as_option, place_of, with_task_keys
from coterie.tasks.own.declared import DeclaredTask, load_declared
from coterie.tasks.simulation import Simulation, placed, split_problem
from coterie.tasks.toml import checked, read_table

ALONE = "local"
"""Name of local training, where the file does not list it."""
SET_HERE = ("strategy", "seed", "task", "label", "runs-dir", "min-silos", "churn", "baseline-run")
"""Keys that the comparison sets, so that all strategies have the same silos and seeds."""


Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


RunKeys = Annotated[dict[str, Any], BeforeValidator(with_task_keys)]


class SiloEntry(BaseModel):
    """One silo of a file that lists them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=64)
    options: dict[str, Annotated[Option, BeforeValidator(as_option)]] = Field(default_factory=dict)
    alpha: float | None = Field(None, ge=0)

    @field_validator("name")
    @classmethod
    def _name_is_a_silos(cls, name: str) -> str:
        if not wire.is_silo_name(name):
            raise ValueError("a silo's name may have only letters, digits, '.', '_' and '-'")
        return name


class CompareFile(BaseModel):
    """A comparison's file. See the module's docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=dashed)

    title: str = ""
    task: str = Field("digits", min_length=1)
    data: str = ""
    seeds: list[Seed] = Field(min_length=1)
    folds: int | None = Field(None, ge=2, le=1000)
    target: float | None = Field(None, gt=0, allow_inf_nan=False)
    label_counts: bool = Field(False, strict=True)
    column_sums: bool = Field(False, strict=True)
    silos: Annotated[int, Field(ge=1, le=10_000)] | Annotated[list[SiloEntry], Field(min_length=1)]
    split: dict[str, Option] = Field(default_factory=dict)
    options: dict[str, Annotated[Option, BeforeValidator(as_option)]] = Field(default_factory=dict)
    run: RunKeys = Field(default_factory=dict)
    strategies: list[RunKeys] = Field(min_length=1)

    @model_validator(mode="after")
    def _silos_are_named_or_cut(self) -> CompareFile:
        if isinstance(self.silos, int):
            if "kind" not in self.split:
                raise ValueError("silos as a number needs a [split] with its kind")
            if problem := split_problem(self.split):
                raise ValueError(problem)
        elif self.split:
            raise ValueError("a [split] needs silos as a number, not a list of silos")
        else:
            names = [silo.name for silo in self.silos]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"two silos are called {twice[0]!r}")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds must differ from each other")
        if nameless := [entry for entry in self.strategies if "strategy" not in entry]:
            raise ValueError(f"every strategy needs a 'strategy'. Got {nameless[0]}")
        return self


@dataclass(frozen=True)
class Comparison:
    """The runs that a comparison consists of.

    Attributes:
        file: with absolute paths to the data folder and to the file that declares the task.
        runs: name → keys of a run, without seed.
        task: the silos' name for the task.
        fingerprint: of the task's declaration; empty if no file declares it.
        digest: of the silos' data, if they were given as arrays or the task is an app.
    """

    file: CompareFile
    runs: Mapping[str, Mapping[str, Any]]
    task: str
    fingerprint: str = ""
    digest: str = ""

    @property
    def partly_shared(self) -> dict[str, list[str]]:
        """Key of [run] that not every strategy has → the runs that receive it."""
        having = {key: [n for n, own in self.runs.items() if key in own] for key in self.file.run}
        return {key: names for key, names in having.items() if len(names) < len(self.runs)}

    @property
    def alone(self) -> str:
        """The name of the run that is the baseline of the others."""
        return next(name for name, keys in self.runs.items() if trains_alone(keys))

    @property
    def repeats(self) -> list[Repeat]:
        """The repeats, in the order in which they are run."""
        folds = range(1, self.file.folds + 1) if self.file.folds else (0,)
        return [Repeat(seed, fold) for seed in self.file.seeds for fold in folds]

    def drawn(self) -> set[str]:
        """Return the silos whose test samples every repeat redraws.

        Raises:
            TaskError: the data of a declared task's silo cannot be read.
        """
        first, other = self.silos(Repeat(0, 1)), self.silos(Repeat(1, 2))
        task = load_declared(Path(self.file.task)) if is_declared(self.file.task) else None
        return {
            one.name
            for one, its in zip(first, other, strict=True)
            if one.options != its.options and (task is None or task.draws_test_part(one.options))
        }

    def silos(self, repeat: Repeat) -> list[SiloSpec]:
        file, seed = self.file, repeat.seed
        if not isinstance(file.silos, int):
            data = {"data": file.data} if file.data else {}
            drawn: dict[str, Option] = {"split-seed": seed}
            if is_declared(file.task):
                drawn = {"seed": seed}
                drawn |= {"fold": f"{repeat.fold}/{file.folds}"} if file.folds else {}
            common = {**drawn, **data, **file.options}
            own = [(s.name, {**common, **s.options}, s.alpha) for s in file.silos]
        else:
            cut = Simulation(
                task=file.task,
                data=file.data,
                silos=file.silos,
                seed=seed,
                split=file.split,
                options=file.options,
            )
            own = [(silo.name, silo.options, None) for silo in cut.silos_of()]
        return [
            SiloSpec(
                name,
                file.task,
                options,
                alpha,
                label_counts=file.label_counts,
                column_sums=file.column_sums,
                sums=True,
            )
            for name, options, alpha in own
        ]

    def keys(self, name: str, repeat: Repeat) -> dict[str, Any]:
        return {
            **self.runs[name],
            "task": self.task,
            "seed": repeat.seed,
            "label": f"{slug(name)}-{repeat.suffix}",
            "min-silos": len(self.silos(repeat)),
        }


def read(file: Path, *, data: Path | None = None) -> Comparison:
    """Read and check a comparison's TOML file; ``data`` replaces its data folder.

    Raises:
        FederationError: it cannot be read, or a key is unknown, missing or out of bounds.
    """
    return made(read_table(file, refused), file, data=data)


def made(
    content: Mapping[str, Any], file: Path, *, data: Path | None = None, digest: str = ""
) -> Comparison:
    """Check a comparison's content; ``file`` names it in errors, and paths are relative to it.

    ``digest`` is that of the silos' data, if their files are only temporary. Raises as ``read``.
    """
    options = checked(CompareFile, dict(content), file, refused)
    try:
        options, task, fingerprint, kinds = _with_task(_with_data(options, file, data), file)
    except TaskError as error:
        raise refused(f"{file}: {error}") from None
    comparison = Comparison(options, _runs(options, file, kinds), task, fingerprint, digest)
    for name in comparison.runs:
        _check(comparison, name, file)
    _check_metric(comparison, file)
    return comparison


def is_declared(task: str) -> bool:
    """Return whether a ``.toml`` file declares the task: a silo's options then locate its data."""
    return task.endswith(".toml")


def _with_task(file: CompareFile, where: Path) -> tuple[CompareFile, str, str, Sequence[str]]:
    """Return the file with its declaration made absolute, and what it says of the task.

    This is the name that silos know it by, its fingerprint, and the families of its models.
    """
    if not is_declared(file.task):
        if file.folds:
            raise refused(
                f"{where}: folds need a task declared in a .toml file. {file.task} uses a "
                "different split for each seed: leave folds out, and give more seeds."
            )
        return file, file.task, "", (wire.NETWORK,)
    if isinstance(file.silos, int):
        raise refused(
            f"{where}: a task declared in a file cannot be split into silos. List them with "
            f"[[silos]], each with its data: options = {{ data = ... }}."
        )
    declaration = where.resolve().parent / place_of(file.task)
    task = load_declared(declaration)
    changed = file.model_copy(update={"task": str(declaration)})
    one = (wire.TREES if task.boosted else wire.NETWORK,)
    return changed, task.name, task.fingerprint, families_of(task) or one


def _with_data(file: CompareFile, where: Path, data: Path | None) -> CompareFile:
    """Return the file with absolute paths.

    The data folder is the given one, else the environment's if the file asks for data, else the
    file's.
    """
    if data is not None and not file.data:
        raise refused(f"{where} has no key 'data', so --data has no effect. Leave it out.")
    changes: dict[str, Any] = {"options": placed(file.options, where)}
    if data is not None:
        changes["data"] = str(place_of(str(data)).resolve())
    elif file.data and os.environ.get("COTERIE_DATA"):
        changes["data"] = os.environ["COTERIE_DATA"]
    elif file.data:
        changes["data"] = str(where.resolve().parent / place_of(file.data))
    if not isinstance(file.silos, int):
        changes["silos"] = [
            silo.model_copy(update={"options": placed(silo.options, where)}) for silo in file.silos
        ]
    return file.model_copy(update=changes)


def _runs(file: CompareFile, where: Path, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in file.strategies:
        name = str(entry.get("name", entry["strategy"]))
        own = {key: value for key, value in entry.items() if key != "name"}
        own["strategy"] = wire.strategy_of(own["strategy"])
        stray = sorted((set(own) | set(file.run)) & set(SET_HERE) - {"strategy"})
        if stray or "strategy" in file.run:
            what = stray[0] if stray else "strategy"
            raise refused(f"{where}: the comparison sets key {what!r}; leave it out of the runs.")
        if name in found:
            raise refused(f"{where}: two strategies are called {name!r}. Give each a name.")
        found[name] = _with_shared(file.run, own)
    nobodys = set(file.run).difference(*found.values())
    if nobodys:
        raise refused(
            f"{where}: no strategy of this comparison has the key {sorted(nobodys)[0]!r} of [run]."
        )
    if not any(trains_alone(keys) for keys in found.values()):
        asked = [keys.get(f"task.{wire.FAMILY}") for keys in found.values()]
        kind = max(kinds, key=asked.count)
        family = kind if len(kinds) > 1 else ""
        alone = _with_shared(file.run, keys_alone(trees=kind == wire.TREES, family=family))
        found = {f"{ALONE} (added)" if ALONE in found else ALONE: alone, **found}
    return found


def _with_shared(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's keys, with the shared keys that apply to it."""
    foreign = foreign_keys({**shared, "strategy": own["strategy"]})
    return {**{key: value for key, value in shared.items() if key not in foreign}, **own}


def _check(comparison: Comparison, name: str, file: Path) -> None:
    """Reject now what a run would reject later."""
    first = comparison.repeats[0]
    try:
        config = RunConfig.read(comparison.keys(name, first))
        silos = [silo.name for silo in comparison.silos(first)]
        require_silos(config, silos, label_counts=comparison.file.label_counts)
    except FederationError as error:
        raise refused(f"{file}: strategy {name!r}: {error}") from None


def _check_metric(comparison: Comparison, file: Path) -> None:
    """Check that all runs have one primary metric, which can reach the target if it is known."""
    metrics = {str(keys.get("primary-metric", "")) for keys in comparison.runs.values()}
    if len(metrics) > 1:
        raise refused(
            f"{file}: primary-metric must be the same for all strategies, so that one table can "
            "show them: set it under [run]."
        )
    if comparison.file.target is None:
        return
    try:
        task = load_task(comparison.file.task)
    except TaskError:  # of somebody's own: it is known when the first run has ended
        return
    target_of(comparison, Lead(metrics.pop() or task.metric or task.problem.metrics[0]), file)


def target_of(comparison: Comparison, lead: Lead, file: Path) -> float | None:
    """Return the target as an error."""
    target = comparison.file.target
    try:
        return None if target is None else lead.error_of(target)
    except ValueError as error:
        raise refused(f"{file}: target: {error}.") from None


def check_model(comparison: Comparison, file: Path) -> None:
    """Reject strategies with generators if the model has no layers for them."""
    needing = [
        name
        for name in comparison.runs
        if isinstance(
            RunConfig.read(comparison.keys(name, comparison.repeats[0])).algorithm, Generative
        )
    ]
    if not needing:
        return
    try:
        task = load_task(comparison.file.task)
        if describe_head(task):
            return
    except TaskError as error:
        raise refused(f"{file}: {error}") from None
    raise refused(
        f"{file}: strategy {needing[0]!r} does not work with this model. It needs a "
        "classification network whose last layers are linear, after other trainable layers. "
        f"{_network_advice(task)} Or leave {', '.join(needing)} out."
    )


def _network_advice(task: Task) -> str:
    if isinstance(task, DeclaredTask):
        return (
            f'The task\'s declaration has network = "{task.declaration.network}"; with '
            'network = "mlp-64" it works.'
        )
    return f"{wire.page('FedGenP, FedGen and FedEnsemble')} lists suitable models."


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")[:60] or "run"
