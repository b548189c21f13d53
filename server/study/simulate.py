"""``coterie.simulate`` and the command ``coterie simulate``: run a federation on this machine.

It runs in this process, where the ClientApp is called directly, or as real processes over gRPC: the
models are the same, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from rich.console import Console

from coterie.server.paths import default_runs_dir, place
from coterie.server.report.gains import DATA_NOTE
from coterie.server.report.shown import shown_for
from coterie.server.runs.config import RunConfig, require_silos
from coterie.server.study.apps import is_app, simulate_app
from coterie.server.study.given import NETWORK, Given, given, of_file
from coterie.server.study.playing import Player, called, started
from coterie.server.study.result import Result
from coterie.strategies.errors import refused
from coterie.strategies.rounds.options import dashed
from coterie.strategies.strategy import GroupStrategy
from coterie.system.files import write_atomically
from coterie.system.terminal import say
from coterie.tasks.base import Option
from coterie.wire import Model

Node = Mapping[str, str | int | float | bool]


def simulate(
    what: str | Path | Mapping[str, Any] | ClientApp,
    silos: int | Mapping[str, Node] | Sequence[Node] | None = None,
    *,
    strategy: str | GroupStrategy = "",
    split: Mapping[str, Option] | None = None,
    options: Mapping[str, Option] | None = None,
    network: str = NETWORK,
    initial_arrays: ArrayRecord | Model | None = None,
    run_config: Node | None = None,
    train_config: Node | None = None,
    processes: int = 0,
    runs_dir: str | Path | None = None,
    folder: str | Path | None = None,
    progress: bool | Console = True,
    **keys: Any,
) -> Result:
    """Run a federation on this machine, keep its record, and return the result.

    Args:
        what: silo → its arrays, ``(x, y)`` or ``(x, y, x_test, y_test)``; or the name of a task, a
            task file, or ``module:Class``; or a Flower ClientApp, or silo → its ClientApp; or a
            simulation file, which has the silos and the run's keys.
        silos: of a task: silo → the task's options there, or their number, with ``split``. Of a
            ClientApp: silo → its node config, a list of node configs, or their number, which
            numbers them by ``partition-id``.
        strategy: its name, by default ``auto``; for a ClientApp also a strategy of
            ``coterie.strategies``.
        split: how a task's data are cut into silos: ``kind``, and the keys of that kind.
        options: of the task, the same at every silo.
        network: for arrays, as in a task file.
        initial_arrays: of a ClientApp: the model that all start from.
        run_config, train_config: of a ClientApp: its run config, and entries of its training
            messages.
        processes: 0 calls the silos in this process. Otherwise the number of processes, with a
            SuperLink: at most the silos of a simulation file, else one for each silo. A ClientApp
            must then be a variable of a module that each process can import.
        runs_dir: where the record goes, by default ``~/.coterie/runs``.
        folder: with ``processes``: for their logs and models.
        progress: whether to show the run: a bar in a notebook, else lines on standard error. Or the
            console that shows it.
        keys: of the run, such as ``rounds`` or ``alpha``, with underscores for dashes.

    Raises:
        FederationError: something is wrong with what was given, or the run failed.
    """
    if is_app(what):
        if split or options:
            raise refused("a ClientApp has its own data: leave split and options out.")
        return simulate_app(
            what,
            silos,
            strategy=strategy or "auto",
            initial_arrays=initial_arrays,
            run_config=run_config or {},
            train_config=train_config or {},
            runs_dir=runs_dir,
            processes=processes,
            home=place(folder) if folder else None,
            shown=shown_for(progress),
            **keys,
        )
    if initial_arrays is not None or run_config or train_config or not isinstance(strategy, str):
        raise refused(
            "initial_arrays, run_config, train_config and a strategy as an object are for a "
            f"ClientApp. Got {what!r}: name the strategy, and give the run's keys by name."
        )
    changes = {dashed(key): value for key, value in keys.items()}
    changes |= {"strategy": strategy} if strategy else {}
    with _silos(what, silos, split, options, network, changes) as found:
        config = configured(found, changes, runs_dir=runs_dir)
        how = how_many(found, processes)
        home = place(folder) if folder else _home(config)
        if how:
            text = f"{len(found.specs)} silos in {how} processes; their logs: {home}"
            say(progress if isinstance(progress, Console) else Console(stderr=True), text)
        with player(found, home, how) as silos_here:
            record = silos_here.play(config, title=config.strategy, shown=shown_for(progress))
        write_atomically(record / DATA_NOTE, f"{found.digest}\n".encode())
    return Result(record)


def _silos(
    what: Any,
    silos: Any,
    split: Mapping[str, Option] | None,
    options: Mapping[str, Option] | None,
    network: str,
    changes: dict[str, Any],
) -> AbstractContextManager[Given]:
    """Provide the silos; set the strategy that runs from Python have if they name none."""
    if isinstance(what, Path) or (isinstance(what, str) and what.endswith(".toml") and not silos):
        if silos or split or options:
            raise refused(
                f"{what} has the silos: leave silos, split and options out, or change the file."
            )
        return nullcontext(of_file(Path(what)))
    changes.setdefault("strategy", "auto")
    seed = changes.get("seed", 0)
    return given(what, silos, split=split, options=options, network=network, seed=seed)


def configured(
    found: Given, changes: Mapping[str, Any], *, runs_dir: str | Path | None = None
) -> RunConfig:
    """Return the configuration of a run over these silos, with ``changes``.

    Raises:
        FederationError: it is wrong, or does not fit the silos.
    """
    records = str(place(runs_dir or default_runs_dir()).resolve())
    config = RunConfig.read({"runs-dir": records, **found.keys, **changes})
    if config.task != (task := found.keys["task"]):
        where = f" in {found.file}" if found.file else ""
        raise refused(
            f"task must be {task}, the task of the silos{where}. Got {config.task!r}: change the "
            "silos' task, and leave it out of the run's keys."
        )
    require_silos(config, found.names, label_counts=found.label_counts)
    return config


def how_many(found: Given, processes: int) -> int:
    """Return the number of processes; raise ``FederationError`` if it does not fit the silos."""
    count = len(found.specs)
    if processes > count:
        raise refused(f"processes must be at most the {count} silos. Got {processes}.")
    if processes < 0 or (found.file is None and processes not in (0, count)):
        raise refused(f"processes must be 0, or {count}: one for each silo. Got {processes}.")
    return processes


def player(found: Given, home: Path, processes: int) -> AbstractContextManager[Player]:
    """Open the silos in this process, or start them in processes."""
    return started(found, home, processes) if processes else called(found)


def _home(config: RunConfig) -> Path:
    return Path(config.runs_dir).parent / time.strftime("simulation-%Y%m%d-%H%M%S")
