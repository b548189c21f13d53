"""Submission of a run. Only this is loaded first: the rest while the run begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coterie import wire
from coterie.server.cli.options import Given
from coterie.server.paths import default_runs_dir, place
from coterie.server.runs.config import RunConfig
from coterie.strategies.errors import refused
from coterie.system.commandline import print_json
from coterie.system.ports import is_loopback, split_address
from coterie.system.terminal import aside, say

if TYPE_CHECKING:
    from coterie.server.cli.waiting import Turn
    from coterie.server.site.queue import AskedQueue, Entry

EXIT_INTERRUPTED = 130


def submit_and_follow(
    keys: Mapping[str, Any],
    options: Given,
    turn: Turn,
    *,
    detach: bool,
    shared_records: bool = False,
    as_json: bool = False,
) -> int:
    """Submit a run and show it until it ends; return the exit status.

    Args:
        options: where to submit it; repeated in suggested commands.
        turn: whether it waits in a queue first.
        detach: do not wait for the end.
        shared_records: records of a remote coordinator can be read here.
        as_json: print only the result, as JSON.
    """
    address, _, root = options.place()
    here = shared_records or is_local(address)
    usual = default_runs_dir() if here or os.environ.get("COTERIE_RUNS") else ""
    keys = {**keys, "runs-dir": str(keys.get("runs-dir") or root or usual)}
    if here:  # the ServerApp runs in another folder than this command
        keys["runs-dir"] = str(place(keys["runs-dir"]).resolve())
    config = RunConfig.read(keys)
    console = Console(quiet=True) if as_json else aside()
    if here:
        _check_records(Path(config.runs_dir), console)
        _say_what_was_planned(config, console)
    queue, run_id = turn.queue(), 0
    if here and queue is None:
        _check_groups(config)
    if queue is not None:
        entry = turn.add(queue, config, console)
        run_id = 0 if detach else _its_turn(queue, entry, options, console)
        if detach and as_json:
            print_json({"run-id": None, "run": None, "record": None, "queue": entry.id})
        if not run_id:
            return 0 if detach else EXIT_INTERRUPTED
    with options.control() as calls:
        if config.resume and is_local(address) and not run_id:
            from coterie.server.cli.commands import resumable

            config = resumable(calls, config)
        run_id = run_id or calls.submit(config)
        try:
            from coterie.server.cli.commands import follow

            return follow(
                *(calls, config, options, console),
                run_id=run_id,
                here=here,
                detach=detach,
                as_json=as_json,
            )
        except KeyboardInterrupt:
            if not detach:
                _print_going_on(console, config, run_id, options, here=here)
            return EXIT_INTERRUPTED


def is_local(address: str) -> bool:
    """Return whether the record can be read on this machine."""
    return is_loopback(split_address(address)[0])


def _its_turn(queue: AskedQueue, entry: Entry, options: Given, console: Console) -> int:
    """Return the id of a queued run once it is submitted; 0 if interrupted."""
    from coterie.server.cli.waiting import LOOK_S, REMOTE_LOOK_S, wait_for_turn

    look_s = LOOK_S if options.superlink is None else REMOTE_LOOK_S
    try:
        return wait_for_turn(queue, entry, console, look_s=look_s)
    except KeyboardInterrupt:
        line = options.again(f"runs stop {entry.id}")
        say(console, f"\nthe run waits on. Take it out of the queue with `{line}`.")
        return 0


def _check_records(folder: Path, console: Console) -> None:
    """Warn before a run begins if its record probably cannot be written.

    Raises:
        FederationError: something that is not a folder is in the way.
    """
    known = next(place for place in (folder, *folder.parents) if place.exists())
    if not known.is_dir():
        raise refused(f"{known} is not a folder, so no run can be recorded in {folder}.")
    if not os.access(known, os.W_OK | os.X_OK):  # the SuperLink may run under another account
        say(
            console,
            f"warning: you may not write in {known}. Unless the SuperLink may, name "
            "another folder with --runs-dir.",
        )


def _check_groups(config: RunConfig) -> None:
    """Raise ``FederationError`` if records are here and lack the run whose groups are fitted."""
    root = Path(config.runs_dir)
    if config.strategy in wire.BY_SUMS and config.parent and root.is_dir():
        from coterie.server.runs.fitted import groups_run

        groups_run(config, root)


def _say_what_was_planned(config: RunConfig, console: Console) -> None:
    """Say, before a complete run gets more rounds, if one longer run would have been different."""
    if not config.more_rounds:
        return
    from coterie.server.runs.going_on import planned_by_rounds
    from coterie.server.runs.record.reading import find_run

    if why := planned_by_rounds(find_run(config.resume, Path(config.runs_dir))):
        say(console, f"note: one run of all rounds would have been different: {why}.")


def _print_going_on(
    console: Console, config: RunConfig, run_id: int, options: Given, *, here: bool
) -> None:
    """Explain that the run continues after Ctrl-C, which only stops following it."""
    from coterie.server.runs.run import run_folder

    run = run_folder(config, run_id=run_id).name if here else str(run_id)
    watch = options.again(f"runs watch {run}", records_only=True)
    look = watch if here else options.again("status")
    say(
        console,
        f"\nthe run continues. Check on it with `{look}`, stop it with "
        f"`{options.again(f'runs stop {run}')}`.",
        highlight=False,
    )
