"""The entry point of serving: lock the folders, prepare the silos, answer until stopped.

With a ClientApp of your own, from its silo's folder:

    from coterie.client.resident.serve import serve
    serve(app, "hospital-b")
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.clientapp import ClientApp

from coterie.client.home.folder import Home, locked_all
from coterie.client.home.settings import Process, SettingsError, SiloSettings
from coterie.client.resident.host import Host
from coterie.client.resident.vital import collector
from coterie.engine.fast.silo.process import FastSilos
from coterie.engine.port import Connection
from coterie.system import keys, logs
from coterie.system.exposition import Exposition, Sample
from coterie.system.ports import listen_address

if TYPE_CHECKING:
    from coterie.client.resident.foreign import ForeignApp, Mod

log = logging.getLogger("coterie.silo")


def serve(
    app: ClientApp | str | None,
    silos: Sequence[SiloSettings] | str | Path,
    connection: Connection | None = None,
    *,
    mods: Sequence[Mod | str] = (),
    patience_s: float = 600.0,
    verbose: bool = False,
    metrics: str = "",
    log_format: str = "",
) -> None:
    """Serve a federation as these silos until SIGTERM or Ctrl-C; in the main thread.

    Args:
        app: a Flower ClientApp, or its ``module:attribute``. None: coterie's own, which serves the
            silos' task.
        silos: the folder of a silo that has joined a federation, or settings: of one silo, or of
            several of a simulation that differ only in names, folders and the task option ``silo``.
        connection: the way to the SuperLink; required with settings.
        mods: Flower mods around ``app``.
        patience_s: see ``Connection``; only with a folder.
        verbose: log every message. Of Flower and gRPC only warnings are logged.
        metrics: ``[HOST:]PORT`` of metrics for Prometheus; overrides silo.toml.
        log_format: ``text`` or ``json``; overrides silo.toml.

    Raises:
        TaskError, SettingsError: a silo cannot train with its settings, an app or mod cannot be
            loaded, or a process already runs from the silo's folder; raised before any silo joins.
        LinkError: the SuperLink refuses, or was away for longer than the connection's patience.
    """
    home = Home(Path(silos)) if isinstance(silos, str | Path) else None
    watched = _monitoring(home, metrics, log_format)
    if home is not None:
        silos = [home.settings()]
    assert not isinstance(silos, str | Path)
    _log(watched.log_format, silos, verbose=verbose)
    if home is not None:
        connection = _connection(home, patience_s)
        _limit_process(home)
    elif connection is None:
        raise TypeError("silos given by their settings need a connection")
    with locked_all([one.home for one in silos]):
        made = _own(silos) if app is None else _foreign(app, silos, mods)
        own = app is None
        engines = FastSilos(connection, several=len(silos) > 1)
        host = Host(made, silos, connection, engines, reads_runs=not own, one_node=own)
        host.stop_on_signals()
        with _exposed(watched.metrics_address, collector(silos, host.vitals, host.activity.tally)):
            host.run()


def _monitoring(home: Home | None, metrics: str, log_format: str) -> Process:
    """Return monitoring settings: the command's, else the environment's, else silo.toml's."""
    own = Process() if home is None else home.process
    try:
        address = listen_address(metrics) if metrics else own.metrics_address
        form: Any = logs.chosen(log_format, own.log_format)
        return replace(own, metrics_address=address, log_format=form)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _log(log_format: str, silos: Sequence[SiloSettings], *, verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    always = {"silo": silos[0].name} if len(silos) == 1 else {}
    handler.setFormatter(logs.formatter("silo", log_format, **always))
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("flwr").handlers.clear()  # which say the same again, in colours
    for noisy in ("asyncio", "flwr", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _exposed(
    address: str, collect: Callable[[], Iterable[Sample]]
) -> AbstractContextManager[object]:
    """Serve metrics for Prometheus while open; raise ``SettingsError`` for a bad address."""
    if not address:
        return nullcontext()
    try:
        served = Exposition(address, collect)
    except OSError as error:
        raise SettingsError(
            f"the silo cannot serve metrics at {address}: {error.strerror or error}. Choose "
            "another address with --metrics-address, or under [monitoring] in silo.toml."
        ) from None
    log.info("metrics: http://%s/metrics", served.address)
    return served


def _connection(home: Home, patience_s: float) -> Connection:
    address, ca = home.coordinator()
    key = home.key()
    if text := keys.remark(home.key_file):
        log.warning("%s", text)
    return Connection(address, ca, (key, key.public_key()), patience_s=patience_s)


def _own(silos: Sequence[SiloSettings]) -> ClientApp:
    """Return coterie's own app, with its silos prepared; this loads torch."""
    from coterie.client.app import app
    from coterie.client.prepare import prepare
    from coterie.client.work.data import Held
    from coterie.client.work.data_warnings import warnings_of

    several = [silos] if len(silos) > 1 else [[study] for study in silos[0].studies()]
    for session in (session for one in several for session in prepare(one)):
        held = isinstance(session.data.train, Held)  # to read a folder of images takes minutes
        of = f"silo {session.settings.name}{f', task {session.task.name}' * bool(silos[0].also)}"
        # Of a simulation's silos nobody would read them; without labels there is less to look at.
        if len(silos) == 1:
            for line in getattr(session.task, "notes", list)():
                log.info("%s, data: %s", of, line.strip())
        if len(silos) == 1 and not session.settings.unlabelled:
            for line in warnings_of(session, duplicates=held):
                log.warning("%s, data: %s", of, line)
    return app


def _foreign(
    app: ClientApp | str, silos: Sequence[SiloSettings], mods: Sequence[Mod | str]
) -> ForeignApp:
    from coterie.client.resident.foreign import (
        ForeignApp,
        check_policy,
        conditions,
        load_app,
        load_mod,
    )

    for one in silos:
        check_policy(one)
        if one.also:
            raise SettingsError(
                "an app replaces the silo's task, and [[also]] in silo.toml names further "
                "tasks. Leave [[also]] out, or serve without --app."
            )
    loaded = load_app(app) if isinstance(app, str) else app
    around = [load_mod(mod) if isinstance(mod, str) else mod for mod in mods]
    name = app if isinstance(app, str) else type(app).__name__
    log.info("silo %s serves the app %s, not its task", silos[0].name, name)
    for line in conditions(silos[0]):
        log.info("%s", line)
    return ForeignApp(loaded, around)


def _limit_process(home: Home) -> None:
    """Apply silo.toml's limits to this process; ``SettingsError``: a GPU limit without a GPU."""
    own = home.process
    if own.nice:
        os.nice(own.nice)
    if own.gpu_memory < 1:
        import torch

        if torch.cuda.is_available():
            for device in range(torch.cuda.device_count()):
                torch.cuda.set_per_process_memory_fraction(own.gpu_memory, device)
        elif home.settings().device.startswith("cuda"):
            raise SettingsError("gpu_memory is set, but PyTorch finds no CUDA device.")
