"""The resident process: it serves a federation as one silo, or as many silos of a simulation.

Every silo has its own name, data, policy and ledger; torch, the device, the model's scratch space
and the gRPC channel belong to the process. A silo is a node at the SuperLink, but the silos of one
simulation process share a node: coterie's ServerApp sends their messages in one bundle.

A few threads poll for messages and send replies; the main thread calls the ClientApp, one message
at a time. Training in several threads would gain little (Python runs one at a time, and a GPU is
shared anyway) and would lose repeatability: torch has one random stream per process. For more
cores, start more processes.

The process reconnects by itself, answers an exception with an error reply, ends cleanly on SIGTERM,
and runs only locally installed code. It delivers finished work however long the connection is cut,
until the run is over, and stops work whose run is over or that takes too long.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import FrameType

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from coterie import wire
from coterie.client.home import approvals
from coterie.client.home.approvals import ApprovalError
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.activity import ActivityLog
from coterie.client.resident.node import Node
from coterie.client.resident.vital import Vitals, WatchedSchedule
from coterie.engine.port import (
    Connection,
    LinkError,
    NotPassedError,
    Received,
    RunEndedError,
    RunSettings,
    SiloEngine,
    SiloEngines,
    TooLargeError,
    UnreadableError,
    Unsent,
)
from coterie.system.memory import keep_freed_memory

log = logging.getLogger("coterie.silo")

THREADS = 4
"""Threads that carry messages: as many can be in transit or waiting for the app at once."""
MAX_RUNS = 8
"""Runs whose configurations are cached."""
ASK_S = 10.0
"""Seconds between checks, while the app works, that the run is still active."""
SETTLE_S = 15.0
"""Seconds between checks, when idle, for runs that ended while they waited for approval."""
AFTER_GIVING_UP = (
    "--retry-for SECONDS sets how long it waits; a systemd service restarts it by itself "
    f"(see {wire.page('Run a federation across organisations')})."
)
STOP_WORK = signal.SIGUSR1
"""Signal by which a thread stops the main thread's work."""


class GaveUpError(LinkError):
    """The SuperLink could not be reached for as long as the operator allowed."""


class _ShutdownError(BaseException):
    """Raised inside running work when the process must end; not an error of the work."""


class _StopWorkError(BaseException):
    """Raised inside running work that is no longer needed or takes too long."""


@dataclass(frozen=True)
class _Job:
    """A message for the main thread, and where it puts the reply and the seconds it took."""

    silo: SiloSettings
    message: Message
    node_id: int
    run: RunSettings
    answer: queue.SimpleQueue[tuple[Message, float]] = field(default_factory=queue.SimpleQueue)
    begun: Event = field(default_factory=Event)


class Host:
    """Serves a federation as one silo or several until ``stop`` is called.

    Raises ``ValueError`` for several silos with one key.

    Args:
        app: the ClientApp of all silos, or a function like one.
        connection: the way to the SuperLink.
        engines: what makes the connections.
        reads_runs: fetch the run's configuration for the app; coterie's own app gets everything
            from its messages.
        one_node: the silos share a node, which only coterie's own ServerApp understands.
    """

    def __init__(
        self,
        app: Callable[[Message, Context], Message],
        silos: Sequence[SiloSettings],
        connection: Connection,
        engines: SiloEngines,
        *,
        reads_runs: bool = False,
        one_node: bool = False,
    ) -> None:
        if connection.keys is not None and len(silos) != 1:
            raise ValueError(f"a key belongs to one silo. Got {len(silos)} silos.")
        self.app = app
        self.connection, self._engines = connection, engines
        if one_node and len(silos) > 1:
            self._nodes = [Node(tuple(silos), engines.outbox(""))]
        else:
            self._nodes = [Node((own,), engines.outbox(own.home)) for own in silos]
        self.num_threads = min(THREADS, len(self._nodes))
        self._num_silos = len(silos)
        self._reads_runs = reads_runs
        self._runs: dict[int, RunSettings] = {}
        self.activity = ActivityLog(logging.INFO if len(silos) == 1 else logging.DEBUG)
        self._signal = ""
        self.vitals = Vitals([own.home for own in silos])
        self._schedule = WatchedSchedule(self._nodes, self.vitals)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopping = self._working = False
        self._interruptible = False
        self._current: _Job | None = None
        self._useless: tuple[_Job, str] | None = None
        """What the main thread is to end, and why."""
        self._failure: Exception | None = None

    def run(self) -> None:
        """Serve until ``stop``.

        Raises ``GaveUpError`` after ``connection.patience_s`` seconds without a connection,
        ``LinkError`` if the SuperLink refuses and trying again cannot help.
        """
        keep_freed_memory()
        wire.reuse_blocks()
        for _ in range(self.num_threads):
            Thread(target=self._serve, daemon=True).start()
        running = self.num_threads
        while running:  # until every thread has ended: each that waits for an answer gets one
            job = self._jobs.get()
            if job is None:
                running -= 1
            else:
                started = time.monotonic()
                reply = self._answer(job)
                seconds = time.monotonic() - started
                job.answer.put((reply, seconds))
                self.activity.answered(job.message, reply, seconds)
                self._current = self._useless = None
                del reply  # the next message needs their memory
            del job
        with ThreadPoolExecutor(self.num_threads) as threads:
            list(threads.map(Node.disconnect, self._nodes))
        if self._failure is not None:
            raise self._failure
        log.info("ended%s", f" by {self._signal}" if self._signal else "")

    def stop(self) -> None:
        """Stop serving; messages in progress are answered with an error."""
        self._stopping = True
        for node in self._nodes:
            if (link := node.link) is not None:
                link.hurry()
        self._schedule.stop()

    def stop_on_signals(self) -> None:
        """Make SIGTERM and SIGINT call ``stop``, also in the middle of work."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self._signal = signal.Signals(signum).name  # logged later: not from within a handler
            self.stop()
            if self._working:
                self._working = False  # a second signal must not hit the error reply
                raise _ShutdownError

        def on_useless(signum: int, frame: FrameType | None) -> None:
            if self._working and self._useless is not None and self._current is self._useless[0]:
                self._working = False
                raise _StopWorkError(self._useless[1])

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(STOP_WORK, on_useless)
        self._interruptible = True

    def _answer(self, job: _Job) -> Message:
        """Call the app in the main thread; always return a reply, whatever happens in it."""
        silo, message = job.silo, job.message
        meta = message.metadata
        context = Context(
            run_id=meta.run_id,
            node_id=job.node_id,
            node_config=silo.to_node_config(),
            state=RecordDict(),
            run_config=dict(job.run.config),
            series_id=job.run.series,
        )
        self._current = job
        job.begun.set()
        try:
            reply = self._call(message, context)
        except _StopWorkError as why:
            log.warning("a %s message was not finished: %s", meta.message_type, why)
            return wire.refusal(f"silo {silo.name!r} stopped: {why}", message)
        except _ShutdownError:
            log.info("stopping: leaving run %s in round %s", meta.run_id, meta.group_id)
            return wire.refusal(f"silo {silo.name!r} is shutting down.", message)
        except (Exception, SystemExit) as error:  # a task that calls sys.exit must not end the silo
            log.exception("the app failed on a %s message", meta.message_type)
            return wire.failure(silo.name, error, message)
        if reply.has_error():
            what = "failed on" if reply.error.code == wire.FAILED else "refused"
            # "Not now" is said every half a minute; a training that diverged was reported already.
            known = reply.error.code in {*wire.NOT_NOW, wire.DIVERGED}
            level = logging.DEBUG if known else logging.ERROR
            log.log(level, "%s a %s message: %s", what, meta.message_type, reply.error.reason)
        else:
            log.debug("answered a %s message of round %s", meta.message_type, meta.group_id)
        return reply

    def _call(self, message: Message, context: Context) -> Message:
        try:
            self._working = True
            if self._stopping:  # asked to end while the message was on its way
                raise _ShutdownError
            return self.app(message, context)
        finally:
            self._working = False

    # ---------------------------------------------------------------- the threads

    def _serve(self) -> None:
        try:
            while (node := self._schedule.take()) is not None:
                if node.link is None:
                    self._dial(node)
                else:
                    self._look(node, node.link)
        except Exception as error:  # ours: end the process rather than lose a thread
            self._fail(error)
        finally:
            self._jobs.put(None)

    def _dial(self, node: Node) -> None:
        address = self.connection.address
        try:
            link = node.connect(self._engines)
        except LinkError as error:
            self._try_again_later(node, error, was_connected=False)
            return
        complete = self._schedule.connected(node)
        level = logging.DEBUG if len(self._nodes) > 1 else logging.INFO
        verb = "is" if len(node.silos) == 1 else "are"
        log.log(level, "%s %s connected to %s as node %s", node.name, verb, address, link.node_id)
        if complete and len(self._nodes) > 1:
            first, last = self._nodes[0].silos[0].name, self._nodes[-1].silos[-1].name
            log.info(
                "%d silos, %s to %s, are connected to %s", self._num_silos, first, last, address
            )

    def _look(self, node: Node, link: SiloEngine) -> None:
        """Send pending replies, or poll for a message and answer it."""
        started = time.monotonic()
        try:
            if node.outbox.unsent is None:
                received = link.receive()
                self._came_back(node)
                if received is None:
                    self._settle_approvals(node, link)
                    self._schedule.missed(node, seconds=time.monotonic() - started)
                    self._rest(node, link)
                    return
                self._work(node, received, link)
            self._deliver(node, link)
            self._came_back(node)
        except RunEndedError as error:
            self._came_back(node)
            log.info("a message was dropped: its run has ended (%s)", error)
        except UnreadableError as error:
            who = f"silo {node.silos[0].name!r}" if len(node.silos) == 1 else node.name
            text = f"{who} cannot read a message: {error}"
            if isinstance(error, TooLargeError):
                text = (
                    f"{who} accepts no message of more than "
                    f"{node.silos[0].policy.max_message_mb:g} MB (max_message_mb). It received "
                    f"{error}."
                )
            log.error("refused a %s message: %s", error.header.metadata.message_type, text)
            answer = wire.refusal(text, error.header)
            node.outbox.keep(Unsent((answer,), 0.0, link.node_id))
        except LinkError as error:
            was_connected = not node.away
            if error.holds:
                node.away = True
            else:
                node.disconnect()
            self._try_again_later(node, error, was_connected=was_connected)
            return
        self._schedule.worked(node)
        if node.outbox.unsent is None:
            self._rest(node, link)

    def _rest(self, node: Node, link: SiloEngine) -> None:
        """Let the SuperLink announce messages, if it can, and poll rarely meanwhile.

        Not with several connections: each call would occupy one of the process's few threads.
        """
        if len(self._nodes) > 1 or not link.notifies or self._stopping:
            return
        self._schedule.rest()
        if node.waits is not link:
            node.waits = link
            # Nobody waits for this thread: the call hands out nothing, and may be left.
            Thread(target=self._wait, args=(node, link), daemon=True).start()

    def _wait(self, node: Node, link: SiloEngine) -> None:
        started, notified = time.monotonic(), False
        try:
            notified = link.wait()
        except Exception as error:  # lost: the next look says how
            log.debug("%s: the SuperLink does not announce messages: %s", node.name, error)
        if node.waits is link:
            node.waits = None
            early = time.monotonic() - started < wire.WAIT_S / 2
            self._schedule.word(notified=notified, early=early)

    def _settle_approvals(self, node: Node, link: SiloEngine) -> None:
        if time.monotonic() - node.settled < SETTLE_S:
            return
        node.settled = time.monotonic()

        def is_over(run: str) -> bool:
            try:
                link.require_running(int(run))
            except RunEndedError:
                return True
            return False

        for own in (one for one in node.silos if one.policy.approve):
            try:
                approvals.settle(Path(own.home), is_over)
            except (ApprovalError, OSError) as error:  # `coterie silo approve` says it as well
                log.debug("silo %s: %s", own.name, error)

    def _came_back(self, node: Node) -> None:
        if node.away:
            node.away = False
            if node.link is not None:
                node.link.notifies = True  # it may be another SuperLink
            self._schedule.returned()
            log.info("%s: the SuperLink is back", node.name)

    def _work(self, node: Node, received: Received, link: SiloEngine) -> None:
        if received.to is None and len(node.silos) > 1:
            answers, seconds = [_not_by_itself(received, len(node.silos))], 0.0
        else:
            answers, seconds = self._answers(node, received, link)
        node.outbox.unsent = Unsent(
            tuple(answers), seconds, link.node_id, received.to, bundled=received.bundled
        )

    def _answers(
        self, node: Node, received: Received, link: SiloEngine
    ) -> tuple[list[Message], float]:
        run = self._run_of(received.header, link) if self._reads_runs else RunSettings()
        replies, seconds, asked = [], 0.0, time.monotonic()
        for message, number in zip(received.messages, received.to or (0,), strict=True):
            if time.monotonic() - asked > ASK_S:  # a bundle of short work is long work
                link.require_running(message.metadata.run_id)
                asked = time.monotonic()
            job = _Job(node.silos[number], message, link.node_id, run)
            self._jobs.put(job)
            reply, took = self._answer_of(job, link)
            replies.append(reply)
            seconds += took
        return replies, seconds

    def _answer_of(self, job: _Job, link: SiloEngine) -> tuple[Message, float]:
        """Wait for the app; stop its work if the run ends first or if it takes too long."""
        if not self._interruptible:
            return job.answer.get()
        limit_s = 60 * job.silo.policy.max_minutes or math.inf
        wait_s, worked_s = min(ASK_S, limit_s), 0.0
        while True:
            try:
                return job.answer.get(timeout=wait_s)
            except queue.Empty:
                # Counted rather than read from a clock: a machine that sleeps does not work.
                worked_s += wait_s if job.begun.is_set() else 0.0
            why = ""
            try:
                link.require_running(job.message.metadata.run_id)
                self.vitals.heard()
            except RunEndedError:
                why = "its run has ended."
            except LinkError as error:  # cut: it may still be wanted when the way is back
                log.debug("cannot check whether the run is active: %s", error)
            if worked_s >= limit_s:
                minutes = job.silo.policy.max_minutes
                why = why or f"one message may take at most {minutes:g} minutes (max_minutes)."
            if why:
                self._useless = job, why
                signal.pthread_kill(threading.main_thread().ident or 0, STOP_WORK)

    def _deliver(self, node: Node, link: SiloEngine) -> None:
        """Send finished replies; keep them if the connection is cut, drop them if the run ended."""
        unsent = node.outbox.unsent
        if unsent is None:
            return
        if unsent.node_id != link.node_id:
            log.warning("a reply was dropped: the SuperLink was restarted, and does not accept it")
            node.outbox.clear()
            return
        try:
            link.send(unsent)
        except RunEndedError as error:
            log.info("a reply was dropped: its run has ended (%s)", error)
        except NotPassedError as error:
            if all(reply.has_error() for reply in unsent.replies):  # which are small
                raise
            log.error("a reply was given up: %s", error)
            why = f"its reply could not be sent: {error}"
            node.outbox.give_up(why)
            return
        except LinkError:
            node.outbox.keep(unsent)
            raise
        else:
            if node.away:
                log.info("%s: the reply was sent", node.name)
        node.outbox.clear()

    def _run_of(self, message: Message, link: SiloEngine) -> RunSettings:
        """Return a run's settings, fetched once: they do not change."""
        run_id = message.metadata.run_id
        if run_id not in self._runs:
            while len(self._runs) >= MAX_RUNS:
                self._runs.pop(next(iter(self._runs)), None)
            self._runs[run_id] = link.settings_of(run_id)
        return self._runs.get(run_id) or link.settings_of(run_id)

    def _try_again_later(self, node: Node, error: LinkError, *, was_connected: bool) -> None:
        outage_s, is_news = self._schedule.failed(node, was_connected=was_connected)
        left_s = self.connection.patience_s - outage_s
        if not error.retry:
            self._fail(error)
        elif left_s < 0:
            own = f"silo {node.silos[0].name!r}"
            who = own if self._num_silos == 1 else f"the {self._num_silos} silos"
            text = f"{who} gave up after {outage_s:.0f} s: {wire.sentence(error)} {AFTER_GIVING_UP}"
            self._fail(GaveUpError(text))
        else:
            level = logging.WARNING if is_news else logging.DEBUG
            said = wire.sentence(error)
            log.log(level, "%s Retrying for another %.0f s.", said, left_s)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self.stop()


def _not_by_itself(received: Received, silos: int) -> Message:
    """Answer a message that names no silo, in a process of several silos."""
    (message,) = received.messages
    content = wire.config_records(message.content).get(wire.CONFIG, ConfigRecord())
    if content.get(wire.HOSTED) and message.metadata.message_type == wire.DESCRIBE:
        return Message(Error(wire.HOSTS, str(silos)), reply_to=message)
    why = (
        f"this process serves {silos} silos over one connection, which works only with "
        "coterie's ServerApp and without enrolment. Start one process per silo."
    )
    return wire.refusal(why, message)
