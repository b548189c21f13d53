"""The connections of one silo's process, with what they share."""

from __future__ import annotations

from contextlib import AbstractContextManager

from coterie.engine.fast.silo.link import FleetLink, connect
from coterie.engine.fast.silo.outbox import Outbox
from coterie.engine.fast.silo.sharing import ObjectCache
from coterie.engine.port import Connection


class FastSilos:
    """Connections to a SuperLink; ``several`` share a cache of what they receive."""

    def __init__(self, way: Connection, *, several: bool) -> None:
        # Silos receive the same model in a round; one silo would fill the memory for nothing.
        self._way, self._cache = way, ObjectCache() if several else None

    def connect(self, *, max_bytes: int, silos: int) -> AbstractContextManager[FleetLink]:
        return connect(self._way, self._cache, max_bytes=max_bytes, silos=silos)

    def outbox(self, home: str) -> Outbox:
        return Outbox(home)
