"""Printed results of a run that has ended."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from coterie import wire
from coterie.server.report.families import sentences_in
from coterie.server.report.race import thin_evidence
from coterie.server.report.view import collaboration_text
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import Evaluations, Run, SiloFacts, read_whole
from coterie.system.commandline import print_json
from coterie.system.terminal import aside, say

if TYPE_CHECKING:
    from coterie.pictures.page import Table as Rows

MAX_SILOS_LISTED = 60


def print_final(console: Console, folder: Path, *, as_json: bool = False) -> None:
    """Print the result of a recorded run by silo, or by group if there are many silos.

    ``as_json`` is for a run of a command that prints a document.
    """
    run = read_whole(folder)
    if run.strategy in (*wire.UNTRAINED, wire.CONTRIBUTION):
        _print_answers(console, run, as_json=as_json)
        return
    console.print(_silo_table(run) if len(_last(run)) <= MAX_SILOS_LISTED else _group_table(run))
    for what, names in learned_nothing(run).items():
        say(console, f"{what}: {', '.join(names)}", highlight=False)
    if run.ended_early:
        say(console, f"ended early, after round {len(run.rounds)}: {run.ended_early}")
    if run.final and (choice := run.final.grouping.by_choice):
        say(console, f"{choice}.")
    if run.final and len(_last(run)) <= MAX_SILOS_LISTED:
        for name, text in sentences_in([*run.rounds, run.final]).items():
            say(console, f"{name} {text}", highlight=False)
    if run.collaboration:
        say(console, collaboration_text(run.collaboration, run.lead))
    if thin := thin_evidence(run):
        say(console, f"warning: {thin}", highlight=False)
    since = f" since it was {run.resumed[-1].words}" if run.resumed else ""
    say(console, f"{run.seconds:.1f} s{since}; models and record: {folder}")
    _write_report(console, folder)


def learned_nothing(run: Run) -> dict[str, list[str]]:
    """Return the silos whose final model learned nothing, by what the coordinator saw of it.

    A silo is named once: whether the best constant answer is as good is known where the silo
    reports that answer's error (``trivial``).
    """
    errors, metrics = run.final_errors, run.final.metrics if run.final else {}
    found: dict[str, list[str]] = {}
    for name, own in sorted(metrics.items()):
        known = {key: value for key, value in own.items() if isinstance(value, int | float)}
        seen = {
            "no better than the best constant answer": known.get(wire.TRIVIAL, math.inf)
            <= errors.get(name, -math.inf),
            "R² is at most 0": known.get("r2", 1.0) <= 0,
            "AUROC is at most 0.5": known.get("auroc", 1.0) <= 0.5,
        }
        if what := next((what for what, is_so in seen.items() if is_so), ""):
            found.setdefault(what, []).append(name)
    return found


def _print_answers(console: Console, run: Run, *, as_json: bool) -> None:
    """Print what silos answered in a run that a command other than ``run`` started."""
    from coterie.server.report.command import of_command  # draws: loaded late
    from coterie.server.report.evaluation import MISSING
    from coterie.server.report.statistics import TITLES

    made = of_command(run.folder)
    assert made is not None  # the run is complete, so its answers are there
    page, figures = made
    for text in page.warnings:
        say(aside(Console(stderr=True)), f"warning: {text}", highlight=False)
    if as_json:
        print_json(figures)
        return
    if run.strategy == wire.ONLY_STATISTICS:
        shared, silent = (page.tables[one].rows if one in page.tables else [] for one in TITLES)
        table = Table("silo", "training samples", "shares")
        for name, samples, *_, shares, _ in shared:
            table.add_row(Text(name), samples, shares)
        console.print(table)
        for name, _, why in silent:
            say(console, f"{name} is left out: {why}", highlight=False)
    else:
        every = run.strategy == wire.REGRESSION
        for number, (title, shown) in enumerate(page.tables.items()):
            if every or not number or title == MISSING:
                say(console, f"\n{title}", highlight=False)
                _print_rows(console, shown)
        say(console, f"{page.lead} {page.detail}")
    _write_report(console, run.folder)


def _print_rows(console: Console, shown: Rows) -> None:
    table = Table(*(Column(Text(name)) for name in shown.header))
    for row in shown.rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _write_report(console: Console, folder: Path) -> None:
    from coterie.server.report.command import write_report  # draws: loaded late
    from coterie.system.files import explained

    try:
        (report,) = write_report(str(folder))
    except OSError as error:  # the run is complete all the same
        say(
            console,
            f"no report was written: {explained(error).rstrip('.')}. Write it elsewhere with: "
            f"coterie runs report {folder} --output FILE",
        )
        return
    say(console, f"report: {report}")


def _last(run: Run) -> Evaluations:
    return run.final.evaluation if run.final else {}


def _silo_table(run: Run) -> Table:
    """Return a table of all final models; silos that left are not in the mean."""
    errors, own = run.last_errors(), run.last_personal_errors()
    here, tested = run.final_errors, run.test_counts()
    table = Table(show_footer=bool(here))
    table.add_column("silo", f"mean of {len(here)}")
    for column in ("samples", "tested on", "group"):
        table.add_column(column, justify="right")
    columns = [(run.lead.title, here)]
    columns += [("Per", {name: own[name] for name in own if name in here})] if own else []
    for column, known in columns:
        values = list(known.values())
        mean = run.lead.text(sum(values) / len(values) if values else None)
        table.add_column(column, Text(mean), justify="right")  # a unit may have brackets
    letters = letters_of(run.final_groups)
    for name in [*_last(run), *(name for name in errors if name not in _last(run))]:
        facts = run.silos.get(name, SiloFacts())
        cells = [
            "–" if math.isnan(facts.num_examples) else f"{facts.num_examples:.0f}",
            str(tested.get(name, "–")),
            (letters.get(name, "–") or "alone") if name in _last(run) else "left",
            run.lead.text(errors.get(name)),
        ]
        cells += [run.lead.text(own.get(name))] if own else []
        table.add_row(*map(Text, (name, *cells)))
    return table


def _group_table(run: Run) -> Table:
    final, known, own = _last(run), run.final_errors, run.last_personal_errors()
    columns = ("group", "silos", "samples", f"mean {run.lead.title}", "lowest", "highest")
    table = Table(*columns, *(["mean Per"] if own else []))
    letters = letters_of(run.final_groups)
    for group in run.final_groups:
        errors = [known[n] for n in group if n in known]
        samples = sum(run.silos[n].num_examples for n in group)
        figures: list[float | None] = [None] * 3
        if errors:
            figures = [sum(errors) / len(errors), min(errors), max(errors)]
        per = [own[n] for n in group if n in own and n in final]
        figures += [sum(per) / len(per)] if per else []
        table.add_row(
            letters[group[0]] or group[0],
            str(len(group)),
            f"{samples:.0f}",
            *map(Text, map(run.lead.text, figures)),
        )
    return table
