"""Find and read runs; damage costs only what is damaged.

``run.json`` is the record. Parts that are missing or damaged, for example after a crash, are taken
from ``events.jsonl``. ``Run.missing`` names everything that cannot be read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.server.paths import default_runs_dir, place
from coterie.server.runs.record.contents import Evaluations, Event, Round, Run, SiloFacts
from coterie.server.runs.record.format import event_of, run_of
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.reports import Evaluation

log = logging.getLogger("coterie.run")

RECORD, EVENTS = "run.json", "events.jsonl"
MORE_ROUNDS = (
    "To add rounds to a complete run, use `coterie run continue RUN --rounds N`; to change its "
    "keys, start a new run from its models: see "
    f"{wire.page('Stop and resume a run')}."
)
"""Advice for a run that cannot be resumed as requested."""


def find_run(name: str, root: Path | None) -> Path:
    """Return a run's folder by path, by name, by the end of its name (the run's id), or by label.

    A whole name has precedence over the end of another.

    Raises:
        FederationError: no run matches, or several do.
    """
    files = (RECORD, EVENTS)  # a damaged run may have only one of them
    own = place(name)
    if any((own / file).exists() for file in files):
        return own
    folder = root or default_runs_dir()
    runs = {path.parent for file in files for path in folder.glob(f"*/{file}")}
    found = (
        [run for run in runs if run.name == name]
        or sorted(run for run in runs if run.name.endswith(name))
        or sorted(run for run in runs if run.name.rpartition("-")[0] == name)
    )
    if len(found) != 1:
        names = ", ".join(run.name for run in found[:3]) + (", …" if len(found) > 3 else "")
        raise refused(
            f"{name!r} is ambiguous. Matching runs in {folder}: {names}. Give the whole name."
            if found
            else f"there is no run {name!r} in {folder}. `coterie runs` lists the recorded runs."
        )
    return found[0]


def newest_run(root: Path | None) -> Path | None:
    """Return the folder of the run that was written to last, or None."""
    events = (root or default_runs_dir()).glob(f"*/{EVENTS}")
    newest = max(events, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


# ---------------------------------------------------------------- what must be whole


def read_whole(folder: Path, *, brief: bool = False) -> Run:
    """Read a run from ``run.json`` alone, which must be complete; ``brief`` as in ``read_run``.

    Raises:
        FederationError: there is no record, or a part of it is damaged.
    """
    lost: list[str] = []
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refused(
            f"no run is recorded in {folder}: {error}. `coterie runs` lists the recorded runs."
        ) from None
    if brief and isinstance(record, dict):
        _shorten(record)
    run = run_of(record, folder=folder, lost=lost)
    if lost:
        raise refused(
            f"{folder / RECORD} is damaged: {lost[0]}. `coterie runs report` shows what can be "
            "read of it."
        )
    return run


def read_unfinished(folder: Path) -> Run:
    """Read the record of a run that can be resumed; if damaged, from ``events.jsonl``.

    Raises:
        FederationError: there is no record, its configuration is lost, or the run is complete.
    """
    try:
        run = read_whole(folder)
        if not run.config:
            raise refused(f"{folder / RECORD} is damaged: it has no configuration.")
        if run.status != "completed":  # a large one is not written after every round
            run = replace(read_run(folder), missing=())
    except FederationError as damage:
        if not any((folder / file).exists() for file in (RECORD, EVENTS)):
            raise
        run = read_run(folder)
        if not run.config:
            raise refused(
                f"{damage} {EVENTS} lacks the run's configuration as well: the run cannot be "
                "resumed. Start a new one with `coterie run STRATEGY`."
            ) from None
        if run.status != "completed":
            log.warning("%s %s is used instead.", damage, EVENTS)
    if run.status == "completed":
        raise refused(f"the run in {folder} is complete: there is nothing to resume. {MORE_ROUNDS}")
    return run


# ---------------------------------------------------------------- what is left of a damaged one


def read_run(folder: Path, *, brief: bool = False) -> Run:
    """Read as much of a run as its folder holds.

    ``brief`` omits the silos' training reports in ``run.json``, which are most of it.

    Raises:
        FederationError: nothing in the folder can be read.
    """
    missing: list[str] = []
    record = _read_record(folder / RECORD, missing)
    if brief:
        _shorten(record)
    run = run_of(record, folder=folder, lost=missing)
    rounds = {one.round: one for one in run.rounds}
    ended = run.ended
    whole = ended and 0 < len(rounds) == max(rounds, default=0)
    events = [] if whole else _read_events(folder / EVENTS, missing)
    if not record and not events:
        raise refused(
            f"{folder} has no record of a run: expected run.json or events.jsonl that can be "
            f"read ({'; '.join(missing) or 'both are empty'})."
        )
    if not record:
        run = _run_of_events(folder, events)
    found = {one.round: one for one in _standing(events) if one.round not in rounds}
    if found and ended:
        missing.append(
            f"run.json lacks {wire.counted(len(found), 'round')}, taken from events.jsonl"
        )
    rounds |= found
    evaluations = _evaluations(events)
    if run.final:
        evaluations.setdefault(max(rounds, default=0), {}).update(run.final.evaluation)
    run = replace(
        run,
        rounds=tuple(_evaluated(rounds[number], evaluations) for number in sorted(rounds)),
        silos=_all_silos(run.silos, rounds.values()),
    )
    return replace(run, missing=tuple(dict.fromkeys([*missing, *_gaps(run)])))


def _shorten(record: dict[str, Any]) -> None:
    rounds = record.get("rounds")
    for one in rounds if isinstance(rounds, list) else ():
        if isinstance(one, dict):
            one["silos"] = {}


def _read_record(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if isinstance(read, dict):
            return read
        damage = "not an object"
    except FileNotFoundError:
        missing.append("run.json is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        damage = _short(error)
    missing.append(f"run.json is damaged ({damage}); what follows is from events.jsonl")
    return {}


def _read_events(path: Path, missing: list[str]) -> list[Event]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        missing.append("events.jsonl is missing")
        return []
    except OSError as error:
        missing.append(f"events.jsonl cannot be read ({_short(error)})")
        return []
    events = [event_of(line) for line in lines if line.strip()]
    whole = events[:-1] if lines[-1].strip() else events  # the last may still be in the writing
    if damaged := whole.count(None):
        missing.append(f"damaged: {wire.counted(damaged, 'line')} of events.jsonl")
    return [event for event in events if event is not None]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:80]}"


def _run_of_events(folder: Path, events: Iterable[Event]) -> Run:
    run = Run(folder=folder, status="starting")
    for event in events:
        match event.kind:
            case "start" | "resume":
                run = replace(run, config=event.config, run_id=event.run_id)
            case "ready":
                run = replace(run, status="running")
            case "final":
                run = replace(run, refused=event.refused, final=event.report)
            case "round" if event.report:
                first = event.report.evaluation if event.report.evaluated_round == 0 else {}
                run = replace(run, refused=event.refused, initial=first or run.initial)
            case "end":
                run = replace(run, status=event.status, error=event.error, seconds=event.seconds)
    return run


def _standing(events: Iterable[Event]) -> list[Round]:
    """Return the rounds that count: a resumed run repeats those after its checkpoint."""
    standing: list[Round] = []
    for event in events:
        if event.kind == "round" and event.report and event.report.round >= 1:
            standing.append(event.report)
        elif event.kind == "resume":
            standing = [one for one in standing if one.round <= event.number]
    return standing


def _evaluations(events: Iterable[Event]) -> dict[int, dict[str, Evaluation]]:
    """Return round → evaluation of the models held after it, which comes with a later event."""
    found: dict[int, dict[str, Evaluation]] = {}
    for report in (event.report for event in events):
        if report is not None:
            of_round = found.setdefault(report.evaluated_round, {})
            for name, one in report.evaluation.items():
                of_round.setdefault(name, one)
    return found


def _evaluated(one: Round, evaluations: Mapping[int, Evaluations]) -> Round:
    missing = {n: e for n, e in evaluations.get(one.round, {}).items() if n not in one.errors}
    return replace(one, after={**one.after, **missing}) if missing else one


def _all_silos(silos: Mapping[str, SiloFacts], rounds: Iterable[Round]) -> dict[str, SiloFacts]:
    """Return all silos, sorted, including those that only rounds name."""
    named = {name for one in rounds for group in one.groups for name in group}
    named |= {name for one in rounds for name in one.silos}
    return {name: silos.get(name, SiloFacts()) for name in sorted(named | silos.keys())}


def _gaps(run: Run) -> list[str]:
    missing = []
    last = max((one.round for one in run.rounds), default=0)
    gaps = sorted(set(range(1, last + 1)) - {one.round for one in run.rounds})
    if gaps:
        missing.append(f"these rounds cannot be read: {_ranges(gaps)}")
    if run.status != "completed":
        done = f"{last} of {run.planned_rounds or '?'} rounds"
        words = {
            "failed": f"the run failed after {done}: {run.error or 'no reason is recorded'}",
            "stopped": f"the run was {run.error or 'stopped'}, after {done}",
            "running": f"the run is active or was interrupted: {done} are recorded",
            "starting": "the run had not started training when this was written",
        }
        missing.append(words.get(run.status, f"how the run ended is not recorded: {done}"))
    if not run.config:
        missing.append("the configuration cannot be read")
    if run.rounds and not any(one.errors for one in run.rounds):
        missing.append("no silo reported its error: no gains and no learning curves")
    return missing


def _ranges(numbers: list[int]) -> str:
    """Format ascending numbers as ``1–3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
