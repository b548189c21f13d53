"""Erasing a silo at the coordinator, with a signed statement of the result.

The silo's key is removed, runs that hold its models are stopped, and its data are deleted. The plan
is written first (``withdrawals/NAME.intent``), with every file and its SHA-256. The statement
replaces it at the end. An interrupted withdrawal continues at the next call or start.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from coterie.engine.fast.superlink.leftovers import BusyError, forget_ended_runs
from coterie.server.machine.link import control
from coterie.server.runs.checkpoint import others_of
from coterie.server.runs.contribution import ANSWERS
from coterie.server.runs.going_on import CHECKPOINTS
from coterie.server.runs.record import EVENTS, RECORD, Round, Run, read_run
from coterie.server.runs.record.format import event_of
from coterie.server.site import audit, enrolled, operators
from coterie.server.site.coordinator import answers, sync_superlink
from coterie.server.site.federation import Federation
from coterie.server.site.statement import Averaged, Deleted, Withdrawal, from_fields, signed
from coterie.strategies.errors import FederationError, refused
from coterie.system.files import (
    LOOK_S,
    LockedError,
    held_by,
    locked,
    make_folder,
    sync,
    write_atomically,
)
from coterie.system.processes import account, utc_now
from coterie.wire import counted, is_silo_name

FOLDER, LOCK = "withdrawals", "lock"
REPORTS = "report*"
"""Files, and the folder of pictures, of reports in a run's folder."""
LOCK_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0
"""Time for stopped runs to end."""


def withdraw(
    made: Federation, name: str, *, who: str = "", say: Callable[[str], None] = lambda _: None
) -> tuple[Withdrawal, Path]:
    """Remove a silo's key and delete its data; return the statement and its file.

    Args:
        name: of a silo that is, or was, enrolled.
        who: operator, for the log; empty: the account of this process.
        say: receives a message for each run that is stopped.

    Raises:
        FederationError: no such silo was ever enrolled; or the key is removed, but a run does not
            end, or the SuperLink or its database cannot be changed now.
    """
    with _held(made):
        intent = _intent(made, name)
        if intent.exists():
            work = _read(intent)
        else:
            keys = _require_known(made, name)
            audit.note(made, "withdraw", who=who, silo=name)
            work = Withdrawal(name, keys, utc_now(), asked_by=who or account())
            _write(intent, work)
        return _carry_out(made, work, say)


def planned(made: Federation, name: str) -> Iterator[str]:
    """Yield what ``withdraw`` would stop and delete now, as text.

    Raises ``FederationError`` if no such silo was ever enrolled.
    """
    _require_known(made, name)
    stopped, files = [], []
    for folder in _run_folders(made):
        if _took_part(folder, name):
            stopped += [folder.name] if held_by(folder) is not None else []
            files += [_about(made, file) for file in _files(folder, name)]
    yield f"Nothing was changed. Erasing {name} would stop: {', '.join(stopped) or 'no run'}."
    total = sum(one.num_bytes for one in files)
    text = "It would delete all messages of ended runs in the SuperLink's database, and"
    yield f"{text} {counted(len(files), 'file')} ({total:,} bytes){':' if files else '.'}"
    yield from (f"  {one.file}" for one in files)


def _require_known(made: Federation, name: str) -> list[str]:
    """Return the fingerprints of the keys that a silo was enrolled with."""
    keys = [one.fingerprint for one in enrolled.read(made.roster) if one.name == name]
    if not keys or not is_silo_name(name):
        raise refused(f"no silo {name!r} was ever enrolled. `coterie members list` lists them.")
    return keys


def finish_all(made: Federation, say: Callable[[str], None]) -> None:
    """Continue interrupted withdrawals; report why any of them must still wait."""
    for intent in sorted((made.folder / FOLDER).glob("*.intent")):
        try:
            done, file = withdraw(made, _read(intent).silo, say=say)
            say(f"The withdrawal of silo {done.silo} is complete. Statement: {file}")
        except FederationError as error:
            say(f"A withdrawal is waiting: {error}")


def _carry_out(
    made: Federation, work: Withdrawal, say: Callable[[str], None]
) -> tuple[Withdrawal, Path]:
    intent = _intent(made, work.silo)
    # Not a silo of the name that was let in since, with another key.
    here = [one for one in enrolled.read(made.roster) if one.name == work.silo and not one.removed]
    if here and here[0].fingerprint in work.keys:
        enrolled.remove(made.roster, work.silo)
    unfinished = []
    if answers(made):
        try:
            sync_superlink(made)
        except FederationError as error:
            unfinished.append(f"The SuperLink could not be notified: {error}")
    # Only now: shut out, it can come into no further run.
    work, why = _stop_runs(made, work, say)
    unfinished += why
    for folder in _run_folders(made):
        try:
            with locked(folder):
                work = _from_run(made, folder, work)
        except LockedError:
            if _took_part(folder, work.silo):
                stop = f"coterie runs stop {folder.name} --federation {made.folder}"
                unfinished.append(f"Run {folder.name} is active and has its models: {stop}")
    if not unfinished:
        try:
            work = _from_database(made, work)
        except BusyError as error:
            unfinished.append(str(error))
    if unfinished:
        raise FederationError(
            f"{work.silo} is removed, but the withdrawal is not complete. "
            + " ".join(f"{why.rstrip('.')}." for why in unfinished)
            + (
                " Then run `coterie members erase` again; each start of `coterie superlink` also "
                "repeats it."
            )
        )
    work = replace(work, done=utc_now())
    file = made.folder / FOLDER / f"{work.silo}-{work.asked.replace(':', '')[:17]}.json"
    write_atomically(file, signed(made, work))
    audit.note(made, "withdrawn", silo=work.silo, files=len(work.deleted), statement=file.name)
    intent.unlink()
    sync(intent.parent)
    return work, file


def _stop_runs(
    made: Federation, work: Withdrawal, say: Callable[[str], None]
) -> tuple[Withdrawal, list[str]]:
    """Stop the active runs of a silo and wait for their end; return the plan and any problems.

    A run that only listed the silos, without this one, is not stopped.
    """
    going = [f for f in _run_folders(made) if held_by(f) is not None and _took_part(f, work.silo)]
    if not going or not answers(made):
        return work, []
    ids = {folder: run.run_id for folder in going if (run := _run_of(folder)) is not None}
    work = replace(work, stopped=tuple(sorted({*work.stopped, *(folder.name for folder in going)})))
    _write(_intent(made, work.silo), work)
    try:
        with control(
            made.control_address, root_certificates=made.ca, identity=operators.local_identity(made)
        ) as calls:
            unended = {str(run.run_id) for run in calls.runs() if not run.ended}
            for folder in going:
                say(f"Stopping run {folder.name}, which has models of {work.silo}.")
                if ids.get(folder) in unended:
                    calls.stop(int(ids[folder]))
    except FederationError as error:
        return work, [f"Runs were not stopped: {error}"]
    deadline = time.monotonic() + STOP_DEADLINE_S
    while any(held_by(folder) is not None for folder in going) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return work, []


def _from_database(made: Federation, work: Withdrawal) -> Withdrawal:
    """Delete what the SuperLink still keeps of ended runs; the plan is written first.

    Raises ``BusyError`` if it is busy for too long, or cannot be read.
    """
    aside = sorted(made.folder.glob(f"{made.database.name}.damaged-*"))
    planned = {one.file: one for one in (*work.deleted, *(_about(made, file) for file in aside))}
    work = replace(work, deleted=[planned[name] for name in sorted(planned)])
    _write(_intent(made, work.silo), work)
    forget_ended_runs(made.database)
    for file in aside:
        file.unlink(missing_ok=True)
    sync(made.folder)
    return work


# ---------------------------------------------------------------- one run


def _from_run(made: Federation, folder: Path, work: Withdrawal) -> Withdrawal:
    """Delete an inactive run's files about a silo; the plan is written first."""
    if not _took_part(folder, work.silo):
        return work
    files = list(_files(folder, work.silo))
    planned = {one.file: one for one in work.deleted}
    for file in files:
        one = _about(made, file)
        planned[one.file] = one
    rounds, run = _rounds(folder), _run_of(folder)
    complete = run is not None and run.status == "completed"
    restart = {} if complete else {folder.name: _restart(folder, set(files))}
    runs = sorted({*work.runs, folder.name})
    averaged = [one for one in work.averaged if one.run != folder.name]
    averaged += _averaged(folder.name, rounds, work.silo)
    work = replace(
        work,
        runs=runs,
        deleted=[planned[name] for name in sorted(planned)],
        averaged=averaged,
        restart={**work.restart, **restart},
    )
    _write(_intent(made, work.silo), work)
    for file in files:
        file.unlink(missing_ok=True)
    for parent in {file.parent for file in files}:
        sync(parent)
    return work


def _run_folders(made: Federation) -> list[Path]:
    files = (RECORD, EVENTS)  # a damaged run may have only one of them
    return sorted({path.parent for file in files for path in made.runs.glob(f"*/{file}")})


def _took_part(folder: Path, name: str) -> bool:
    if any(_files(folder, name)) or _was_here(folder, name):
        return True
    run = _run_of(folder)
    return run is not None and any(map(_was_in(name), run.rounds))


def _was_here(folder: Path, name: str) -> bool:
    """Return whether a silo was in a round, even an unfinished one, which has its update."""
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    events = (event_of(line) for line in lines if '"here"' in line)
    if any(event is not None and event.kind == "here" and name in event.silos for event in events):
        return True
    run = _run_of(folder)
    return run is not None and name in run.silos


def _files(folder: Path, name: str) -> Iterator[Path]:
    """Yield a run's files with a silo's model, update or answers, alone or with others'."""
    yield from (folder / "models").glob(f"{name}.safetensors*")  # also what a kill left unfinished
    answers = [file for one in ANSWERS for file in folder.glob(f"{one}*")]
    if answers and _was_here(folder, name):
        reports = [*folder.glob(REPORTS), *folder.glob(f"{REPORTS}/*")]
        yield from (file for file in reports if file.is_file())
        yield from answers  # last: after a kill they are how the reports are found
    first = min((one.round for one in _rounds(folder) if _was_in(name)(one)), default=None)
    found = sorted((folder / CHECKPOINTS).glob("*"))
    staying: list[Path] = []
    for file in (file for file in found if file.stem.startswith("round-")):
        number = file.stem.removeprefix("round-")
        late = first is not None and number.isdecimal() and int(number) >= first
        if late or _names(file, name):
            yield file
        else:
            staying.append(file)
    # Other files hold arrays of the silos that had them at the time. Those that a checkpoint from
    # before the silo joined needs were written before that.
    needed = {other for file in staying for other in others_of(file)}
    yield from (f for f in found if not f.stem.startswith("round-") and f.name not in needed)


def _names(checkpoint: Path, silo: str) -> bool:
    """Return whether a checkpoint mentions a silo; an unreadable one counts as yes."""
    try:
        with safe_open(checkpoint, framework="np") as opened:
            return json.dumps(silo) in (opened.metadata() or {}).get("tree", "")
    except (OSError, SafetensorError):
        return True


def _restart(folder: Path, deleted: set[Path]) -> int:
    """Return the last round whose checkpoint stays; 0 if there is none."""
    left = set((folder / CHECKPOINTS).glob("round-*.safetensors")) - deleted
    return max((int(file.stem.removeprefix("round-")) for file in left), default=0)


def _was_in(name: str) -> Callable[[Round], bool]:
    return lambda one: name in one.silos or name in one.joined or any(name in g for g in one.groups)


def _averaged(run: str, rounds: Sequence[Round], name: str) -> list[Averaged]:
    """Return the rounds with its update in a group of several, joined while the group stays."""
    found: list[Averaged] = []
    for one in rounds:
        group = next((sorted(group) for group in one.groups if name in group), [])
        if name not in one.silos or name in one.left_out or len(group) < 2:
            continue
        if found and found[-1].last == one.round - 1 and list(found[-1].group) == group:
            found[-1] = replace(found[-1], last=one.round)
        else:
            found.append(Averaged(run, one.round, one.round, group))
    return found


def _rounds(folder: Path) -> Sequence[Round]:
    run = _run_of(folder)
    return () if run is None else run.rounds


def _run_of(folder: Path) -> Run | None:
    try:
        return read_run(folder)
    except FederationError:
        return None


def _about(made: Federation, file: Path) -> Deleted:
    place = file.relative_to(made.folder).as_posix()
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return Deleted(place, file.stat().st_size, digest)


# ---------------------------------------------------------------- files


def _intent(made: Federation, name: str) -> Path:
    return made.folder / FOLDER / f"{name}.intent"


def _write(intent: Path, work: Withdrawal) -> None:
    write_atomically(intent, json.dumps(asdict(work), indent=1).encode())


def _read(intent: Path) -> Withdrawal:
    try:
        return from_fields(json.loads(intent.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refused(
            f"{intent} cannot be read: {error}. Remove it, and withdraw the silo again."
        ) from None


@contextmanager
def _held(made: Federation) -> Iterator[None]:
    make_folder(made.folder / FOLDER, private=True)
    try:
        with locked(made.folder / FOLDER, name=LOCK, deadline_s=LOCK_DEADLINE_S):
            yield
    except LockedError:
        process = held_by(made.folder / FOLDER, LOCK)
        raise FederationError(
            f"another withdrawal is active, in process {process}. Try again when it is complete."
        ) from None
