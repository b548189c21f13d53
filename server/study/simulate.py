"""``coterie simulate``: the federation that a simulation file describes, on this machine.

In this process, where the ClientApp is called directly, or as real processes that talk gRPC: the
models are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Console

from coterie.server.cli.commands import print_final
from coterie.server.cli.view import showing
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.paths import default_runs_dir, place
from coterie.server.report.gains import DATA_NOTE
from coterie.server.runs.config import RunConfig, require_silos
from coterie.server.runs.inprocess import InProcessGrid, client_app, open_silos
from coterie.server.runs.record.follow import Progress, events
from coterie.server.runs.run import execute, run_folder
from coterie.strategies.errors import EXIT_CONFIG, EXIT_RUN, FederationError
from coterie.system.files import write_atomically
from coterie.tasks.base import Option, TaskError
from coterie.tasks.simulation import Simulation

START_DEADLINE_S = 60.0


def read(
    file: Path, runs_dir: Path | None, changes: Mapping[str, Any]
) -> tuple[Simulation, RunConfig]:
    """The simulation of a file, and its run's configuration with these changes.

    Raises:
        FederationError: either is wrong, or they do not go together.
    """
    try:
        simulation = Simulation.read(file)
    except TaskError as error:
        raise FederationError(str(error), exit_code=EXIT_CONFIG) from None
    records = str(place(runs_dir or default_runs_dir()).resolve())
    config = RunConfig.read({"runs-dir": records, **simulation.run_keys(), **changes})
    if config.task != simulation.task:
        raise FederationError(
            f"task must be {simulation.task}, which is what the silos of {file} have. Got "
            f"{config.task!r}: change the file's own key task, and leave it out of the run's keys.",
            exit_code=EXIT_CONFIG,
        )
    names = [silo.name for silo in simulation.silos_of()]
    require_silos(config, names, label_counts=simulation.label_counts)
    return simulation, config


def node_configs(simulation: Simulation) -> list[dict[str, Option]]:
    """Flower's node config of every silo, as ``coterie silo --simulation`` makes them."""
    task, told = simulation.task, simulation.label_counts
    specs = [SiloSpec(s.name, task, s.options, label_counts=told) for s in simulation.silos_of()]
    return [spec.node_config() for spec in specs]


def simulate(
    console: Console,
    file: Path,
    *,
    changes: Mapping[str, Any] | None = None,
    processes: int = 0,
    runs_dir: Path | None = None,
    folder: Path | None = None,
) -> Path:
    """Run a simulation and print what came out.

    Args:
        file: see ``coterie.tasks.simulation``.
        changes: keys of the run that go before the file's.
        processes: 0 calls the silos in this process; otherwise a SuperLink is started, and so
            many processes that share the silos.
        runs_dir: of the record.
        folder: of the SuperLink's and the silos' logs and models, with ``processes``.

    Returns:
        The record's folder.

    Raises:
        FederationError: the file is wrong, the silos cannot be made, or the run failed.
    """
    simulation, config = read(file, runs_dir, changes or {})
    if processes > simulation.silos:
        raise FederationError(
            f"processes must be at most the {simulation.silos} silos. Got {processes}.",
            exit_code=EXIT_CONFIG,
        )
    if processes:
        record = _in_processes(console, file, simulation, config, processes, folder)
    else:
        record = _in_this_process(console, simulation, config)
    _note_data(simulation, record)
    print_final(console, record)
    return record


def _note_data(simulation: Simulation, record: Path) -> None:
    """Beside the record, what the silos' data was made from: reports compare only what is equal."""
    silos = [simulation.task, [(silo.name, silo.options) for silo in simulation.silos_of()]]
    digest = hashlib.sha256(json.dumps(silos, sort_keys=True).encode()).hexdigest()[:16]
    write_atomically(record / DATA_NOTE, f"{digest}\n".encode())


def _in_this_process(console: Console, simulation: Simulation, config: RunConfig) -> Path:
    nodes = node_configs(simulation)
    open_silos(nodes)
    run_id = time.time_ns() // 1000
    record = run_folder(config, run_id=run_id)
    logging.getLogger("coterie").setLevel(logging.INFO)  # for run.log
    with _shown(console, config, record):
        execute(InProcessGrid(client_app(), nodes), config, run_id=run_id, folder=record)
    return record


@contextmanager
def _shown(console: Console, config: RunConfig, record: Path) -> Iterator[None]:
    """Show the run from its record while it is made."""
    over = Event()

    def ended() -> str | None:
        return "it was broken off" if over.is_set() else None

    def follow() -> None:
        with showing(console, Progress(config.strategy)) as show:
            try:
                for event in events(record, start_deadline_s=START_DEADLINE_S, ended=ended):
                    show(event)
            except FederationError:
                pass  # whoever makes the record raises what went wrong

    viewer = Thread(target=follow, daemon=True)
    viewer.start()
    try:
        yield
    finally:
        over.set()
        viewer.join()


def _in_processes(
    console: Console,
    file: Path,
    simulation: Simulation,
    config: RunConfig,
    processes: int,
    folder: Path | None,
) -> Path:
    home = folder or Path(config.runs_dir).parent / time.strftime("simulation-%Y%m%d-%H%M%S")
    told = f"{simulation.silos} silos in {processes} processes; their logs: {home}"
    console.print(told, markup=False, soft_wrap=True)
    with LocalFederation(home) as federation:
        federation.start_partitions(file, simulation.silos, processes)
        federation.wait_for_silos(simulation.silos)
        run_id, record = federation.submit(**config.plain())
        with showing(console, Progress(config.strategy)) as show:
            last = federation.follow(run_id, record, show)
    if last.status != "completed":
        raise FederationError(f"the run failed: {last.error}", exit_code=EXIT_RUN)
    return record
