"""Serving a federation in the foreground, as one silo or as many."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from coterie.client.app import app
from coterie.client.home.files import locked_all
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.host import Host
from coterie.client.resident.silo import Connection, Silo
from coterie.client.work.benches import prepare, prepare_all


def log_to_stderr(*, verbose: bool) -> None:
    """Log what the silo does; what Flower and gRPC do only if it is a warning."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("asyncio", "flwr", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def serve(settings: SiloSettings, connection: Connection) -> None:
    """Serve until told to end, in a folder that the caller has locked.

    Raises:
        SettingsError, TaskError: the silo cannot train; it says so before it joins.
        LinkError: the SuperLink refused the silo for good.
        GaveUpError: the SuperLink could not be reached for too long.
    """
    prepare(settings)
    _until_told(Silo(app, settings, connection))


def serve_all(settings: Sequence[SiloSettings], connection: Connection, *, parallel: int) -> None:
    """Serve as these silos from one process, with this many messages in hand at once.

    Raises:
        SettingsError: also where another process has one of their folders.
        TaskError, LinkError, GaveUpError: as for ``serve``.
    """
    with locked_all([one.home for one in settings]):
        if len(settings) == 1:
            serve(settings[0], connection)
        else:
            prepare_all(settings)
            _until_told(Host(app, settings, connection, parallel=parallel))


def _until_told(resident: Silo | Host) -> None:
    resident.stop_on_signals()
    resident.run()
