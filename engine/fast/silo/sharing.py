"""Resources shared by the connections of one process: a channel, and one heartbeat thread.

One silo could afford both for itself, hundreds in one process could not. A further connection costs
only a node, a key and a few kilobytes. Each keeps its own identity and signs its own calls.
"""

from __future__ import annotations

import logging
import random
import sched
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

import grpc

from coterie.system.calls import open_channel

log = logging.getLogger("coterie.silo")

HEARTBEAT_S, AGAIN_S = 10.0, 2.0
"""Seconds between two heartbeats of a node, and until the next after a failed one. The SuperLink
considers a node lost after 60 s, so a pause of 45 s on either side costs no round."""

RENEW_S = 10.0
"""Minimum seconds between two channels to one address."""

MAX_CHANNEL_BACKOFF_S = 5.0
"""Longest pause before a channel dials again; gRPC's own is up to two minutes."""


# ---------------------------------------------------------------- channels


@dataclass
class _Base:
    """A channel that connections share; every call uses the current one."""

    address: str
    certificates: bytes | None
    channel: grpc.Channel
    opened: float
    users: int = 0

    def replace(self) -> None:
        """Switch to a new channel; calls that wait on the old one end with CANCELLED."""
        old, self.channel = self.channel, _open(self.address, self.certificates)
        self.opened = time.monotonic()
        old.close()


class _Shared(grpc.Channel):  # type: ignore[misc]
    """One connection's view of a shared channel."""

    def __init__(self, base: _Base) -> None:
        self._base = base

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Return a call that looks up the current channel: a stub requests its calls only once."""

        def call(*call: Any, **how: Any) -> Any:
            channel = self._base.channel
            try:
                return channel.unary_unary(*args, **kwargs)(*call, **how)
            except ValueError:  # closed in the meantime; the call has not begun
                if channel is self._base.channel:
                    raise
            return self._base.channel.unary_unary(*args, **kwargs)(*call, **how)

        return call

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    stream_unary = stream_stream = subscribe = unsubscribe = unary_stream

    def close(self) -> None:
        base = self._base
        key = (base.address, base.certificates)
        with _bases_lock:
            base.users -= 1
            if base.users or _bases.get(key) is not base:
                return
            del _bases[key]
        base.channel.close()

    def __enter__(self) -> _Shared:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_bases: dict[tuple[str, bytes | None], _Base] = {}
_bases_lock = Lock()


def shared_channel(address: str, certificates: bytes | None) -> grpc.Channel:
    """Return the channel that all connections to an address share; see ``open_channel``."""
    key = (address, certificates)
    with _bases_lock:
        base = _bases.get(key)
        if base is None:
            opened = _open(address, certificates)
            base = _bases[key] = _Base(address, certificates, opened, time.monotonic())
        base.users += 1
    return _Shared(base)


def renew(address: str) -> None:
    """Replace the channel to an address where nothing was answered in time.

    A connection that the other end has forgotten accepts everything for a quarter of an hour.
    Silos of one process notice together, so a channel younger than ``RENEW_S`` stays.
    """
    now = time.monotonic()
    with _bases_lock:
        for (where, _), base in _bases.items():
            if where == address and now - base.opened > RENEW_S:
                base.replace()


def _open(address: str, certificates: bytes | None) -> grpc.Channel:
    options = [
        ("grpc.max_reconnect_backoff_ms", int(1000 * MAX_CHANNEL_BACKOFF_S)),
        ("grpc.optimization_target", "throughput"),
    ]
    return open_channel(address, certificates, options=options)


# ---------------------------------------------------------------- heartbeats


class Heartbeat:
    """One connection's heartbeat, sent by a thread that all share."""

    def __init__(self, heartbeat_fn: Callable[[], bool]) -> None:
        self.beat = heartbeat_fn
        self.is_running = self.failed = False

    def start(self) -> None:
        """Schedule the first heartbeat; the node's activation a moment ago counts as one."""
        self.is_running = True
        _heart.schedule(self)

    def stop(self) -> None:
        """Stop: no further heartbeat begins."""
        self.is_running = False


class _Heart:
    """A thread that sends heartbeats for all connections; it ends when there are none."""

    def __init__(self) -> None:
        # It looks again at least every second: what was added meanwhile may be due first.
        self._due = sched.scheduler(time.monotonic, lambda wait_s: time.sleep(min(wait_s, 1.0)))
        self._lock = Lock()
        self._thread: Thread | None = None

    def schedule(self, heartbeat: Heartbeat) -> None:
        # Spread, so that silos that came in one instant do not beat in one.
        wait_s = (AGAIN_S if heartbeat.failed else HEARTBEAT_S) * random.uniform(0.7, 1.0)
        self._due.enter(wait_s, 0, self._beat, (heartbeat,))
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="heartbeats", daemon=True)
                self._thread.start()

    def _beat(self, heartbeat: Heartbeat) -> None:
        if heartbeat.is_running:
            try:
                heartbeat.failed = not heartbeat.beat()
            except Exception as error:  # the SuperLink forgot the node: its next call says so
                log.debug("a heartbeat was refused: %s", error)
            self.schedule(heartbeat)

    def _run(self) -> None:
        while True:
            self._due.run()
            with self._lock:
                if self._due.empty():
                    self._thread = None
                    return


_heart = _Heart()


# ---------------------------------------------------------------- objects


Content = bytes | memoryview


class ObjectCache:
    """A cache of pulled objects by id, which is the SHA-256 of their content.

    A model that is sent to many silos is one object at the SuperLink; silos of one process fetch
    it once. It keeps at most ``num_bytes``; the least recently used object goes first.
    """

    def __init__(self, num_bytes: int = 256_000_000) -> None:
        self.num_bytes = num_bytes
        self._kept: OrderedDict[str, Content] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, object_id: str, pull: Callable[[], Content]) -> Content:
        """Return the object's content from the cache, or by ``pull``."""
        with self._lock:
            if object_id in self._kept:
                self._kept.move_to_end(object_id)
                return self._kept[object_id]
        content = pull()
        with self._lock:
            if object_id not in self._kept:
                self._kept[object_id] = content
                self._size += len(content)
            while self._size > self.num_bytes and self._kept:
                self._size -= len(self._kept.popitem(last=False)[1])
        return content
