"""The resident silo: one long-lived process that serves a federation from one organisation.

It opens the connection, keeps torch, data and device warm, and calls the ClientApp of
``client.app`` for every message. It reconnects by itself, answers an exception with an error
reply, ends cleanly on SIGTERM, and runs only the code installed beside it.
"""

from __future__ import annotations

import logging
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import FrameType

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.link import FleetLink, Keys, LinkError, RunEndedError, connect

log = logging.getLogger("coterie.silo")

IDLE_SHARE = 0.05
"""The pause between two looks for a message, as a share of the time since the last one: a silo
in the middle of a run looks often, one that waits for hours hardly ever, and the delay it adds
stays below this share of the round."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.004, 1.0
MAX_RECONNECT_PAUSE_S = 5.0


class GaveUpError(RuntimeError):
    """The SuperLink could not be reached for as long as the operator allowed."""


class _LeavingError(BaseException):
    """Raised inside running work when the process is told to end; not one of the work's errors."""


@dataclass(frozen=True)
class Connection:
    """How to reach the SuperLink.

    Attributes:
        address: ``HOST:PORT`` of its Fleet API.
        root_certificates: PEM file of the CA, or None for plain text.
        keys: a registered key pair, or None.
        patience_s: seconds without a connection after which the silo gives up. Longer than the
            60 s for which Flower refuses a key that was not released.
    """

    address: str
    root_certificates: Path | None = None
    keys: Keys | None = None
    patience_s: float = 600.0


@dataclass
class Silo:
    """The resident process's loop; ``run`` returns when it was told to stop."""

    app: ClientApp
    settings: SiloSettings
    connection: Connection
    on_connected: Callable[[int], None] = lambda node_id: None
    _stop: Event = field(default_factory=Event)
    _working: bool = False

    def run(self) -> None:
        """Serve until ``stop``.

        Raises:
            GaveUpError: no connection for ``patience_s`` seconds.
            LinkError: the SuperLink refused in a way that trying again cannot mend.
        """
        lost_since, pause = time.monotonic(), 0.25
        while not self._stop.is_set():
            try:
                with connect(
                    self.connection.address,
                    root_certificates=self.connection.root_certificates,
                    keys=self.connection.keys,
                ) as link:
                    log.info(
                        "silo %s is connected to %s as node %s",
                        self.settings.name,
                        self.connection.address,
                        link.node_id,
                    )
                    self.on_connected(link.node_id)
                    pause = 0.25
                    try:
                        self._serve(link)
                    finally:
                        lost_since = time.monotonic()
            except LinkError as error:
                self._wait_to_reconnect(error, time.monotonic() - lost_since, pause)
                pause = min(2 * pause, MAX_RECONNECT_PAUSE_S)

    def stop(self) -> None:
        """Finish: work that is running is given up and answered with an error."""
        self._stop.set()

    def stop_on_signals(self) -> None:
        """Make SIGTERM and SIGINT call ``stop``, also in the middle of work."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self.leave()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    def leave(self) -> None:
        """``stop`` for a signal handler: it also breaks off the work that it interrupted."""
        self._stop.set()
        if self._working:
            self._working = False  # a second signal must not hit the error reply
            raise _LeavingError

    def _wait_to_reconnect(self, error: LinkError, lost_s: float, pause: float) -> None:
        if not error.retry:
            raise error
        if lost_s > self.connection.patience_s:
            raise GaveUpError(
                f"silo {self.settings.name!r} gave up after {lost_s:.0f} s: {error}"
            ) from error
        log.warning(
            "%s Trying again, for another %.0f s.", error, self.connection.patience_s - lost_s
        )
        # Jitter: silos that lost the same SuperLink should not all return in one instant.
        self._stop.wait(pause * random.uniform(0.7, 1.3))

    def _serve(self, link: FleetLink) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            try:
                message = link.receive()
            except RunEndedError as error:
                log.info("a message was dropped: its run has ended (%s)", error)
                continue
            if message is None:
                idle = time.monotonic() - last
                self._stop.wait(min(max(IDLE_SHARE * idle, MIN_PAUSE_S), MAX_PAUSE_S))
                continue
            started = time.monotonic()
            reply = self.answer(message, link.node_id)
            try:
                link.send(reply, seconds=time.monotonic() - started)
            except RunEndedError as error:
                log.info("a reply was dropped: its run has ended (%s)", error)
            last = time.monotonic()

    def answer(self, message: Message, node_id: int) -> Message:
        """Call the app; whatever happens in it, there is a reply."""
        meta = message.metadata
        context = Context(
            run_id=meta.run_id,
            node_id=node_id,
            node_config=dict(self.settings.to_node_config()),
            state=RecordDict(),
            run_config={},
        )
        try:
            self._working = True
            if self._stop.is_set():  # told to end while the message was on its way
                raise _LeavingError
            reply = self.app(message, context)
        except _LeavingError:
            log.info("told to end: run %s round %s is left", meta.run_id, meta.group_id)
            return wire.refusal(f"silo {self.settings.name!r} is shutting down.", message)
        except (Exception, SystemExit) as error:  # a task that calls sys.exit must not end the silo
            log.exception("the app failed on a %s message", meta.message_type)
            return wire.failure(self.settings.name, error, message)
        finally:
            self._working = False
        if reply.has_error():
            what = "failed on" if reply.error.code == wire.FAILED else "refused"
            log.error("%s a %s message: %s", what, meta.message_type, reply.error.reason)
        else:
            log.debug("answered a %s message of round %s", meta.message_type, meta.group_id)
        return reply
