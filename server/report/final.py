"""Printed results of a run that has ended."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie import wire
from coterie.server.report.families import sentences_in
from coterie.server.report.race import thin_evidence
from coterie.server.report.view import collaboration_text
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import Evaluations, Run, SiloFacts, read_whole
from coterie.system.terminal import say

if TYPE_CHECKING:
    from coterie.pictures.page import Page
    from coterie.pictures.page import Table as Rows

MAX_SILOS_LISTED = 60


def print_final(console: Console, folder: Path, *, as_json: bool = False) -> None:
    """Print the result of a recorded run by silo, or by group if there are many silos.

    ``as_json`` is for a run of a command that prints a document.
    """
    run = read_whole(folder)
    if run.strategy in (*wire.UNTRAINED, wire.CONTRIBUTION):
        shown = {
            wire.ONLY_STATISTICS: _print_statistics,
            wire.ONLY_EVALUATION: _print_evaluation,
            wire.CONTRIBUTION: _print_contribution,
            wire.REGRESSION: _print_regression,
        }[run.strategy]
        shown(console, folder, as_json=as_json)
        return
    console.print(_silo_table(run) if len(_last(run)) <= MAX_SILOS_LISTED else _group_table(run))
    if useless := no_better_than_constant(run):
        say(console, f"no better than the best constant answer: {', '.join(useless)}")
    if run.ended_early:
        say(console, f"ended early, after round {len(run.rounds)}: {run.ended_early}")
    if run.final and (choice := run.final.grouping.by_choice):
        say(console, f"{choice}.")
    if run.final and len(_last(run)) <= MAX_SILOS_LISTED:
        for name, text in sentences_in([*run.rounds, run.final]).items():
            say(console, f"{name} {text}", highlight=False)
    if run.collaboration:
        console.print(collaboration_text(run.collaboration, run.lead), soft_wrap=True)
    if thin := thin_evidence(run):
        say(console, f"warning: {thin}", highlight=False)
    since = f" since it was {run.resumed[-1].words}" if run.resumed else ""
    say(console, f"{run.seconds:.1f} s{since}; models and record: {folder}")
    _write_report(console, folder)


def no_better_than_constant(run: Run) -> list[str]:
    """Return the silos whose final model learned nothing, as far as the coordinator can see.

    It does not beat the best constant answer (``trivial``, if the silo reports it), R² ≤ 0, or
    AUROC ≤ 0.5.
    """
    errors, metrics = run.final_errors, run.final.metrics if run.final else {}
    found = []
    for name, own in sorted(metrics.items()):
        known = {key: value for key, value in own.items() if isinstance(value, int | float)}
        constant = known.get(wire.TRIVIAL, math.inf) <= errors.get(name, -math.inf)
        if constant or known.get("r2", 1.0) <= 0 or known.get("auroc", 1.0) <= 0.5:
            found.append(name)
    return found


def _print_statistics(console: Console, folder: Path, *, as_json: bool) -> None:
    """Print the statistics that each silo shared, and warnings about the data."""
    from coterie.features.statistics.survey import read_survey
    from coterie.server.report.survey import kinds_of, warnings

    survey = read_survey(folder)
    if as_json:
        from coterie.server.report.statistics import statistics_summary

        print(statistics_summary(survey), end="")
        return
    table = Table("silo", "training samples", "shares")
    for name, own in sorted(survey.reported.items()):
        table.add_row(Text(name), f"{own.samples:,}", kinds_of(own))
    console.print(table)
    for name, why in sorted(survey.silent.items()):
        say(console, f"{name} is left out: {why}", highlight=False)
    for line in warnings(survey):
        say(console, f"warning: {line}", highlight=False)
    _write_report(console, folder)


def _print_evaluation(console: Console, folder: Path, *, as_json: bool) -> None:
    """Print every model's figure at every silo, and why one is missing."""
    from coterie.features.evaluation.coordinator import FILE, read_judgement
    from coterie.server.report import evaluation

    judgement, lead = read_judgement(folder / FILE), read_whole(folder).lead
    if as_json:
        print(evaluation.evaluation_summary(judgement, lead), end="")
        return
    page = evaluation.build_evaluation_page(judgement, lead, folder.name)
    console.print(_first_table(page))
    say(console, f"{lead.title} with its 95% interval; * the model of the silo's own group")
    for silo, why in sorted(judgement.silent.items()):
        say(console, f"{silo} evaluates nothing: {why}", highlight=False)
    say(console, page.lead)
    _write_report(console, folder)


def _print_contribution(console: Console, folder: Path, *, as_json: bool) -> None:
    """Print what each group lost without each silo."""
    from coterie.features.evaluation.coordinator import read_judgement
    from coterie.server.report import contribution
    from coterie.server.runs.contribution import FILE

    judgement, run = read_judgement(folder / FILE), read_whole(folder)
    if as_json:
        print(contribution.contribution_summary(judgement, run), end="")
        return
    page = contribution.build_contribution_page(judgement, run)
    console.print(_first_table(page))
    say(console, f"{page.lead} {page.detail}")
    _write_report(console, folder)


def _print_regression(console: Console, folder: Path, *, as_json: bool) -> None:
    """Print the coefficients of every group, and who was left out."""
    from coterie.server.report import survival
    from coterie.server.runs.contribution import SUMS
    from coterie.server.runs.fitted import read_fitted

    fitted = read_fitted(folder / SUMS)
    if as_json:
        print(survival.summary_of_fits(fitted), end="")
        return
    page = survival.page_of_fits(fitted, folder.name)
    for title, shown in page.tables.items():
        say(console, f"\n{title}", highlight=False)
        console.print(_as_table(shown))
    for text in page.warnings:
        say(console, f"warning: {text}", highlight=False)
    _write_report(console, folder)


def _first_table(page: Page) -> Table:
    return _as_table(next(iter(page.tables.values())))


def _as_table(shown: Rows) -> Table:
    table = Table(*shown.header)
    for row in shown.rows:
        table.add_row(*map(Text, row))
    return table


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
        table.add_column(column, mean, justify="right")
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
        table.add_row(Text(name), *cells)
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
            *map(run.lead.text, figures),
        )
    return table
