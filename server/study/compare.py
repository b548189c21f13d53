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
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from coterie import wire
from coterie.server.machine.local import LocalFederation
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import RECORD, read_whole
from coterie.server.runs.record.metrics import Lead
from coterie.server.study import comparison as figures
from coterie.server.study.comparison import Advice, Measure, Repeat, Row, measure
from coterie.server.study.comparison_file import (
    Comparison,
    check_model,
    is_declared,
    read,
    slug,
    target_of,
    wrong,
)
from coterie.server.study.playing import in_this_process, on_processes
from coterie.server.study.silos import close_silos, open_silos
from coterie.strategies.errors import EXIT_RUN, FederationError
from coterie.system.files import write_atomically
from coterie.system.terminal import aside, wide
from coterie.tasks.base import TaskError
from coterie.tasks.simulation import PLACES

# --- running --------------------------------------------------------------------------------------


def compare(
    console: Console,
    file: Path,
    *,
    data: Path | None = None,
    folder: Path | None = None,
    federation: bool = False,
) -> list[Row]:
    """Run what is missing, print the table and return its rows.

    Args:
        data: data folder, in place of the file's.
        folder: for all records, ``comparison.json`` and ``.md``; an existing one is continued. By
            default a new one under ``runs/``.
        federation: use real processes and gRPC, in place of calls in this process.

    Raises:
        FederationError: the file is wrong, or a run failed.
    """
    comparison = read(file, data=data)
    check_model(comparison, file)
    drawn = _drawn(comparison, file)
    folder = folder or Path("runs") / datetime.now().strftime(f"{slug(file.stem)}-%Y%m%d-%H%M%S")
    (folder / "records").mkdir(parents=True, exist_ok=True)
    _keep_file(comparison, folder, file)
    title = comparison.file.title or file.stem
    count = len(comparison.silos(comparison.repeats[0]))
    where = "in separate processes" if federation else "in this process"
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
        _run_repeat(progress, comparison, repeat, folder, failed, federation=federation)
    result = _result(comparison, folder, file, drawn, failed)
    _keep(result, comparison, folder, title)
    _print(console, result)
    if failed:
        raise FederationError(
            f"{len(failed)} of {len(comparison.runs)} strategies could not be run: "
            f"{', '.join(failed)}. The table in {folder} shows the others.",
            exit_code=EXIT_RUN,
        )
    return result.table


def _drawn(comparison: Comparison, file: Path) -> set[str]:
    """Return ``Comparison.drawn``; reject folds that would all be the same."""
    try:
        drawn = comparison.drawn()
    except TaskError as error:
        raise wrong(f"{file}: {error}") from None
    if comparison.file.folds and not drawn:
        raise wrong(
            f"{file}: folds cannot be used here, because every silo has its own test data. "
            "Leave folds out, or give the silos' data without a test part."
        )
    return drawn


def _keep_file(comparison: Comparison, folder: Path, file: Path) -> None:
    """Reject a folder of another comparison, so that a table never mixes silos or splits."""
    others = {"title", "seeds", "folds", "target", "strategies", "run"}
    others |= {"label_counts", "column_sums"}
    silos = comparison.file.model_dump(exclude=others)
    if is_declared(comparison.file.task):  # its records did not always have a split for each seed
        silos["test-parts"] = comparison.file.folds or "by seed"
    silos |= {"fingerprint": comparison.fingerprint} if comparison.fingerprint else {}
    data = _data_files(comparison)
    silos |= {"files": data} if data else {}
    digest = hashlib.sha256(json.dumps(silos, sort_keys=True).encode()).hexdigest()[:16]
    note = folder / "silos.txt"
    if note.exists() and note.read_text(encoding="utf-8").strip() != digest:
        raise wrong(
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
                keys["baseline-run"] = str(_record_of(comparison, alone, repeat, folder).resolve())
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
                text = f"  {repeat}, {name}: could not be run: {error}"
            else:
                text = f"  {repeat}, {name}: {_outcome(measure(read_whole(target)))}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


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
class Result:
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
    target = target_of(comparison, lead, file)
    table = figures.rows(measures, alone=alone, target=target, drawn=drawn)
    over = figures.difference(measures[alone], measures[figures.best_of(measures)], drawn=drawn)
    advice = figures.advise(table, alone=alone, over_alone=over, lead=lead)
    return Result(measures, table, lead, advice, legend(comparison, lead, drawn), failed)


def _keep(result: Result, comparison: Comparison, folder: Path, title: str) -> None:
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
    """Return an explanation of the columns, in a paragraph."""
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
    file = comparison.file
    fixed = [
        silo.name for silo in comparison.silos(comparison.repeats[0]) if silo.name not in drawn
    ]
    count = len(comparison.repeats)
    if count == 1:
        return "There was one run of each strategy, so the effect of chance is unknown."
    if not drawn:
        return (
            f"±: standard deviation over {count} seeds, which change the initial model and the "
            "order of training. The test samples were the same in all, so it does not cover "
            "the choice of test samples."
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
        f"±: standard deviation over {count} seeds, each with different test samples, a "
        f"different initial model and a different order of training.{others}"
    )


def _test_text(comparison: Comparison, drawn: set[str]) -> str:
    times = "corrected for the number of strategies (Bonferroni)."
    if not drawn:
        return (
            "by Wilcoxon's signed-rank test over the silos' means, because the test samples were "
            f"the same in all runs (with fewer than six silos it cannot be small); {times}"
        )
    if len(comparison.repeats) == 1:
        return "which needs more than one run."
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
