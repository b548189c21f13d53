"""``coterie compare FILE``: run several strategies over the same silos, seeds and split.

``comparison_file`` describes the file.

A *repeat* is one run of every strategy over the same silos, start and test samples: there is one
for every seed, or for every seed and fold. It redraws the silos' test samples, except for silos
with their own test data.

Local training is added if it is not in the list, because the others' gains are measured against it;
it runs first, so that the other records contain the gains. Every record is kept in the comparison's
folder; a second call with that folder adds what is missing. If a strategy cannot be run, the reason
is reported and the others continue.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from coterie import wire
from coterie.server.paths import place
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import RECORD, read_whole
from coterie.server.runs.record.metrics import Lead
from coterie.server.study import comparison as figures
from coterie.server.study.apps import AppComparison, is_app
from coterie.server.study.comparison import Advice, Measure, Repeat, Row, measure
from coterie.server.study.comparison_file import (
    Comparison,
    check_model,
    is_declared,
    made,
    read,
    slug,
    target_of,
)
from coterie.server.study.comparison_legend import legend
from coterie.server.study.given import NETWORK, Given, of_arrays
from coterie.server.study.playing import called, started
from coterie.server.study.result import COMPARISON, ComparisonResult
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.options import dashed
from coterie.strategies.strategy import GroupStrategy
from coterie.system.commandline import plain
from coterie.system.files import LockedError, held_by, locked, write_atomically
from coterie.system.terminal import aside, wide
from coterie.tasks.base import Option, TaskError
from coterie.tasks.simulation import PLACES

HERE = Path("compare")
"""Name of a comparison from Python in errors; paths in it are relative to the working directory."""
Node = Mapping[str, str | int | float | bool]
Chosen = str | Mapping[str, Any] | GroupStrategy

# --- running --------------------------------------------------------------------------------------


def compare(
    what: str | Path | Mapping[str, Any] | ClientApp,
    strategies: Sequence[Chosen] = (),
    silos: int | Mapping[str, Node] | Sequence[Node] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    folds: int | None = None,
    target: float | None = None,
    split: Mapping[str, Option] | None = None,
    options: Mapping[str, Option] | None = None,
    network: str = NETWORK,
    initial_arrays: ArrayRecord | wire.Model | None = None,
    run_config: Node | None = None,
    train_config: Node | None = None,
    processes: bool = False,
    data: str | Path | None = None,
    folder: str | Path | None = None,
    title: str = "",
    progress: bool | Console = True,
    **keys: Any,
) -> ComparisonResult:
    """Run strategies over the same silos and seeds, rank them, and return the result.

    Local training is added if it is not among them, because gains are measured against it. What a
    folder has already is not run again.

    Args:
        what: silo → its arrays, a task or a ClientApp, as in ``coterie.simulate``; or a
            comparison's file, which has everything but ``data``.
        strategies: names; mappings with ``strategy``, its options, and ``name`` for the table; for
            a ClientApp also strategies of ``coterie.strategies``.
        silos, split, options, network, initial_arrays, run_config, train_config: as in
            ``coterie.simulate``. A ClientApp finds the seed of a run as ``seed`` in its config.
        seeds: of splits and runs. Arrays and tasks have other test samples with each.
        folds: of arrays or a declared task: cross-validation, so many runs for every seed.
        target: of the primary metric; the table shows how many rounds each strategy takes to it.
        processes: run each silo in a separate process, connected by gRPC.
        data: data folder, in place of the file's.
        folder: for all records, ``comparison.json`` and ``.md``; an existing one is continued. By
            default a new one under ``runs/``.
        progress: whether to print a line for each run on standard error, or the console for them.
        keys: of every run, such as ``rounds``, with underscores for dashes.

    Raises:
        FederationError: something is wrong with what was given, or local training failed. Another
            strategy that fails is in ``failed`` of the result.
    """
    console = (
        progress if isinstance(progress, Console) else Console(stderr=True, quiet=not progress)
    )
    content = {
        "strategies": [_entry(one) for one in strategies],
        "seeds": list(seeds),
        "title": title or "comparison",
        **({"folds": folds} if folds is not None else {}),
        **({"target": target} if target is not None else {}),
    }
    with ExitStack() as stack:
        if is_app(what):
            if split or options or folds is not None:
                raise refused("a ClientApp has its own data: leave split, options and folds out.")
            file = HERE
            plan: Comparison = AppComparison.of(
                *(content, what, silos, strategies),
                initial_arrays=initial_arrays,
                run_config=run_config or {},
                train_config=train_config or {},
                **keys,
            )
        elif initial_arrays is not None or run_config or train_config:
            raise refused("initial_arrays, run_config and train_config are for a ClientApp.")
        elif isinstance(what, Path) or (isinstance(what, str) and not strategies):
            file = Path(what)
            if silos or keys or split or options:
                raise refused(f"{file} has everything: change the file instead.")
            plan = read(file, data=None if data is None else place(data))
        else:
            file, digest = HERE, ""
            content["run"] = {dashed(key): value for key, value in keys.items()}
            if isinstance(what, str):
                content |= _silos(what, silos, split, options)
            elif not isinstance(what, Mapping):
                raise refused(f"expected a task, arrays, a ClientApp or a file. Got {what!r}.")
            else:
                temporary = stack.enter_context(TemporaryDirectory(prefix="coterie-"))
                found = of_arrays(what, Path(temporary), network=network)
                own = {spec.name: dict(spec.options) for spec in found.specs}
                content |= _silos(found.specs[0].task, own, split, options)
                digest = found.digest
            plan = made(content, file, digest=digest)
        return _compared(plan, file, place(folder) if folder else None, console, processes)


def _entry(chosen: Chosen) -> dict[str, Any]:
    if isinstance(chosen, GroupStrategy):
        return {"strategy": type(chosen).__name__}
    own = {"strategy": chosen} if isinstance(chosen, str) else dict(chosen)
    return {dashed(key): value for key, value in own.items()}


def _silos(
    task: str, silos: Any, split: Mapping[str, Option] | None, options: Mapping[str, Option] | None
) -> dict[str, Any]:
    """Return the part of a comparison's content that describes its silos."""
    found: dict[str, Any] = {"task": task, "options": dict(options or {})}
    found |= {"split": dict(split)} if split else {}
    if isinstance(silos, Mapping):
        silos = [{"name": name, "options": dict(own)} for name, own in silos.items()]
    if not silos:
        raise refused(
            "a task needs silos: a number of them, with split={'kind': …}; or a mapping of each "
            f"silo's name to the task's options there. Got {silos!r}."
        )
    return {**found, "silos": silos}


def _compared(
    comparison: Comparison, file: Path, folder: Path | None, console: Console, processes: bool
) -> ComparisonResult:
    if not isinstance(comparison, AppComparison):  # whose keys are the app's own
        check_model(comparison, file)
    drawn = _drawn(comparison, file)
    folder = folder or Path("runs") / datetime.now().strftime(f"{slug(file.stem)}-%Y%m%d-%H%M%S")
    (folder / "records").mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            return _filled(comparison, file, folder, console, drawn, processes=processes)
    except LockedError:
        raise refused(
            f"process {held_by(folder)} compares in {folder}. Wait for its end, or use another "
            "folder."
        ) from None


def _filled(
    comparison: Comparison,
    file: Path,
    folder: Path,
    console: Console,
    drawn: set[str],
    *,
    processes: bool,
) -> ComparisonResult:
    """Run what is missing in a folder, which is locked, and write the table."""
    _keep_file(comparison, folder, file)
    title = comparison.file.title or file.stem
    count = len(comparison.silos(comparison.repeats[0]))
    where = "in separate processes" if processes else "in this process"
    folds = f", {comparison.file.folds} folds each" if comparison.file.folds else ""
    summary = (
        f": {len(comparison.runs)} strategies, {count} silos {where}, seeds "
        f"{', '.join(map(str, comparison.file.seeds))}{folds}. Records: {folder}/"
    )
    progress = aside(console)
    progress.print(Text.assemble((title, "bold"), summary), soft_wrap=True)
    for key, names in comparison.partly_shared.items():
        progress.print(f"  {key} goes to {', '.join(names)} only", markup=False, soft_wrap=True)
    failed: dict[str, str] = {}
    for repeat in comparison.repeats:
        _run_repeat(progress, comparison, repeat, folder, failed, processes=processes)
    result = _figures(comparison, folder, file, drawn, failed)
    _keep(result, comparison, folder, title)
    return ComparisonResult(folder)


def print_comparison(console: Console, result: ComparisonResult) -> None:
    """Print a comparison's table, legend and advice."""
    lead, shown = result.lead, Table(box=None, padding=(0, 1))
    for number, column in enumerate(figures.columns(lead)):
        justify: JustifyMethod = "right" if number else "left"
        shown.add_column(Text(column), justify=justify, no_wrap=True)
    for row in figures.by_error(result.rows):
        shown.add_row(*(Text(cell) for cell in figures.cells(row, lead)))
    wide(console, on_terminals=True).print(shown)
    for line in [*failures(result.failed), result.legend]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(Text(result.advice, style="bold"), soft_wrap=True)


def _drawn(comparison: Comparison, file: Path) -> set[str]:
    """Return ``Comparison.drawn``; reject folds that would all be the same."""
    try:
        drawn = comparison.drawn()
    except TaskError as error:
        raise refused(f"{file}: {error}") from None
    if comparison.file.folds and not drawn:
        raise refused(
            f"{file}: folds cannot be used here, because every silo has its own test data. "
            "Leave folds out, or give the silos' data without a test part."
        )
    return drawn


def _keep_file(comparison: Comparison, folder: Path, file: Path) -> None:
    """Reject a folder of another comparison, so that a table never mixes silos or splits."""
    others = {"title", "seeds", "folds", "target", "strategies", "run"}
    others |= {"label_counts", "column_sums"}
    silos = comparison.file.model_dump(exclude=others)
    if comparison.digest:  # data that were given in Python, wherever they lie now
        silos = {"digest": comparison.digest}
    if is_declared(comparison.file.task):  # its records did not always have a split for each seed
        silos["test-parts"] = comparison.file.folds or "by seed"
    silos |= {"fingerprint": comparison.fingerprint} if comparison.fingerprint else {}
    data = [] if comparison.digest else _data_files(comparison)
    silos |= {"files": data} if data else {}
    digest = hashlib.sha256(json.dumps(silos, sort_keys=True).encode()).hexdigest()[:16]
    note = folder / "silos.txt"
    if note.exists() and note.read_text(encoding="utf-8").strip() != digest:
        raise refused(
            f"{folder} has a comparison over other silos than those of {file}: its silos, the "
            "task's declaration or data files have changed. Use another folder."
        )
    write_atomically(note, f"{digest}\n".encode())


def _data_files(comparison: Comparison) -> list[tuple[str, int, int]]:
    """Return path, size and time of every file of the silos' data.

    Data that the task may download is left out: it may arrive only when the first run begins.
    """
    options = [silo.options for silo in comparison.silos(comparison.repeats[0])]
    places = {
        str(own[k]) for own in options if not own.get("download") for k in PLACES if own.get(k)
    }
    files: list[tuple[str, int, int]] = []
    for one in map(Path, sorted(places)):
        for file in sorted(one.rglob("*")) if one.is_dir() else [one]:
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
    processes: bool,
) -> None:
    """Run what is missing of a repeat; add strategies that fail, and why, to ``failed``."""
    alone = comparison.alone
    order = [alone, *(name for name in comparison.runs if name != alone)]
    missing = [
        name
        for name in order
        if name not in failed and _stored(comparison, name, repeat, folder) is None
    ]
    if not missing:
        return
    with _playing(comparison, repeat, folder, processes=processes) as play:
        for name in missing:
            target = _record_of(comparison, name, repeat, folder)
            try:
                play(name, target)
            except FederationError as error:
                if name == alone:
                    raise  # all others are measured against it
                failed[name] = str(error)
                text = f"  {repeat}, {name}: could not be run: {error}"
            else:
                text = f"  {repeat}, {name}: {_outcome(measure(read_whole(target)))}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _playing(
    comparison: Comparison, repeat: Repeat, folder: Path, *, processes: bool
) -> Iterator[Callable[[str, Path], None]]:
    """Provide what plays a strategy over the silos of a repeat and keeps its record in a folder."""
    home = folder / f"federation-{repeat.suffix}"
    if isinstance(comparison, AppComparison):
        with comparison.playing(repeat, home if processes else None) as play_app:
            yield play_app
        return
    cut = isinstance(comparison.file.silos, int)
    silos = Given(tuple(comparison.silos(repeat)), {}, cut=cut, whose="the silos")
    with started(silos, home, len(silos.specs)) if processes else called(silos) as player:

        def play(name: str, target: Path) -> None:
            keys = comparison.keys(name, repeat)
            if name != comparison.alone:
                alone = _record_of(comparison, comparison.alone, repeat, folder)
                keys["baseline-run"] = str(alone.resolve())
            config = RunConfig.read(keys)
            record = player.play(config, title=keys["label"], folder=target)
            if record != target:  # the SuperLink's executor has chosen it
                ignored = shutil.ignore_patterns("checkpoints", "lock")
                shutil.copytree(record, target, ignore=ignored, dirs_exist_ok=True)

        yield play


def _outcome(found: Measure) -> str:
    groups = wire.counted(len(found.groups), "group")
    return f"mean {found.lead.title} {found.lead.text(found.mean)}, {groups}, {found.seconds:.1f} s"


def _record_of(comparison: Comparison, name: str, repeat: Repeat, folder: Path) -> Path:
    """Return a folder named after what the run depends on: a changed key is another run."""
    text = json.dumps(comparison.runs[name], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return folder / "records" / f"{slug(name)}-{digest}-{repeat.suffix}"


def _stored(comparison: Comparison, name: str, repeat: Repeat, folder: Path) -> Measure | None:
    target = _record_of(comparison, name, repeat, folder)
    if not (target / RECORD).exists():
        return None
    run = read_whole(target)
    return measure(run) if run.status == "completed" else None


# --- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """The figures and the advice of a comparison.

    ``measures`` and ``table`` have the strategies that were run; ``failed`` maps the others to
    reasons.
    """

    measures: Mapping[str, Mapping[Repeat, Measure]]
    table: list[Row]
    lead: Lead
    advice: Advice
    legend: str
    failed: Mapping[str, str]


def _figures(
    comparison: Comparison, folder: Path, file: Path, drawn: set[str], failed: Mapping[str, str]
) -> Figures:
    measures: dict[str, dict[Repeat, Measure]] = {}
    for name in comparison.runs:
        if name in failed:
            continue
        for repeat in comparison.repeats:
            found = _stored(comparison, name, repeat, folder)
            assert found is not None, "every run is already recorded"
            measures.setdefault(name, {})[repeat] = found
    alone = comparison.alone
    lead = next(iter(measures[alone].values())).lead
    target = target_of(comparison, lead, file)
    table = figures.rows(measures, alone=alone, target=target, drawn=drawn)
    over = figures.difference(measures[alone], measures[figures.best_of(measures)], drawn=drawn)
    advice = figures.advise(table, alone=alone, over_alone=over, lead=lead)
    return Figures(measures, table, lead, advice, legend(comparison, lead, drawn), failed)


def _keep(result: Figures, comparison: Comparison, folder: Path, title: str) -> None:
    content = {
        "title": title,
        "file": comparison.file.model_dump(exclude={"data"}),
        "metric": result.lead.metric,
        "unit": result.lead.unit,
        "table": [plain(row) for row in result.table],
        "advice": {
            "strategy": result.advice.strategy or None,
            "apart": result.advice.apart,
            "text": result.advice.text,
        },
        "legend": result.legend,
        "failed": dict(result.failed),
        "runs": [
            {"name": name, "seed": repeat.seed}
            | ({"fold": repeat.fold} if repeat.fold else {})
            | {"errors": dict(own.errors), "curve": own.curve, "groups": own.groups}
            | {"record": str(_record_of(comparison, name, repeat, folder).relative_to(folder))}
            for name, by_repeat in result.measures.items()
            for repeat, own in by_repeat.items()
        ],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(folder / COMPARISON, text.encode())
    notes = "".join(f"{line}\n\n" for line in failures(result.failed))
    page = f"# {title}\n\n{figures.markdown(result.table, result.lead)}\n{notes}"
    page += f"{result.advice.text}\n\n{result.legend}\n"
    write_atomically(folder / "comparison.md", page.encode())


def failures(failed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each strategy that could not be run."""
    return [f"{name} could not be run: {why}" for name, why in failed.items()]
