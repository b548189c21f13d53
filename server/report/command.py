"""Implementation of ``coterie runs report``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coterie.features.evaluation.coordinator import FILE as EVALUATION
from coterie.features.evaluation.coordinator import read_judgement
from coterie.features.statistics.survey import FILE as STATISTICS
from coterie.features.statistics.survey import read_survey
from coterie.pictures.page import Page, Picture, render, save
from coterie.server.paths import with_federation
from coterie.server.report.contribution import build_contribution_page, contribution_summary
from coterie.server.report.dossier import build_dossier
from coterie.server.report.evaluation import build_evaluation_page, evaluation_summary
from coterie.server.report.gains import Keys, baselines, compare, find_comparison, has
from coterie.server.report.history import follow_groups
from coterie.server.report.page import build_page, make_pictures, summary
from coterie.server.report.statistics import build_statistics_page, statistics_summary
from coterie.server.report.story import Story
from coterie.server.report.survival import page_of_fits, summary_of_fits
from coterie.server.runs.contribution import ANSWERS, SUMS
from coterie.server.runs.contribution import FILE as CONTRIBUTION
from coterie.server.runs.fitted import read_fitted
from coterie.server.runs.record import Run, find_run, read_run
from coterie.server.runs.tracking import TRACKERS, export
from coterie.strategies.errors import FederationError, refused
from coterie.system.commandline import json_text
from coterie.system.files import write_atomically, write_named
from coterie.system.terminal import LEGIBLE

DOSSIER = "dossier.md"
"""File name in the run's folder."""
FORMATS = ("html", "json", "png", "svg", *TRACKERS)


def build_story(run: Run, *, alone: Run | None = None, common: Run | None = None) -> Story:
    """Return a run with its comparison runs; search for those not given in the same folder."""
    by_itself, of_all = baselines(run)
    alone = alone or _configured(run) or find_comparison(run, by_itself)
    common = common or find_comparison(run, of_all)
    gains = compare(run, alone=alone, common=common)
    return Story(run, gains, follow_groups(run.rounds), alone, common)


def _configured(run: Run) -> Run | None:
    """Return the local-training run that the configuration names, if it exists."""
    name = str(run.config.get("baseline-run") or "")
    try:
        folder = find_run(name, run.folder.resolve().parent) if name else None
        return read_run(folder, brief=True) if folder else None
    except FederationError:
        return None


def write_report(
    name: str,
    *,
    kind: str = "html",
    root: Path | None = None,
    alone: str | None = None,
    common: str | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write a run's report and return the files.

    Args:
        name: the run's folder, name or id.
        kind: ``html`` and ``json`` write one file, ``png`` and ``svg`` one per picture;
            ``tensorboard`` writes event files, ``mlflow`` and ``wandb`` a run where they are set up
            to.
        alone, common: runs to compare with, named like ``name``.
        out: the file, or the folder of pictures; by default in the run's folder.
        say: receives a line of text before slow work.

    Raises:
        FederationError: the run does not exist or cannot be read, or a run to compare with has
            another strategy or task, or is unfinished.
    """
    if kind not in FORMATS:
        raise refused(f"format must be one of {', '.join(FORMATS)}. Got {kind!r}.")
    if out is not None and out.exists():
        _check_kind_of(out, kind)
    folder = find_run(name, root)
    made = of_command(folder)
    if (alone or common) and (made is not None or kind in TRACKERS):
        raise refused(
            "--baseline-local and --baseline-global go with a page or pictures of a run that "
            f"keeps models, not with {kind} of {folder.name}: leave them out."
        )
    if made is not None:
        return _write_of_command(folder, *made, kind, out)
    if kind in TRACKERS:
        return export(kind, read_run(folder), out)
    run = read_run(folder)
    by_itself, of_all = baselines(run)
    story = build_story(
        run,
        alone=_named(run, "--baseline-local", alone, root, by_itself),
        common=_named(run, "--baseline-global", common, root, of_all),
    )
    pictures = kind in ("png", "svg")
    target = out or folder / ("report" if pictures else f"report.{kind}")
    target.parent.mkdir(parents=True, exist_ok=True)  # what fails here fails before the drawing
    if kind != "json":
        say(f"Drawing the report of {run.name} …")
    if pictures:
        return _write_pictures(make_pictures(story)[0], kind, target)
    return [_write(target, render(build_page(story)) if kind == "html" else _json(summary(story)))]


def _json(document: Mapping[str, Any]) -> str:
    return json_text(document) + "\n"


def _write(target: Path, text: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_named(target, text.encode(errors=LEGIBLE))
    return target


def of_command(folder: Path) -> tuple[Page, dict[str, Any]] | None:
    """Return page and figures of a run that a command other than `run` started; else None."""
    if (folder / STATISTICS).exists():
        survey = read_survey(folder)
        return build_statistics_page(survey, folder.name), statistics_summary(survey)
    if (folder / EVALUATION).exists():
        judgement, lead = read_judgement(folder / EVALUATION), read_run(folder, brief=True).lead
        page = build_evaluation_page(judgement, lead, folder.name)
        return _named_in(page, folder), evaluation_summary(judgement, lead)
    if (folder / CONTRIBUTION).exists():
        judgement, run = read_judgement(folder / CONTRIBUTION), read_run(folder, brief=True)
        return build_contribution_page(judgement, run), contribution_summary(judgement, run)
    if (folder / SUMS).exists():
        fitted = read_fitted(folder / SUMS)
        return _named_in(page_of_fits(fitted, folder.name), folder), summary_of_fits(fitted)
    return None


def _named_in(page: Page, folder: Path) -> Page:
    commands = {what: with_federation(line, folder) for what, line in page.commands.items()}
    return replace(page, commands=commands)


def _write_of_command(
    folder: Path, page: Page, figures: Mapping[str, Any], kind: str, out: Path | None
) -> list[Path]:
    if kind in ("png", "svg"):
        return _write_pictures(page.pictures, kind, out or folder / "report")
    if kind not in ("html", "json"):
        raise refused(f"{folder.name} trained no models to keep, so that {kind} has nothing of it.")
    text = render(page) if kind == "html" else _json(figures)
    return [_write(out or folder / f"report.{kind}", text)]


def _named(run: Run, option: str, name: str | None, root: Path | None, keys: Keys) -> Run | None:
    """Read the run that an option names, if it does, and check that it can be compared."""
    if not name:
        return None
    folder = find_run(name, root)
    found = read_run(folder, brief=True)
    if folder.resolve() == run.folder.resolve():
        raise refused(f"{option} must name a run other than the reported {run.name}.")
    more = ", ".join(f"{key} = {value!r}" for key, value in keys.items() if key != "strategy")
    strategy = f"{keys['strategy']} ({more})" if more else keys["strategy"]
    if not has(found, keys) or found.status != "completed":
        raise refused(
            f"{option} must name a completed run of {strategy}. {found.name} is a run of "
            f"{found.strategy or 'an unknown strategy'}, {found.status}."
        )
    task, other = run.config.get("task"), found.config.get("task")
    if task is not None and task != other:
        raise refused(
            f"{option} must name a run of the same task, {task}. {found.name} has task {other}: "
            f"name another one, or run {strategy} on this task first."
        )
    if run.metric != found.metric:
        raise refused(
            f"{option} must name a run with the same primary metric, {run.metric}. {found.name} "
            f"has {found.metric}: name another one, or run {strategy} with this metric first."
        )
    return found


def print_report(
    name: str,
    *,
    kind: str,
    root: Path | None,
    alone: str | None,
    common: str | None,
    out: Path | None,
) -> None:
    """Write a report and print the paths of its files."""
    say = partial(print, file=sys.stderr, flush=True)
    files = write_report(name, kind=kind, root=root, alone=alone, common=common, out=out, say=say)
    for file in files:
        print(file)


def write_dossier(name: str, *, root: Path | None, out: Path | None) -> Path:
    """Write the technical documentation that a run's record allows; return the file.

    Raises ``FederationError`` as ``write_report``, and for a run that keeps no model.
    """
    folder = find_run(name, root)
    if any((folder / one).exists() for one in ANSWERS):
        raise refused(f"{folder.name} keeps no model, so that there is none to document.")
    return _write(out or folder / DOSSIER, build_dossier(build_story(read_run(folder))))


def _check_kind_of(out: Path, kind: str) -> None:
    if kind in ("html", "json") and out.is_dir():
        raise refused(
            f"--output must name a file for the format {kind}, and {out} is a folder. Name a file "
            f"in it, such as {out / f'report.{kind}'}."
        )
    if kind in ("png", "svg", "tensorboard") and not out.is_dir():
        raise refused(
            f"--output must name a folder for the format {kind}, and {out} is a file. Name a "
            "folder, which need not be there yet."
        )


def _write_pictures(pictures: Sequence[Picture], kind: str, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for picture in pictures:
        files.append(folder / f"{picture.key}.{kind}")
        write_atomically(files[-1], save(picture, "png" if kind == "png" else "svg"))
    return files
