"""``coterie simulate``: run the federation of a simulation file on this machine.

It runs in this process, where the ClientApp is called directly, or as real processes over gRPC: the
models are the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.paths import default_runs_dir, place
from coterie.server.report.final import print_final
from coterie.server.report.gains import DATA_NOTE
from coterie.server.runs.config import RunConfig, require_silos
from coterie.server.runs.run import run_folder
from coterie.server.study.playing import in_this_process, on_processes
from coterie.server.study.silos import open_silos
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.system.files import write_atomically
from coterie.system.terminal import aside
from coterie.tasks.base import Option, TaskError
from coterie.tasks.simulation import Simulation


def read(
    file: Path, runs_dir: Path | None, changes: Mapping[str, Any]
) -> tuple[Simulation, RunConfig]:
    """Read a simulation file, and its run's configuration with ``changes``.

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
            f"task must be {simulation.task}, the task of the silos in {file}. Got "
            f"{config.task!r}: change the file's key task, and leave it out of the run's keys.",
            exit_code=EXIT_CONFIG,
        )
    names = [silo.name for silo in simulation.silos_of()]
    require_silos(config, names, label_counts=simulation.label_counts)
    return simulation, config


def node_configs(simulation: Simulation) -> list[dict[str, Option]]:
    """Return Flower's node config of every silo, as ``silo serve --simulation`` makes them."""
    task, label_counts = simulation.task, simulation.label_counts
    specs = [
        SiloSpec(s.name, task, s.options, label_counts=label_counts) for s in simulation.silos_of()
    ]
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
    """Run a simulation, print the results, and return the record's folder.

    Args:
        file: see ``coterie.tasks.simulation``.
        changes: run keys that take precedence over the file's.
        processes: 0 calls the silos in this process; otherwise the number of processes that share
            the silos, with a SuperLink.
        folder: for logs and models of the SuperLink and the silos, with ``processes``.

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
        home = folder or Path(config.runs_dir).parent / time.strftime("simulation-%Y%m%d-%H%M%S")
        text = f"{simulation.silos} silos in {processes} processes; their logs: {home}"
        aside(console).print(text, markup=False, soft_wrap=True)
        with LocalFederation(home) as federation:
            federation.start_partitions(file, simulation.silos, processes)
            federation.wait_for_silos(simulation.silos)
            title = config.strategy
            _, record = on_processes(
                federation, config.plain(), title=title, console=aside(console)
            )
    else:
        nodes, run_id = node_configs(simulation), time.time_ns() // 1000
        record = run_folder(config, run_id=run_id)
        open_silos(nodes)
        in_this_process(nodes, config, record, run_id=run_id, console=aside(console))
    _note_data(simulation, record)
    print_final(console, record)
    return record


def _note_data(simulation: Simulation, record: Path) -> None:
    """Record the sources of the silos' data with the run: reports compare only equal data."""
    silos = [simulation.task, [(silo.name, silo.options) for silo in simulation.silos_of()]]
    digest = hashlib.sha256(json.dumps(silos, sort_keys=True).encode()).hexdigest()[:16]
    write_atomically(record / DATA_NOTE, f"{digest}\n".encode())
