"""Held calls: an idle silo waits in a call until there is work, instead of polling.

To Flower the call ``coterie.wire.WAIT`` is a heartbeat, and Flower authenticates the caller. Its
end is held until a message arrives for the silo, or for ``WAIT_S``. It delivers nothing: the silo
then pulls as usual, so an abandoned call loses no message.

A held call takes no thread: its answer is sent at once, and its status, which the caller also waits
for, is held. Silos poll a SuperLink that does not know the call.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

import grpc

from coterie import wire

log = logging.getLogger("flwr")

MOST = 2_000
"""Limit on held calls, one per node. Further silos must poll."""
REMEMBERED = 100_000
"""Limit on nodes whose messages are counted; those that looked longest ago are forgotten first."""
HEARTBEAT = "/flwr.proto.Fleet/SendNodeHeartbeat"
FULL = f"{MOST:,} silos wait here already. This one must poll instead."
ENDING = "the SuperLink is ending."


class FullError(Exception):
    """A call cannot be held; the text says why."""


@dataclass(frozen=True)
class _Held:
    """A held call; ``go`` ends it, with a reason or, if there may be a message, without."""

    go: Callable[[str], None]
    until: float

    def end(self, why_not: str = "") -> None:
        """End the call; errors of its connection are only logged."""
        try:
            self.go(why_not)
        except Exception as error:
            log.debug("a held call could not be ended: %s", error)


@dataclass
class _Mail:
    """A node's messages: how many have come, and how many of them it has not pulled, at most.

    ``left`` is None until the node has once looked in vain: a SuperLink that was restarted may have
    messages from before.
    """

    came: int = 0
    left: int | None = None

    def comes(self) -> None:
        """Count one more."""
        self.came += 1
        if self.left is not None:
            self.left += 1

    def pulled(self, count: int, came: int) -> None:
        """Note what a look found that began when so many had come."""
        if not count:
            self.left = self.came - came
        elif self.left is not None:
            self.left = max(self.left - count, 0)


class Room:
    """The held calls of silos; thread-safe."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, _Held] = OrderedDict()
        """By the time that they came, which is the order in which their time is up."""
        self._mail: OrderedDict[int, _Mail] = OrderedDict()
        self._answering: set[int] = set()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False

    def nodes(self) -> list[int]:
        """Return the nodes whose calls are held."""
        with self._changed:
            return list(self._held)

    def looks(self, node: int) -> Callable[[int], None]:
        """Note that a node is about to pull; what this returns notes how many messages it got."""
        with self._changed:
            mail = self._mail.setdefault(node, _Mail())
            self._mail.move_to_end(node)
            while len(self._mail) > REMEMBERED:
                self._mail.popitem(last=False)
            came = mail.came

        def got(count: int) -> None:
            with self._changed:
                mail.pulled(count, came)

        return got

    def came(self, nodes: Iterable[int]) -> None:
        """Notify nodes that may have a message; one that has several is named several times."""
        ended = []
        with self._changed:
            for node in nodes:
                if node in self._mail:
                    self._mail[node].comes()
                if node in self._held:
                    ended.append(self._held.pop(node))
        for held in ended:
            held.end()

    @contextmanager
    def answering(self, node: int) -> Iterator[None]:
        """Mark that a thread sends to a node, which may take long.

        Raises ``FullError`` if another thread already sends to it.
        """
        with self._changed:
            if node in self._answering:
                raise FullError("another call of this silo is not answered yet.")
            self._answering.add(node)
        try:
            yield
        finally:
            with self._changed:
                self._answering.discard(node)

    def hold(self, node: int, go: Callable[[str], None]) -> Callable[[], None]:
        """Hold a call: ``go`` is called once, perhaps before this returns, and must not block.

        Another call of the same node here is ended: its connection may be gone. Returns a function
        that drops the call when nobody waits for it. Raises ``FullError`` if it cannot be held.
        """
        held = _Held(go, time.monotonic() + wire.WAIT_S)
        with self._changed:
            before = self._held.pop(node, None)
            if self._closed or len(self._held) >= MOST:
                raise FullError(ENDING if self._closed else FULL)
            waits = node in self._mail and self._mail[node].left == 0
            if waits:
                self._held[node] = held
                self._watch()
        for one in (before, None if waits else held):
            if one is not None:
                one.end()

        def leave() -> None:
            with self._changed:
                if self._held.get(node) is held:
                    del self._held[node]

        return leave

    def close(self) -> None:
        """End all calls and hold no more, because the SuperLink is ending."""
        with self._changed:
            self._closed = True
            ended = list(self._held.values())
            self._held.clear()
        for held in ended:
            held.end(ENDING)

    def _watch(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._end_in_time, name="held calls", daemon=True)
            self._thread.start()
        elif len(self._held) == 1:  # it sleeps until there is one
            self._changed.notify()

    def _end_in_time(self) -> None:
        while True:
            with self._changed:
                first = next(iter(self._held.items()), None)
                left = first[1].until - time.monotonic() if first else None
                if first is None or (left is not None and left > 0):
                    self._changed.wait(left)
                    continue
                del self._held[first[0]]
            first[1].end()


# ---------------------------------------------------------------- the call


class GrpcWaiting(grpc.ServerInterceptor):  # type: ignore[misc]
    """The call ``WAIT`` before Flower's API for silos."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != wire.WAIT:
            return continuation(handler_call_details)
        beat = continuation(handler_call_details._replace(method=HEARTBEAT))
        if beat is None:
            return None

        def wait(request: Any, context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
            answer = beat.unary_unary(request, context)  # raises where Flower refuses
            node = request.node.node_id

            def go(why_not: str) -> None:
                if why_not:
                    context.set_code(grpc.StatusCode.UNAVAILABLE)
                    context.set_details(why_not)
                send(None)

            try:
                with self.room.answering(node):
                    send(answer)
                leave = self.room.hold(node, go)
            except FullError as error:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            if not context.add_callback(leave):  # it is over already
                leave()

        # gRPC then lets the handler return, and its thread go, before the call ends. It has that
        # for answers of several messages; to the caller one such message is like any other.
        vars(wait)["experimental_non_blocking"] = True
        return grpc.unary_stream_rpc_method_handler(
            wait,
            request_deserializer=beat.request_deserializer,
            response_serializer=beat.response_serializer,
        )
