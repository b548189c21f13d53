"""The one way into serving: hold the folders, ready the silos, then answer until told to end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from coterie.client.app import app
from coterie.client.home.folder import locked_all
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.host import Host
from coterie.client.resident.link import Connection
from coterie.client.work.prepare import prepare


def serve(
    silos: Sequence[SiloSettings],
    connection: Connection,
    *,
    parallel: int = 4,
    verbose: bool = False,
) -> None:
    """Serve a federation as these silos until SIGTERM or Ctrl-C; in the main thread.

    Args:
        silos: one, or several of a simulation that differ in names, folders and the task's option
            ``silo``.
        connection: how to reach the SuperLink.
        parallel: how many messages are in hand at once; training is one at a time.
        verbose: log every message. What Flower and gRPC do is logged only if it is a warning.

    Raises:
        TaskError, SettingsError: a silo cannot train as it is set up, or a process runs from its
            folder already; said before any joins.
        LinkError: the SuperLink refuses, or was away for longer than the connection's patience.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("asyncio", "flwr", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with locked_all([one.home for one in silos]):
        prepare(silos)
        host = Host(app, silos, connection, parallel=parallel)
        host.stop_on_signals()
        host.run()
