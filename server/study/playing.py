"""Play one run over several silos on this machine, called in this process or as processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any

from rich.console import Console

from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.local import LocalFederation
from coterie.server.report.view import showing
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Event
from coterie.server.runs.record.follow import Progress, events
from coterie.server.runs.run import execute
from coterie.server.study.silos import client_app
from coterie.strategies.errors import EXIT_RUN, FederationError
from coterie.tasks.base import Option

START_DEADLINE_S = 60.0


def in_this_process(
    nodes: Sequence[Mapping[str, Option]],
    config: RunConfig,
    folder: Path,
    *,
    run_id: int = 0,
    console: Console | None = None,
) -> None:
    """Play a run whose silos are called directly.

    ``console`` shows the run; without it, only errors are logged.

    Raises:
        FederationError: the run failed.
    """
    log = logging.getLogger("coterie")
    before = log.level
    log.setLevel(max(logging.ERROR, before) if console is None else logging.INFO)
    try:
        with _shown(console, config, folder):
            execute(InProcessGrid(client_app(), nodes), config, run_id=run_id, folder=folder)
    finally:
        log.setLevel(before)


@contextmanager
def _shown(console: Console | None, config: RunConfig, folder: Path) -> Iterator[None]:
    if console is None:
        yield
        return
    over = Flag()

    def ended() -> str | None:
        return "it was interrupted" if over.is_set() else None

    def follow() -> None:
        with showing(console, Progress(config.strategy)) as show:
            try:
                for event in events(folder, start_deadline_s=START_DEADLINE_S, ended=ended):
                    show(event)
            except FederationError:
                pass  # the run itself raises what went wrong

    viewer = Thread(target=follow, daemon=True)
    viewer.start()
    try:
        yield
    finally:
        over.set()
        viewer.join()


def on_processes(
    federation: LocalFederation,
    keys: Mapping[str, Any],
    *,
    title: str,
    console: Console | None = None,
    on_event: Callable[[Event], object] = lambda event: None,
) -> tuple[int, Path]:
    """Play a run on silos that are processes already; return its id and its record's folder.

    Args:
        title: the name of the run where it is shown.
        on_event: receives every event, after it was shown.

    Raises:
        FederationError: the run did not complete.
    """
    run_id, folder = federation.submit(**keys)

    def follow(show: Callable[[Event], object]) -> Event:
        def take(event: Event) -> None:
            show(event)
            on_event(event)

        return federation.follow(run_id, folder, take)

    if console is None:
        last = follow(lambda event: None)
    else:
        with showing(console, Progress(title)) as show:
            last = follow(show)
    if last.status != "completed":
        raise FederationError(
            f"the run {title!r} failed: {last.error}. Its record: {folder}", exit_code=EXIT_RUN
        )
    return run_id, folder
