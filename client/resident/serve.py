"""The one way into serving: ready the silos, then answer until told to end."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.client.app import app
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.host import Connection, Host
from coterie.client.work.prepare import prepare


def serve(silos: Sequence[SiloSettings], connection: Connection, *, parallel: int = 4) -> None:
    """Serve a federation as these silos until SIGTERM or Ctrl-C; in the main thread.

    Args:
        silos: one, or several of a simulation that differ in names, folders and the task's option
            ``silo``. The caller has locked their folders.
        connection: how to reach the SuperLink.
        parallel: how many messages are in hand at once; training is one at a time.

    Raises:
        TaskError, SettingsError: a silo cannot train as it is set up; said before any joins.
        LinkError: the SuperLink refuses, or was away for longer than the connection's patience.
    """
    prepare(silos)
    host = Host(app, silos, connection, parallel=parallel)
    host.stop_on_signals()
    host.run()
