"""``coterie compare FILE``: a list of strategies over the same silos, seeds and split.

The file is TOML::

    title = "Three kinds of digits"
    task = "digits"
    data = "data"                  # folder, relative to the file; --data and $COTERIE_DATA win
    seeds = [0, 1, 2]              # of the split and of the runs
    folds = 5                      # of a declared task: cross-validation, five runs for every seed
    target = 0.1                   # of the leading metric's mean over silos, for the rounds to it
    label-counts = false           # whether the silos tell how many samples of each label they have
    column-sums = false            # whether they tell means, for a task's scale = "federation"
    silos = 10                     # with [split]: cut from one folder ...

    [split]
    kind = "dirichlet"             # docs/reference/image-tasks.md
    alpha = 0.1

    [options]                      # more options of the task, the same at every silo
    train = 100

    [[silos]]                      # ... or, in place of silos and [split], one by one
    name = "north"
    options = { train = 40, rotation = 90 }    # files and folders are relative to this file

    [run]                          # keys of docs/reference/configuration.md, for every strategy
    rounds = 20

    [[strategies]]
    name = "HCCT, α 50"            # by default the strategy's
    strategy = "hcct"
    alpha = 50.0

A *repeat* is one run of every strategy over the same silos, start and test samples: there is one
for every seed, or for every seed and fold. It draws the silos' test samples anew, except where a
silo has test data of its own.

Training alone is added if it is not in the list, because the others' gains are measured against it;
it runs first, and the records of the others hold the gains too.
Every run's record is kept in the comparison's folder; a second call with that folder adds what is
missing. A strategy that cannot be run is named with the reason, and the others go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from coterie import wire
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.runs.config import RunConfig, foreign_keys, require_silos
from coterie.server.runs.inprocess import (
    close_silos,
    describe_head,
    open_silos,
)
from coterie.server.runs.metrics import Lead
from coterie.server.runs.record import RECORD, read_whole
from coterie.server.study import comparison as figures
from coterie.server.study.comparison import Advice, Measure, Repeat, Row, measure
from coterie.server.study.playing import in_this_process, on_processes
from coterie.strategies.errors import EXIT_CONFIG, EXIT_RUN, FederationError
from coterie.strategies.fedgenp.generative import Generative
from coterie.strategies.rounds.options import dashed
from coterie.system.files import write_atomically
from coterie.system.terminal import wide
from coterie.tasks import load_task
from coterie.tasks.base import Option, Task, TaskError, as_option, place_of, with_task_keys
from coterie.tasks.own.declared import DeclaredTask, load_declared
from coterie.tasks.simulation import PLACES, Simulation, placed, split_problem
from coterie.tasks.text import read_text
from coterie.wire import is_silo_name

ALONE = "alone"
SET_HERE = ("strategy", "seed", "task", "label", "runs-dir", "min-silos", "churn", "alone")
"""Keys that the comparison sets itself, so that all strategies have the same silos and seeds."""

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
        if not is_silo_name(name):
            raise ValueError("a silo's name has letters, digits, '.', '_' and '-' only")
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
                raise ValueError("silos as a number need a [split] with its kind")
            if problem := split_problem(self.split):
                raise ValueError(problem)
        elif self.split:
            raise ValueError("a [split] goes with silos as a number, not with a list of silos")
        else:
            names = [silo.name for silo in self.silos]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"two silos are called {twice[0]!r}")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds must differ from each other")
        return self


@dataclass(frozen=True)
class Comparison:
    """What is to be run.

    Attributes:
        file: as read, with the data folder and the file that declares the task made absolute.
        runs: name → keys of a run, without seed.
        task: what silos call it.
        fingerprint: of the task's declaration; empty where no file declares it.
    """

    file: CompareFile
    runs: Mapping[str, Mapping[str, Any]]
    task: str
    fingerprint: str = ""

    @property
    def partly_shared(self) -> dict[str, list[str]]:
        """Key of [run] that not every strategy has → the runs that it goes to."""
        having = {key: [n for n, own in self.runs.items() if key in own] for key in self.file.run}
        return {key: names for key, names in having.items() if len(names) < len(self.runs)}

    @property
    def alone(self) -> str:
        """The run that the others are measured against."""
        return next(name for name, keys in self.runs.items() if _is_alone(keys))

    @property
    def repeats(self) -> list[Repeat]:
        """In the order in which they are run."""
        folds = range(1, self.file.folds + 1) if self.file.folds else (0,)
        return [Repeat(seed, fold) for seed in self.file.seeds for fold in folds]

    def drawn(self) -> set[str]:
        """Silos whose test samples every repeat draws anew.

        Raises:
            TaskError: the data of a declared task's silo cannot be read.
        """
        first, other = self.silos(Repeat(0, 1)), self.silos(Repeat(1, 2))
        task = load_declared(Path(self.file.task)) if _is_declared(self.file.task) else None
        return {
            one.name
            for one, its in zip(first, other, strict=True)
            if one.options != its.options and (task is None or task.draws_test_part(one.options))
        }

    def silos(self, repeat: Repeat) -> list[SiloSpec]:
        """The silos of a repeat."""
        file, seed = self.file, repeat.seed
        if not isinstance(file.silos, int):
            data = {"data": file.data} if file.data else {}
            drawn: dict[str, Option] = {"split-seed": seed}
            if _is_declared(file.task):
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
            )
            for name, options, alpha in own
        ]

    def keys(self, name: str, repeat: Repeat) -> dict[str, Any]:
        """All keys of one run."""
        return {
            **self.runs[name],
            "task": self.task,
            "seed": repeat.seed,
            "label": f"{_slug(name)}-{repeat.suffix}",
            "min-silos": len(self.silos(repeat)),
        }


def read(file: Path, *, data: Path | None = None) -> Comparison:
    """Read and check a comparison's file.

    Args:
        file: TOML.
        data: folder of the data, in place of the file's.

    Raises:
        FederationError: it cannot be read, or a key is unknown, missing or out of bounds.
    """
    try:
        table = tomllib.loads(read_text(file))
        checked = CompareFile.model_validate(table)
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{file} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise _wrong(f"{file} is not TOML: {error}.") from None
    except ValidationError as error:
        raise _wrong(f"{file}: {'; '.join(_problem(e) for e in error.errors())}.") from None
    try:
        checked, task, fingerprint = _with_task(_with_data(checked, file, data), file)
    except TaskError as error:
        raise _wrong(f"{file}: {error}") from None
    comparison = Comparison(checked, _runs(checked, file), task, fingerprint)
    for name in comparison.runs:
        _check(comparison, name, file)
    _check_metric(comparison, file)
    return comparison


def _is_declared(task: str) -> bool:
    """Whether a ``.toml`` file declares the task: a silo's data is then where its options say."""
    return task.endswith(".toml")


def _with_task(file: CompareFile, where: Path) -> tuple[CompareFile, str, str]:
    """The file with its declaration made absolute, what silos call the task, its fingerprint."""
    if not _is_declared(file.task):
        if file.folds:
            raise _wrong(
                f"{where}: folds are for a task that a .toml file declares. {file.task} takes "
                "another split with every seed: leave folds out, and give more seeds."
            )
        return file, file.task, ""
    if isinstance(file.silos, int):
        raise _wrong(
            f"{where}: a task that a file declares cannot be cut into silos. List them with "
            "[[silos]], each with where its data is: options = { data = ... }."
        )
    declaration = where.resolve().parent / place_of(file.task)
    task = load_declared(declaration)
    return file.model_copy(update={"task": str(declaration)}), task.name, task.fingerprint


def _with_data(file: CompareFile, where: Path, data: Path | None) -> CompareFile:
    """With files and folders made absolute.

    The data's is the one that was given, else the environment's if the file asks for data, else its
    own.
    """
    if data is not None and not file.data:
        raise _wrong(f"{where} has no key 'data', so --data has no use. Leave it out.")
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


def _runs(file: CompareFile, where: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in file.strategies:
        if "strategy" not in entry:
            raise _wrong(f"{where}: every entry of [[strategies]] needs a 'strategy'. Got {entry}.")
        name = str(entry.get("name", entry["strategy"]))
        own = {key: value for key, value in entry.items() if key != "name"}
        stray = sorted((set(own) | set(file.run)) & set(SET_HERE) - {"strategy"})
        if stray or "strategy" in file.run:
            what = stray[0] if stray else "strategy"
            raise _wrong(
                f"{where}: key {what!r} is the comparison's own; leave it out of the runs."
            )
        if name in found:
            raise _wrong(f"{where}: two strategies are called {name!r}. Give each a name.")
        found[name] = _with_shared(file.run, own)
    nobodys = set(file.run).difference(*found.values())
    if nobodys:
        raise _wrong(
            f"{where}: no strategy of this comparison has the key {sorted(nobodys)[0]!r} of [run]."
        )
    if not any(_is_alone(keys) for keys in found.values()):
        alone = _with_shared(file.run, {"strategy": "independent"})
        found = {f"{ALONE} (added)" if ALONE in found else ALONE: alone, **found}
    return found


def _with_shared(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A strategy's keys, with those of the shared ones that it has."""
    foreign = foreign_keys({**shared, "strategy": own["strategy"]})
    return {**{key: value for key, value in shared.items() if key not in foreign}, **own}


def _is_alone(keys: Mapping[str, Any]) -> bool:
    return str(keys["strategy"]) == "independent"


def _check(comparison: Comparison, name: str, file: Path) -> None:
    """Refuse now what a run would refuse later."""
    first = comparison.repeats[0]
    try:
        config = RunConfig.read(comparison.keys(name, first))
        silos = [silo.name for silo in comparison.silos(first)]
        require_silos(config, silos, label_counts=comparison.file.label_counts)
    except FederationError as error:
        raise _wrong(f"{file}: strategy {name!r}: {error}") from None


def _check_metric(comparison: Comparison, file: Path) -> None:
    """One metric leads in all runs, and can reach the target as far as it is known by now."""
    metrics = {str(keys.get("leading-metric", "")) for keys in comparison.runs.values()}
    if len(metrics) > 1:
        raise _wrong(
            f"{file}: leading-metric must be the same for all strategies, so that one table can "
            "hold them: put it under [run]."
        )
    if comparison.file.target is None:
        return
    try:
        task = load_task(comparison.file.task)
    except TaskError:  # of somebody's own: it is known when the first run has ended
        return
    _target(comparison, Lead(metrics.pop() or task.metric or task.problem.metrics[0]), file)


def _target(comparison: Comparison, lead: Lead, file: Path) -> float | None:
    """The target as an error."""
    target = comparison.file.target
    try:
        return None if target is None else lead.error_of(target)
    except ValueError as error:
        raise _wrong(f"{file}: target: {error}.") from None


def _check_model(comparison: Comparison, file: Path) -> None:
    """Refuse strategies with generators where the model has no layers for them."""
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
        raise _wrong(f"{file}: {error}") from None
    raise _wrong(
        f"{file}: strategy {needing[0]!r} does not work with this model. It needs a network whose "
        "last layers are linear, behind others that also learn, to tell one of several classes "
        f"from another. {_network_advice(task)} Or leave {', '.join(needing)} out."
    )


def _network_advice(task: Task) -> str:
    if isinstance(task, DeclaredTask):
        return (
            f'The task\'s declaration has network = "{task.declaration.network}"; with '
            'network = "mlp-64" it works.'
        )
    return "docs/explanation/fedgenp.md says which models do."


def _wrong(text: str) -> FederationError:
    return FederationError(text, phase="comparison", exit_code=EXIT_CONFIG)


def _problem(entry: Any) -> str:
    key = ".".join(str(part) for part in entry["loc"] if not str(part).startswith("list["))
    if entry["type"] == "extra_forbidden":
        known = sorted(dashed(name) for name in CompareFile.model_fields)
        return f"unknown key {key!r} (known: {', '.join(known)})"
    if entry["type"] == "missing":
        return f"key {key!r} is missing"
    text = entry["msg"].removeprefix("Value error, ")
    return f"{key}: {text}. Got {entry['input']!r}" if key else text


# --- running --------------------------------------------------------------------------------------


def compare(
    console: Console,
    file: Path,
    *,
    data: Path | None = None,
    folder: Path | None = None,
    federation: bool = False,
) -> list[Row]:
    """Run what is missing and print the table.

    Args:
        file: see the module's docstring.
        data: folder of the data, in place of the file's.
        folder: of all records and of ``comparison.json`` and ``.md``; one that exists is
            continued. By default a new one under ``runs/``.
        federation: real processes that talk gRPC, in place of calls in this process.

    Raises:
        FederationError: the file is wrong, or a run failed.
    """
    comparison = read(file, data=data)
    _check_model(comparison, file)
    drawn = _drawn(comparison, file)
    folder = folder or Path("runs") / datetime.now().strftime(f"{_slug(file.stem)}-%Y%m%d-%H%M%S")
    (folder / "records").mkdir(parents=True, exist_ok=True)
    _keep_file(comparison, folder, file)
    title = comparison.file.title or file.stem
    count = len(comparison.silos(comparison.repeats[0]))
    where = "as processes of their own" if federation else "in this process"
    folds = f", {comparison.file.folds} folds each" if comparison.file.folds else ""
    told = (
        f": {len(comparison.runs)} strategies, {count} silos {where}, seeds "
        f"{', '.join(map(str, comparison.file.seeds))}{folds}. Records: {folder}/"
    )
    console.print(Text.assemble((title, "bold"), told), soft_wrap=True)
    for key, names in comparison.partly_shared.items():
        console.print(f"  {key} goes to {', '.join(names)} only", markup=False, soft_wrap=True)
    failed: dict[str, str] = {}
    for repeat in comparison.repeats:
        _run_repeat(console, comparison, repeat, folder, failed, federation=federation)
    result = _result(comparison, folder, file, drawn, failed)
    _keep(result, comparison, folder, title)
    _print(console, result)
    if failed:
        raise FederationError(
            f"{len(failed)} of {len(comparison.runs)} strategies could not be run: "
            f"{', '.join(failed)}. The table in {folder} is of the others.",
            exit_code=EXIT_RUN,
        )
    return result.table


def _drawn(comparison: Comparison, file: Path) -> set[str]:
    """See ``Comparison.drawn``; folds that would all be the same are refused."""
    try:
        drawn = comparison.drawn()
    except TaskError as error:
        raise _wrong(f"{file}: {error}") from None
    if comparison.file.folds and not drawn:
        raise _wrong(
            f"{file}: folds have no use here, because every silo has test data of its own. Leave "
            "folds out, or give the silos' data in one piece."
        )
    return drawn


def _keep_file(comparison: Comparison, folder: Path, file: Path) -> None:
    """A folder belongs to one comparison: other silos or splits are not mixed into its table."""
    others = {"title", "seeds", "folds", "target", "strategies", "run"}
    others |= {"label_counts", "column_sums"}
    silos = comparison.file.model_dump(exclude=others)
    if _is_declared(comparison.file.task):  # its records did not always have a split for each seed
        silos["test-parts"] = comparison.file.folds or "by seed"
    silos |= {"fingerprint": comparison.fingerprint} if comparison.fingerprint else {}
    data = _data_files(comparison)
    silos |= {"files": data} if data else {}
    digest = hashlib.sha256(json.dumps(silos, sort_keys=True).encode()).hexdigest()[:16]
    note = folder / "silos.txt"
    if note.exists() and note.read_text(encoding="utf-8").strip() != digest:
        raise _wrong(
            f"{folder} holds a comparison over other silos than {file} describes now: its silos, "
            "the task's declaration or files of the data have changed. Take another folder."
        )
    write_atomically(note, f"{digest}\n".encode())


def _data_files(comparison: Comparison) -> list[tuple[str, int, int]]:
    """Path, size and time of every file of the silos' data.

    Not of data that the task may download: it may come only when the first run begins.
    """
    options = [silo.options for silo in comparison.silos(comparison.repeats[0])]
    places = {
        str(own[k]) for own in options if not own.get("download") for k in PLACES if own.get(k)
    }
    files: list[tuple[str, int, int]] = []
    for place in map(Path, sorted(places)):
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file():
                facts = file.stat()
                files.append((str(file), facts.st_size, facts.st_mtime_ns))
    return files


def _run_repeat(
    console: Console,
    comparison: Comparison,
    repeat: Repeat,
    folder: Path,
    failed: dict[str, str],
    *,
    federation: bool,
) -> None:
    """Run what is missing of a repeat; strategies that cannot be run, and why, go to ``failed``."""
    alone = comparison.alone
    order = [alone, *(name for name in comparison.runs if name != alone)]
    missing = [
        name
        for name in order
        if name not in failed and _stored(comparison, name, repeat, folder) is None
    ]
    if not missing:
        return
    silos = comparison.silos(repeat)
    with ExitStack() as stack:
        local = None
        if federation:
            home = folder / f"federation-{repeat.suffix}"
            local = stack.enter_context(LocalFederation(home))
            for spec in silos:
                local.start_silo(spec)
            local.wait_for_silos(len(silos))
        else:
            stack.callback(close_silos)  # the next repeat has other data
            if isinstance(comparison.file.silos, int):  # one split, whose data is read once
                open_silos([silo.node_config() for silo in silos], whose="the silos")
            else:
                for silo in silos:
                    open_silos([silo.node_config()], whose=f"silo {silo.name!r}")
        for name in missing:
            target = _record_of(comparison, name, repeat, folder)
            keys = comparison.keys(name, repeat)
            if name != alone:
                keys["alone"] = str(_record_of(comparison, alone, repeat, folder).resolve())
            try:
                if local is None:  # there is nothing to wait for
                    config = RunConfig.read({**keys, "wait-for-silos": 1.0})
                    in_this_process([silo.node_config() for silo in silos], config, target)
                else:
                    _, record = on_processes(local, keys, title=keys["label"])
                    target.mkdir(parents=True, exist_ok=True)
                    write_atomically(target / RECORD, (record / RECORD).read_bytes())
            except FederationError as error:
                if name == alone:
                    raise  # all others are measured against it
                failed[name] = str(error)
                text = f"  {repeat}, {name}: it could not be run: {error}"
            else:
                text = f"  {repeat}, {name}: {_outcome(measure(read_whole(target)))}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _outcome(found: Measure) -> str:
    """One run in a few words."""
    groups = wire.counted(len(found.groups), "group")
    return f"mean {found.lead.title} {found.lead.text(found.mean)}, {groups}, {found.seconds:.1f} s"


def _record_of(comparison: Comparison, name: str, repeat: Repeat, folder: Path) -> Path:
    """Named after what the run depends on: a changed key is another run."""
    text = json.dumps(comparison.runs[name], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return folder / "records" / f"{_slug(name)}-{digest}-{repeat.suffix}"


def _stored(comparison: Comparison, name: str, repeat: Repeat, folder: Path) -> Measure | None:
    target = _record_of(comparison, name, repeat, folder)
    if not (target / RECORD).exists():
        return None
    run = read_whole(target)
    return measure(run) if run.status == "completed" else None


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")[:60] or "run"


# --- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        measures: of the strategies that were run: name → repeat → measure.
        table: a row for each of them.
        lead: in what errors are counted.
        advice: see ``comparison.advise``.
        legend: what the columns mean, in a paragraph.
        failed: strategy → why it could not be run.
    """

    measures: Mapping[str, Mapping[Repeat, Measure]]
    table: list[Row]
    lead: Lead
    advice: Advice
    legend: str
    failed: Mapping[str, str]


def _result(
    comparison: Comparison, folder: Path, file: Path, drawn: set[str], failed: Mapping[str, str]
) -> Result:
    measures: dict[str, dict[Repeat, Measure]] = {}
    for name in comparison.runs:
        if name in failed:
            continue
        for repeat in comparison.repeats:
            found = _stored(comparison, name, repeat, folder)
            assert found is not None, "every run is there by now"
            measures.setdefault(name, {})[repeat] = found
    alone = comparison.alone
    lead = next(iter(measures[alone].values())).lead
    target = _target(comparison, lead, file)
    table = figures.rows(measures, alone=alone, target=target, drawn=drawn)
    over = figures.difference(measures[alone], measures[figures.best_of(measures)], drawn=drawn)
    advice = figures.advise(table, alone=alone, over_alone=over, lead=lead)
    return Result(measures, table, lead, advice, legend(comparison, lead, drawn), failed)


def _keep(result: Result, comparison: Comparison, folder: Path, title: str) -> None:
    """The result, as JSON and as Markdown in the folder."""
    content = {
        "title": title,
        "file": comparison.file.model_dump(exclude={"data"}),
        "metric": result.lead.metric,
        "unit": result.lead.unit,
        "table": [figures.plain(row) for row in result.table],
        "advice": {
            "strategy": result.advice.strategy or None,
            "apart": result.advice.apart,
            "text": result.advice.text,
        },
        "failed": dict(result.failed),
        "runs": [
            {"name": name, "seed": repeat.seed}
            | ({"fold": repeat.fold} if repeat.fold else {})
            | {"errors": dict(own.errors), "curve": own.curve, "groups": own.groups}
            for name, by_repeat in result.measures.items()
            for repeat, own in by_repeat.items()
        ],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(folder / "comparison.json", text.encode())
    notes = "".join(f"{line}\n\n" for line in _failures(result))
    page = f"# {title}\n\n{figures.markdown(result.table, result.lead)}\n{notes}"
    page += f"{result.advice.text}\n\n{result.legend}\n"
    write_atomically(folder / "comparison.md", page.encode())


def _failures(result: Result) -> list[str]:
    return [f"{name} could not be run: {why}" for name, why in result.failed.items()]


def legend(comparison: Comparison, lead: Lead, drawn: set[str]) -> str:
    """What the columns mean, in a paragraph."""
    file = comparison.file
    reach = "no target was set"
    if file.target is not None:
        value = lead.text(lead.error_of(file.target))
        reach = f"the first with a mean {lead.title} of {value} or better"
    return (
        f"{lead.head}: {lead.direction}; on each silo's own test data, mean over silos. "
        f"{_spread_text(comparison, drawn)} Over silos: standard deviation. Better than alone: "
        "silos whose mean over all runs is better than training alone. Gain: over alone, with its "
        f"standard deviation over silos. Rounds to target: {reach}. MB: arrays sent both ways. s: "
        "wall clock of the rounds; silo s: the silos' own training, added up. p: of the difference "
        f"to the first row, {_test_text(comparison, drawn)}"
    )


def _spread_text(comparison: Comparison, drawn: set[str]) -> str:
    """What ± says, and what it does not."""
    file = comparison.file
    fixed = [
        silo.name for silo in comparison.silos(comparison.repeats[0]) if silo.name not in drawn
    ]
    count = len(comparison.repeats)
    if count == 1:
        return "There was one run of each strategy, so nothing tells how much is chance."
    if not drawn:
        return (
            f"±: standard deviation over {count} seeds, which change the initial model and the "
            "order of training. The test samples were the same in all, so it says nothing of how "
            "other samples would do."
        )
    others = (
        f" The test samples of {', '.join(fixed[:4])}{' …' * (len(fixed) > 4)} stay the same."
        if fixed
        else ""
    )
    if file.folds:
        seeds = f" for each of {len(file.seeds)} seeds" if len(file.seeds) > 1 else ""
        return (
            f"±: standard deviation over {count} runs: {file.folds} folds{seeds}, so that every "
            f"sample is tested once{' a seed' if seeds else ''}.{others}"
        )
    return (
        f"±: standard deviation over {count} seeds, each with other test samples, another initial "
        f"model and another order of training.{others}"
    )


def _test_text(comparison: Comparison, drawn: set[str]) -> str:
    """How p is found."""
    times = "corrected for the number of strategies (Bonferroni)."
    if not drawn:
        return (
            "by Wilcoxon's signed-rank test over the silos' means, because the test samples were "
            f"the same in all runs (with fewer than six silos it cannot be small); {times}"
        )
    if len(comparison.repeats) == 1:
        return "which one run cannot give."
    return (
        "by Nadeau and Bengio's corrected resampled t-test, which allows for runs that share "
        f"training samples, paired over silos and runs; {times}"
    )


def _print(console: Console, result: Result) -> None:
    shown = Table(box=None, padding=(0, 1))
    for number, column in enumerate(figures.columns(result.lead)):
        justify: JustifyMethod = "right" if number else "left"
        shown.add_column(column, justify=justify, no_wrap=True)
    for row in figures.by_error(result.table):
        shown.add_row(*(Text(cell) for cell in figures.cells(row, result.lead)))
    wide(console, on_terminals=True).print(shown)
    for line in [*_failures(result), result.legend]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(Text(result.advice.text, style="bold"), soft_wrap=True)
