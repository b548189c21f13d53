"""A node of the SuperLink as its process sees it: silos, their connection and unsent replies."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass, field

from coterie.client.home.settings import SiloSettings
from coterie.engine.port import Kept, LinkError, SiloEngine, SiloEngines

log = logging.getLogger("coterie.silo")


@dataclass
class Node:
    """Silos that share a connection, that connection if there is one, and replies not sent yet.

    ``away``: the connection is cut and may resume. ``settled``: when runs that wait for approval
    were last checked. ``waits``: the connection on which a call waits for a message.
    """

    silos: tuple[SiloSettings, ...]
    outbox: Kept
    link: SiloEngine | None = None
    away: bool = False
    settled: float = -math.inf
    waits: SiloEngine | None = None
    _opened: ExitStack = field(default_factory=ExitStack)

    def connect(self, engines: SiloEngines) -> SiloEngine:
        most = int(min(silo.policy.max_message_mb for silo in self.silos) * 1e6)
        opening = engines.connect(max_bytes=most, silos=len(self.silos))
        self.link = self._opened.enter_context(opening)
        return self.link

    def disconnect(self) -> None:
        self.link, self.away = None, False
        try:
            self._opened.close()
        except LinkError as error:
            log.debug("%s: %s", self.name, error)

    @property
    def name(self) -> str:
        first, last = self.silos[0].name, self.silos[-1].name
        if len(self.silos) == 1:
            return f"silo {first}"
        return f"the {len(self.silos)} silos {first} to {last}"
