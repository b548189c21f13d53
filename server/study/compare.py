"""``coterie compare FILE``: a list of strategies over the same silos, seeds and split.

The file is TOML::

    title = "Three kinds of digits"
    task = "digits"
    data = "data"                  # folder, relative to the file; --data and $COTERIE_DATA win
    seeds = [0, 1, 2]              # of the split and of the runs
    target = 0.1                   # mean error, for the rounds to it
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

Training alone is added if it is not in the list, because IPR and RSD are measured against it; it
runs first, and the records of the others hold them too.
Every run's record is kept in the comparison's folder; a second call with that folder adds what is
missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
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

from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.runs.config import RunConfig, foreign_keys, require_silos
from coterie.server.runs.inprocess import InProcessGrid, client_app, open_silos
from coterie.server.runs.metrics import percent
from coterie.server.runs.record import RECORD, read_whole
from coterie.server.runs.run import execute
from coterie.server.study import comparison as figures
from coterie.server.study.comparison import Measure, Row, measure
from coterie.strategies.errors import EXIT_CONFIG, EXIT_RUN, FederationError
from coterie.strategies.rounds.options import dashed
from coterie.system.files import write_atomically
from coterie.system.terminal import wide
from coterie.tasks.base import Option, TaskError, as_option, place_of
from coterie.tasks.own.declared import load_declared
from coterie.tasks.simulation import PLACES, Simulation, placed, split_problem
from coterie.wire import is_silo_name

ALONE = "alone"
SET_HERE = ("strategy", "seed", "task", "label", "runs-dir", "min-silos", "churn", "alone")
"""Keys that the comparison sets itself, so that all strategies have the same silos and seeds."""

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


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
    target: float | None = Field(None, gt=0, lt=1)
    label_counts: bool = Field(False, strict=True)
    column_sums: bool = Field(False, strict=True)
    silos: Annotated[int, Field(ge=1, le=10_000)] | Annotated[list[SiloEntry], Field(min_length=1)]
    split: dict[str, Option] = Field(default_factory=dict)
    options: dict[str, Annotated[Option, BeforeValidator(as_option)]] = Field(default_factory=dict)
    run: dict[str, Any] = Field(default_factory=dict)
    strategies: list[dict[str, Any]] = Field(min_length=1)

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

    def silos(self, seed: int) -> list[SiloSpec]:
        """The silos of a seed."""
        file = self.file
        if not isinstance(file.silos, int):
            data = {"data": file.data} if file.data else {}
            drawn = {} if _is_declared(file.task) else {"split-seed": seed}
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

    def keys(self, name: str, seed: int) -> dict[str, Any]:
        """All keys of one run."""
        return {
            **self.runs[name],
            "task": self.task,
            "seed": seed,
            "label": f"{_slug(name)}-seed{seed}",
            "min-silos": len(self.silos(seed)),
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
        table = tomllib.loads(file.read_text(encoding="utf-8-sig"))
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
    return comparison


def _is_declared(task: str) -> bool:
    """Whether a ``.toml`` file declares the task: a silo's data is then where its options say."""
    return task.endswith(".toml")


def _with_task(file: CompareFile, where: Path) -> tuple[CompareFile, str, str]:
    """The file with its declaration made absolute, what silos call the task, its fingerprint."""
    if not _is_declared(file.task):
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
    seed = comparison.file.seeds[0]
    try:
        config = RunConfig.read(comparison.keys(name, seed))
        silos = [silo.name for silo in comparison.silos(seed)]
        require_silos(config, silos, label_counts=comparison.file.label_counts)
    except FederationError as error:
        raise _wrong(f"{file}: strategy {name!r}: {error}") from None


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
    folder = folder or Path("runs") / datetime.now().strftime(f"{_slug(file.stem)}-%Y%m%d-%H%M%S")
    (folder / "records").mkdir(parents=True, exist_ok=True)
    _keep_file(comparison, folder, file)
    title = comparison.file.title or file.stem
    count = len(comparison.silos(comparison.file.seeds[0]))
    where = "as processes of their own" if federation else "in this process"
    told = (
        f": {len(comparison.runs)} strategies, {count} silos {where}, seeds "
        f"{', '.join(map(str, comparison.file.seeds))}. Records: {folder}/"
    )
    console.print(Text.assemble((title, "bold"), told), soft_wrap=True)
    for key, names in comparison.partly_shared.items():
        console.print(f"  {key} goes to {', '.join(names)} only", markup=False, soft_wrap=True)
    for seed in comparison.file.seeds:
        _run_seed(console, comparison, seed, folder, federation=federation)
    table = _finish(comparison, folder, title)
    _print(console, table, comparison)
    return table


def _keep_file(comparison: Comparison, folder: Path, file: Path) -> None:
    """A folder belongs to one comparison: other silos or splits are not mixed into its table."""
    others = {"title", "seeds", "target", "strategies", "run", "label_counts", "column_sums"}
    silos = comparison.file.model_dump(exclude=others)
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
    options = [silo.options for silo in comparison.silos(comparison.file.seeds[0])]
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


def _run_seed(
    console: Console, comparison: Comparison, seed: int, folder: Path, *, federation: bool
) -> None:
    alone = comparison.alone
    order = [alone, *(name for name in comparison.runs if name != alone)]
    missing = [n for n in order if _stored(comparison, n, seed, folder) is None]
    if not missing:
        return
    silos = comparison.silos(seed)
    with ExitStack() as stack:
        local = None
        if federation:
            local = stack.enter_context(LocalFederation(folder / f"federation-seed{seed}"))
            for spec in silos:
                local.start_silo(spec)
            local.wait_for_silos(len(silos))
        elif isinstance(comparison.file.silos, int):  # one split, whose data is read once
            open_silos([silo.node_config() for silo in silos], whose="the silos")
        else:
            for silo in silos:
                open_silos([silo.node_config()], whose=f"silo {silo.name!r}")
        for name in missing:
            target = _record_of(comparison, name, seed, folder)
            keys = comparison.keys(name, seed)
            if name != alone:
                keys["alone"] = str(_record_of(comparison, alone, seed, folder).resolve())
            if local is None:
                _run_here(silos, keys, target)
            else:
                _run_there(local, keys, target)
            found = measure(read_whole(target))
            text = (
                f"  seed {seed}, {name}: mean error {percent(found.mean)}, "
                f"{len(found.groups)} group(s), {found.seconds:.1f} s"
            )
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _run_here(silos: Sequence[SiloSpec], keys: Mapping[str, Any], target: Path) -> None:
    """One run with silos that are called in this process, where there is nothing to wait for."""
    config = RunConfig.read({**keys, "wait-for-silos": 1.0})
    grid = InProcessGrid(client_app(), [silo.node_config() for silo in silos])
    log = logging.getLogger("coterie")
    before = log.level
    log.setLevel(max(logging.ERROR, before))
    try:
        execute(grid, config, run_id=0, folder=target)
    finally:
        log.setLevel(before)


def _run_there(local: LocalFederation, keys: Mapping[str, Any], target: Path) -> None:
    """One run on processes that are there already; its record is copied to ``target``."""
    folder, last = local.run(**keys)
    if last.status != "completed":
        raise FederationError(
            f"the run {keys['label']!r} failed: {last.error}. Its record: {folder}",
            exit_code=EXIT_RUN,
        )
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / RECORD, (folder / RECORD).read_bytes())


def _record_of(comparison: Comparison, name: str, seed: int, folder: Path) -> Path:
    """Named after what the run depends on: a changed key is another run."""
    text = json.dumps(comparison.runs[name], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return folder / "records" / f"{_slug(name)}-{digest}-seed{seed}"


def _stored(comparison: Comparison, name: str, seed: int, folder: Path) -> Measure | None:
    target = _record_of(comparison, name, seed, folder)
    if not (target / RECORD).exists():
        return None
    run = read_whole(target)
    return measure(run) if run.status == "completed" else None


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")[:60] or "run"


# --- the result -----------------------------------------------------------------------------------


def _finish(comparison: Comparison, folder: Path, title: str) -> list[Row]:
    """The table, as JSON and as Markdown in the folder."""
    measures: dict[str, dict[int, Measure]] = {name: {} for name in comparison.runs}
    for name, by_seed in measures.items():
        for seed in comparison.file.seeds:
            found = _stored(comparison, name, seed, folder)
            assert found is not None, "every run is there by now"
            by_seed[seed] = found
    table = figures.rows(measures, alone=comparison.alone, target=comparison.file.target)
    content = {
        "title": title,
        "file": comparison.file.model_dump(exclude={"data"}),
        "table": [figures.plain(row) for row in table],
        "runs": [
            {"name": name, "seed": seed, "errors": dict(own.errors)}
            | {"curve": own.curve, "groups": own.groups}
            for name, by_seed in measures.items()
            for seed, own in by_seed.items()
        ],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(folder / "comparison.json", text.encode())
    page = f"# {title}\n\n{figures.markdown(table)}\n{legend(comparison)}\n"
    write_atomically(folder / "comparison.md", page.encode())
    return table


def legend(comparison: Comparison) -> str:
    """What the columns mean, in a paragraph."""
    target = comparison.file.target
    reach = f"the first with a mean error of {100 * target:g} %" if target else "no target was set"
    seeds = len(comparison.file.seeds)
    return (
        f"Error on each silo's own test data: mean over silos, ± standard deviation over {seeds} "
        "seed(s); standard deviation over silos; the worst silo. IPR: share of silos strictly "
        "better than alone; RSD: standard deviation of the gain over alone. Rounds to target: "
        f"{reach}. MB: arrays sent both ways. s: wall clock of the rounds; silo s: the silos' own "
        "training, added up. p: Wilcoxon's signed-rank test against the best row, paired over "
        "seeds and silos, Holm-corrected; silos of one seed are not independent, so it is rather "
        "too small."
    )


def _print(console: Console, table: Sequence[Row], comparison: Comparison) -> None:
    shown = Table(box=None, padding=(0, 1))
    for number, column in enumerate(figures.COLUMNS):
        justify: JustifyMethod = "right" if number else "left"
        shown.add_column(column, justify=justify, no_wrap=True)
    for row in figures.by_error(table):
        shown.add_row(*(Text(cell) for cell in figures.cells(row)))
    wide(console, on_terminals=True).print(shown)
    console.print(legend(comparison), soft_wrap=True, markup=False, highlight=False)
