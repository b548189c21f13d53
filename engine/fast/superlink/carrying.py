"""What silos and ServerApps send each other through a SuperLink, with few calls.

``Carrying`` is the first base class of either API's servicer. A call that asks for a message which
is not there yet may be held until it is, small objects travel with their messages, and contents
that came over the channel are there as soon as a message names them. ``Channel`` is that channel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Condition
from typing import Any

import grpc
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node

from coterie import wire
from coterie.engine.fast import inline_objects
from coterie.engine.fast.channel import GET, HEAD, PUT, read_part
from coterie.engine.fast.inline_objects import ALONG_BYTES
from coterie.engine.fast.superlink.long_polling import Room
from coterie.engine.flower import inflatable_object

log = logging.getLogger("flwr")

MOST_HELD = 200
"""Limit on held calls of each kind; Flower's server has threads for a thousand."""
GATHER_S = 0.05
"""Longest time that a call is held for further replies once the first one has come: each call costs
both ends more than a millisecond."""
MOST_ALONG = 50
"""Largest number of objects of a message that may travel with it."""


class Arrivals:
    """Held calls for data that is not there yet, of callers who want to wait for it.

    Otherwise a waiting ServerApp would ask about fifty times in a round of a second, at a
    millisecond per call on both ends. A silo that waits for its next message holds another call
    (``holding``), which takes no thread.
    """

    def __init__(self) -> None:
        self._changed, self._count, self._held = Condition(), 0, 0

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Let held calls notice at the end of the block that data may have come."""
        try:
            yield
        finally:
            with self._changed:
                self._count += 1
                self._changed.notify_all()

    def held(self, ask: Callable[[], Any], context: grpc.ServicerContext, most: int = 1) -> Any:
        """Ask for messages; without any, hold the call until as many as ``most`` may have come.

        The caller then asks again: a message is handed out once, and a held caller may be gone.
        """
        seen, answer = self._count, ask()
        seconds = _patience(context)
        if seconds and not answer.messages_list:
            self._wait(seen, seconds, most)
        return answer

    def _wait(self, seen: int, seconds: float, most: int) -> None:
        """Wait until there may be more than was seen, and a moment for as many as ``most``."""
        with self._changed:
            if self._held >= MOST_HELD:
                return
            self._held += 1
            try:
                if self._changed.wait_for(lambda: self._count != seen, seconds):
                    self._changed.wait_for(lambda: self._count - seen >= most, GATHER_S)
            finally:
                self._held -= 1


@dataclass(frozen=True)
class Exchange:
    """What the servicers of both APIs share: who waits for what."""

    messages: Arrivals = field(default_factory=Arrivals)
    room: Room = field(default_factory=Room)


_Flowers: Any = object
"""The servicer of Flower's that comes next; it has another type in each API."""


class Carrying(_Flowers):  # type: ignore[misc]
    """The calls of either API that bring messages and objects, and those that ask for them."""

    exchange: Exchange
    objectstore_factory: Any
    """Of ``stores``; Flower's servicers have their own type for it."""

    def state_now(self) -> Any:
        """Return Flower's state."""
        raise NotImplementedError

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Announce messages as in Flower, and store the contents that came before or with them."""
        with self.exchange.messages.coming():
            came = inline_objects.attached(request)
            answer = super().PushMessages(request, context)
            if request.messages_list:
                about = request.messages_list[0].metadata
                node = _node_of(request) or Node(node_id=about.src_node_id)
                push = {"node": node, "run_id": about.run_id, "session_id": answer.session_id}
                # Of nobody else: Flower has just said of these that it waits for them.
                wanted = [
                    name
                    for name in answer.objects_to_push
                    if not self._has_come({**push, "object_id": name}, came, context)
                ]
                del answer.objects_to_push[:]
                answer.objects_to_push.extend(wanted)
                self.objectstore_factory.uploads.announced(about.run_id, node.node_id)
            return answer

    def _has_come(
        self, push: dict[str, Any], came: Mapping[str, bytes], context: grpc.ServicerContext
    ) -> bool:
        """Store an object that came with its message or before it; return whether it did."""
        name = push["object_id"]
        if name in came:
            request = PushObjectRequest(**push, object_content=came[name])
            return bool(self.PushObject(request, context).stored)
        run, on = push["run_id"], self.objectstore_factory.store().shelf
        offered = on.offered(name, run, push["node"].node_id)
        if not offered.exists():
            return False
        return bool(self.state_now().store_object(run, push["session_id"], name, offered))

    def PullMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out messages as in Flower, with small objects for a caller who can read them."""

        def ask() -> Any:
            answer = super(Carrying, self).PullMessages(request, context)
            if answer.messages_list and metadatum(context, wire.ALONG):
                self._give_along(answer, _node_of(request), context)
            return answer

        most = 1 if _node_of(request) else len(request.message_ids)
        return self.exchange.messages.held(ask, context, most)

    def _give_along(self, answer: Any, caller: Node | None, context: grpc.ServicerContext) -> None:
        """Attach small available objects; a message that is complete then counts as confirmed."""
        left = ALONG_BYTES
        for header, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            if left < ALONG_BYTES // 2:  # what is read might not fit
                break
            about = header.metadata
            whose = {"node": caller or Node(node_id=about.dst_node_id), "run_id": about.run_id}
            try:
                own, whole = self._small_of(tree, whose, left, context)
                if whole:
                    request = ConfirmMessageReceivedRequest(
                        **whose, message_object_id=tree.object_id
                    )
                    self.ConfirmMessageReceived(request, context)
            except Exception as error:  # a caller that pulls them gets the error
                log.debug("objects are not sent together with their message: %s", error)
                continue
            inline_objects.attach(answer, own)
            left -= sum(map(len, own))

    def _small_of(
        self,
        tree: ObjectTree,
        whose: dict[str, Any],
        most: int,
        context: grpc.ServicerContext,
    ) -> tuple[list[bytes], bool]:
        """Return contents of a message's objects, and whether these are all."""
        objects = islice(inflatable_object.iterate_object_tree(tree), wire.MAX_OBJECTS + 1)
        ids = dict.fromkeys(one.object_id for one in objects)  # itself first
        if len(ids) > MOST_ALONG:
            return [], False
        found: dict[str, bytes] = {}
        store = self.objectstore_factory.store()
        for name in ids:
            if store.is_filed(name):
                continue
            pulled = super().PullObject(PullObjectRequest(**whose, object_id=name), context)
            if pulled.object_available:
                found[name] = bytes(pulled.object_content)
        fit = inline_objects.small(found.items(), most)
        return list(fit.values()), len(fit) == len(ids)


class Channel(grpc.ServerInterceptor):  # type: ignore[misc]
    """The calls ``Put`` and ``Get`` in front of one of Flower's APIs, whose checks they pass.

    Args:
        api: name of the API.
    """

    def __init__(self, api: str) -> None:
        self._calls = {
            PUT: f"/flwr.proto.{api}/PushObject",
            GET: f"/flwr.proto.{api}/PullObject",
        }

    def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        method = self._calls.get(handler_call_details.method)
        if method is None:
            return continuation(handler_call_details)
        handler = continuation(handler_call_details._replace(method=method))
        if handler is None:
            return None

        def call(body: bytes, context: grpc.ServicerContext) -> Any:
            try:
                part = read_part(metadatum(context, HEAD), body)
                if bool(body) != (handler_call_details.method == PUT):
                    raise ValueError("a part has bytes if it is put, and none if it is asked for")
            except ValueError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{HEAD} is invalid: {error}")
            answer = handler.unary_unary(part, context)
            if answer is None:
                context.abort(grpc.StatusCode.NOT_FOUND, "there is no such content.")
            return answer

        return grpc.unary_unary_rpc_method_handler(call)


def metadatum(context: grpc.ServicerContext, name: str) -> str:
    """Return a value of a call's metadata; empty if it is absent."""
    return str(dict(context.invocation_metadata()).get(name, ""))


def _patience(context: grpc.ServicerContext) -> float:
    """Return for how many seconds a caller wants to be held."""
    value = metadatum(context, wire.PATIENCE) or "0"
    return min(int(value), wire.MOST_PATIENCE_MS) / 1000 if value.isdecimal() else 0.0


def _node_of(request: Any) -> Node | None:
    """Return the calling node, which Flower has checked; None for calls of a ServerApp."""
    return request.node if "node" in request.DESCRIPTOR.fields_by_name else None
