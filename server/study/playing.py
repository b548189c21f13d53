"""Play runs over several silos on this machine, called in this process or as processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Protocol

from coterie.engine.inprocess import InProcessGrid, NodeConfig
from coterie.server.machine.local import LocalFederation
from coterie.server.report.shown import NOTHING, Shown
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Event
from coterie.server.runs.record.follow import Progress, events
from coterie.server.runs.run import execute, run_folder
from coterie.server.study.given import Given
from coterie.server.study.silos import client_app, close_silos, open_silos
from coterie.strategies.errors import EXIT_RUN, FederationError

START_DEADLINE_S = 60.0


class Player(Protocol):
    """Silos that are ready to play runs, one after another."""

    def play(
        self, config: RunConfig, *, title: str, shown: Shown = NOTHING, folder: Path | None = None
    ) -> Path:
        """Play a run and return the folder of its record, which ``folder`` may choose.

        Raises:
            FederationError: the run did not complete.
        """


@contextmanager
def called(given: Given) -> Iterator[Player]:
    """Open silos in this process, where the ClientApp is called directly.

    Raises:
        FederationError: a silo's data or settings are wrong.
    """
    try:
        configs = [spec.node_config() for spec in given.specs]
        if given.cut:  # they differ only by number: their data are read once
            open_silos(configs, whose=given.whose)
        else:
            for spec, config in zip(given.specs, configs, strict=True):
                open_silos([config], whose=f"silo {spec.name!r}")
        yield _Called(configs)
    finally:
        close_silos()


class _Called:
    def __init__(self, configs: Sequence[NodeConfig]) -> None:
        self._configs = configs

    def play(
        self, config: RunConfig, *, title: str, shown: Shown = NOTHING, folder: Path | None = None
    ) -> Path:
        run_id = time.time_ns() // 1000
        folder = folder or run_folder(config, run_id=run_id)
        # There is nothing to wait for: silos that refuse here refuse for good.
        config = config.model_copy(update={"wait_for_silos": 1.0})
        grid = InProcessGrid(client_app(), self._configs)
        with shown_here(shown, title, folder):
            execute(grid, config, run_id=run_id, folder=folder)
        return folder


@contextmanager
def shown_here(shown: Shown, title: str, folder: Path) -> Iterator[None]:
    """Show a run of this process from its record; without that only errors are logged."""
    log = logging.getLogger("coterie")
    before = log.level
    log.setLevel(max(logging.ERROR, before) if shown is NOTHING else logging.INFO)
    try:
        if shown is NOTHING:
            yield
            return
        with _followed(shown, title, folder):
            yield
    finally:
        log.setLevel(before)


@contextmanager
def _followed(shown: Shown, title: str, folder: Path) -> Iterator[None]:
    over = Flag()

    def ended() -> str | None:
        return "it was interrupted" if over.is_set() else None

    def follow() -> None:
        with shown(Progress(title)) as show:
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


@contextmanager
def started(given: Given, home: Path, processes: int) -> Iterator[Player]:
    """Start a SuperLink and silos as processes, and wait until they are connected.

    Args:
        home: for logs and models of the SuperLink and the silos.
        processes: among which the silos of a simulation file are divided. Other silos have a
            process each.

    Raises:
        FederationError: something did not start.
    """
    with LocalFederation(home) as federation:
        if given.file is not None:
            federation.start_partitions(given.file, len(given.specs), processes)
        else:
            for spec in given.specs:
                federation.start_silo(spec)
        federation.wait_for_silos(len(given.specs))
        yield OnProcesses(federation)


class OnProcesses:
    """Silos that are processes already. ``on_event`` receives every event, after it was shown."""

    def __init__(
        self, federation: LocalFederation, on_event: Callable[[Event], object] = lambda event: None
    ) -> None:
        self._federation, self._on_event = federation, on_event

    def play(
        self, config: RunConfig, *, title: str, shown: Shown = NOTHING, folder: Path | None = None
    ) -> Path:
        runs_dir = config.runs_dir or str(self._federation.runs_dir)
        run_id, record = self._federation.submit(**{**config.plain(), "runs-dir": runs_dir})
        with shown(Progress(title)) as show:

            def take(event: Event) -> None:
                show(event)
                self._on_event(event)

            last = self._federation.follow(run_id, record, take)
        if last.status != "completed":
            raise FederationError(
                f"the run {title!r} failed: {last.error}. Its record: {record}", exit_code=EXIT_RUN
            )
        return record
