"""Many resident silos in one process, for simulations: ``coterie silo --partitions 0-249/1000``.

Every silo has its own identity, its own node at the SuperLink and its own data; torch, the device,
the model's scratch space and the gRPC channel are the process's. A few threads look for messages
and send replies; the main thread calls the ClientApp, one message at a time. Training in several
threads would gain little (Python runs one at a time, and a GPU is shared anyway) and would lose
repeatability: torch has one stream of random numbers in a process. For more cores, start more
processes.
"""

from __future__ import annotations

import logging
import queue
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Condition, Event, Thread
from types import FrameType

from flwr.app import Message
from flwr.clientapp import ClientApp

from coterie.client.home.settings import SiloSettings
from coterie.client.resident.link import FleetLink, LinkError, RunEndedError, connect
from coterie.client.resident.sharing import ObjectCache
from coterie.client.resident.silo import (
    IDLE_SHARE,
    MAX_PAUSE_S,
    MAX_RECONNECT_PAUSE_S,
    MIN_PAUSE_S,
    Connection,
    GaveUpError,
    Silo,
)

log = logging.getLogger("coterie.silo")

LOOK_SHARE = 0.05
"""Share of one thread's time that a host without work spends on looking for it."""
LOOK_AGAIN_S = 0.2
"""How often the threads see whether they were told to end."""


@dataclass
class _Seat:
    """A silo and its connection, if it has one."""

    silo: Silo
    link: FleetLink | None = None
    context: AbstractContextManager[FleetLink] | None = None

    def connect(self, cache: ObjectCache) -> None:
        """Open the connection.

        Raises:
            LinkError: it cannot be opened.
        """
        own = self.silo.connection
        context = connect(own.address, root_certificates=own.root_certificates, cache=cache)
        self.link = context.__enter__()
        self.context = context

    def disconnect(self) -> None:
        """Tell the SuperLink, if it listens."""
        context, self.link, self.context = self.context, None, None
        if context is not None:
            try:
                context.__exit__(None, None, None)
            except LinkError as error:
                log.debug("silo %s: %s", self.silo.settings.name, error)


@dataclass
class _Job:
    """A message on its way through the main thread."""

    seat: _Seat
    message: Message
    node_id: int
    reply: Message | None = None
    seconds: float = 0.0
    done: Event = field(default_factory=Event)


class Host:
    """Serves a federation as several silos; ``run`` returns when it was told to stop.

    Args:
        app: the ClientApp of all of them, with their workbenches prepared.
        settings: one per silo.
        connection: how to reach the SuperLink.
        parallel: how many messages are in hand at once, in transport or waiting for the app.
    """

    def __init__(
        self,
        app: ClientApp,
        settings: Sequence[SiloSettings],
        connection: Connection,
        *,
        parallel: int = 4,
    ) -> None:
        self.connection = connection
        self.parallel = parallel
        self._stop = Event()
        self._cache = ObjectCache()
        self._seats = [_Seat(Silo(app, own, connection, _stop=self._stop)) for own in settings]
        self._jobs: queue.Queue[_Job] = queue.Queue(parallel)
        self._at_work: Silo | None = None
        self._failure: Exception | None = None
        # What follows is the threads' common schedule, guarded by _turn.
        self._turn = Condition()
        self._line = deque(self._seats)
        self._next_look = 0.0
        self._last_message = time.monotonic()
        self._misses = 0
        self._look_s = 0.001
        self._last_contact = time.monotonic()
        self._reconnect_pause = 0.25
        self._num_connected = 0

    def run(self) -> None:
        """Serve until ``stop``.

        Raises:
            GaveUpError: no connection for ``connection.patience_s`` seconds.
            LinkError: the SuperLink refused in a way that trying again cannot mend.
        """
        threads = [Thread(target=self._serve, daemon=True) for _ in range(self.parallel)]
        for thread in threads:
            thread.start()
        # Until every thread has ended, so that each that waits for an answer gets one.
        while any(thread.is_alive() for thread in threads):
            self._work()
        self._disconnect_all()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Finish: messages in hand are answered with an error."""
        self._stop.set()

    def stop_on_signals(self) -> None:
        """Make SIGTERM and SIGINT call ``stop``, also in the middle of work."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self._stop.set()
            if self._at_work is not None:
                self._at_work.leave()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    def _work(self) -> None:
        """In the main thread: answer one message, if there is one."""
        try:
            job = self._jobs.get(timeout=LOOK_AGAIN_S)
        except queue.Empty:
            return
        started = time.monotonic()
        self._at_work = job.seat.silo
        job.reply = job.seat.silo.answer(job.message, job.node_id)
        self._at_work = None
        job.seconds = time.monotonic() - started
        job.done.set()

    # ---------------------------------------------------------------- the threads

    def _serve(self) -> None:
        while (seat := self._take()) is not None:
            try:
                found = self._look(seat)
            except LinkError as error:
                seat.disconnect()
                self._lost(error)
                found = None
            except Exception as error:  # ours: end the process rather than lose a thread
                self._fail(error)
                return
            self._give_back(seat, found)

    def _look(self, seat: _Seat) -> bool | None:
        """Whether there was a message; it is answered. None: the silo connected first."""
        if seat.link is None:
            try:
                seat.connect(self._cache)
            except LinkError as error:
                self._could_not_connect(error)
                return None
            self._connected(seat)
            return None
        started = time.monotonic()
        link = seat.link
        try:
            message = link.receive()
        except RunEndedError as error:
            log.info("a message was dropped: its run has ended (%s)", error)
            return True
        if message is None:
            self._look_s += 0.1 * (time.monotonic() - started - self._look_s)
            return False
        job = _Job(seat, message, link.node_id)
        self._jobs.put(job)
        job.done.wait()
        assert job.reply is not None
        try:
            link.send(job.reply, seconds=job.seconds)
        except RunEndedError as error:
            log.info("a reply was dropped: its run has ended (%s)", error)
        return True

    def _take(self) -> _Seat | None:
        """The silo whose turn it is, when it is time; None when told to stop."""
        with self._turn:
            while not self._stop.is_set():
                wait = self._next_look - time.monotonic()
                if self._line and wait <= 0:
                    seat = self._line.popleft()
                    if seat.link is not None:
                        self._next_look = time.monotonic() + self._pause()
                    return seat
                self._turn.wait(min(max(wait, 0.0), LOOK_AGAIN_S) if self._line else LOOK_AGAIN_S)
        return None

    def _pause(self) -> float:
        """Until the next look, at any silo.

        Messages of a round come together: after one was found all silos are looked at without a
        pause, once. A host without work looks at one silo after the other, as often as
        ``LOOK_SHARE`` and its idleness allow; the first message then found wakes it.
        """
        if self._misses <= len(self._seats):
            return 0.0
        idle = time.monotonic() - self._last_message
        own = min(max(IDLE_SHARE * idle, MIN_PAUSE_S), MAX_PAUSE_S) / len(self._seats)
        return max(own, self._look_s / LOOK_SHARE)

    def _give_back(self, seat: _Seat, found: bool | None) -> None:
        with self._turn:
            self._line.append(seat)
            if found:
                self._misses, self._last_message = 0, time.monotonic()
                self._next_look = 0.0
            elif found is False:
                self._misses += 1
            if found is not None:
                self._last_contact = time.monotonic()
            self._turn.notify()

    # ---------------------------------------------------------------- connections

    def _connected(self, seat: _Seat) -> None:
        with self._turn:
            self._num_connected += 1
            self._reconnect_pause, self._next_look = 0.25, 0.0
            self._last_contact = time.monotonic()
            complete = self._num_connected == len(self._seats)
        log.debug("silo %s is connected", seat.silo.settings.name)
        if complete:
            first, last = self._seats[0].silo.settings.name, self._seats[-1].silo.settings.name
            log.info(
                "%d silos, %s to %s, are connected to %s",
                len(self._seats),
                first,
                last,
                self.connection.address,
            )

    def _lost(self, error: LinkError) -> None:
        """A silo's connection is gone; it dials again on its next turn."""
        with self._turn:
            self._num_connected -= 1
            first = self._num_connected == len(self._seats) - 1
        log.log(logging.WARNING if first else logging.DEBUG, "%s", error)

    def _could_not_connect(self, error: LinkError) -> None:
        """All dial the same SuperLink: what holds for one holds for the others for a while."""
        with self._turn:
            lost_s = time.monotonic() - self._last_contact
            left_s = self.connection.patience_s - lost_s
            if not error.retry:
                self._fail(error)
            elif left_s < 0:
                self._fail(GaveUpError(f"the silos gave up after {lost_s:.0f} s: {error}"))
            elif time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + self._reconnect_pause
                self._reconnect_pause = min(2 * self._reconnect_pause, MAX_RECONNECT_PAUSE_S)
                log.warning("%s Trying again, for another %.0f s.", error, left_s)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _disconnect_all(self) -> None:
        """All at once, as many as there are threads: every silo signs off at the SuperLink."""
        left = deque(seat for seat in self._seats if seat.link is not None)

        def sign_off() -> None:
            while left:
                try:
                    seat = left.popleft()
                except IndexError:  # another thread was quicker
                    return
                seat.disconnect()

        threads = [Thread(target=sign_off) for _ in range(self.parallel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
