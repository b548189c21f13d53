"""What silos and ServerApps send each other through a SuperLink, with few calls and few copies.

``Carrying`` is the first base class of either API's servicer. A call that asks for data which is
not there yet may be held until it is, small objects travel with their messages, and ``FewCopies``
reads and writes the calls that carry objects without protobuf's copies (``engine.fast.pulled``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Condition
from typing import Any

import grpc
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node

from coterie import wire
from coterie.engine.fast import inline_objects, pulled
from coterie.engine.fast.inline_objects import ALONG_BYTES
from coterie.engine.fast.pulled import Pushed
from coterie.engine.fast.superlink import blob_store
from coterie.engine.fast.superlink.long_polling import Room
from coterie.engine.flower import inflatable_object

log = logging.getLogger("flwr")

MOST_HELD = 200
"""Limit on held calls of each kind; Flower's server has threads for a thousand."""
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

    def held(
        self,
        ask: Callable[[], Any],
        lacks: Callable[[Any], bool],
        context: grpc.ServicerContext,
        *,
        again: bool,
    ) -> Any:
        """Ask, and hold the call while ``lacks(answer)``, as long as the caller wants to wait.

        If ``again``, a held caller gets the latest answer. Otherwise it gets the first one and asks
        again: a message is handed out once, and a held caller may be gone.
        """
        until = time.monotonic() + _patience(context)
        while True:
            seen = self._count
            answer = ask()
            left = until - time.monotonic()
            if left <= 0 or not lacks(answer) or not self._wait(seen, left) or not again:
                return answer

    def _wait(self, seen: int, seconds: float) -> bool:
        """Wait until there is more than was seen; return whether there may be."""
        with self._changed:
            if self._held >= MOST_HELD:
                return False
            self._held += 1
            try:
                return self._changed.wait_for(lambda: self._count != seen, seconds)
            finally:
                self._held -= 1


@dataclass(frozen=True)
class Exchange:
    """What the servicers of both APIs share: who waits for what."""

    messages: Arrivals = field(default_factory=Arrivals)
    objects: Arrivals = field(default_factory=Arrivals)
    room: Room = field(default_factory=Room)


_Flowers: Any = object
"""The servicer of Flower's that comes next; it has another type in each API."""


class Carrying(_Flowers):  # type: ignore[misc]
    """The calls of either API that bring messages and objects, and those that ask for them."""

    exchange: Exchange
    objectstore_factory: Any
    """Of ``stores``; Flower's servicers have their own type for it."""

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Announce messages as in Flower, and store the objects that came with them."""
        with self.exchange.messages.coming():
            came = inline_objects.attached(request)
            answer = super().PushMessages(request, context)
            if came and request.messages_list:
                about = request.messages_list[0].metadata
                node = _node_of(request) or Node(node_id=about.src_node_id)
                # Of nobody else: Flower has just said of these that it waits for them.
                left = [
                    name
                    for name in answer.objects_to_push
                    if name not in came
                    or not self.PushObject(
                        Pushed(node, about.run_id, name, answer.session_id, came[name]),
                        context,
                    ).stored
                ]
                del answer.objects_to_push[:]
                answer.objects_to_push.extend(left)
            return answer

    def PullMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out messages as in Flower, with small objects for a caller who can read them."""

        def ask() -> Any:
            answer = super(Carrying, self).PullMessages(request, context)
            filed = self.objectstore_factory.store().shelf
            if answer.messages_list and filed is not None and metadatum(context, wire.ALONG):
                self._give_along(answer, _node_of(request), filed, context)
            return answer

        return self.exchange.messages.held(ask, _is_empty, context, again=False)

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Store an object as in Flower."""
        with self.exchange.objects.coming():
            return super().PushObject(request, context)

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out an object as in Flower; one on its way is waited for."""
        pull = super().PullObject
        return self.exchange.objects.held(
            lambda: pull(request, context), _is_on_its_way, context, again=True
        )

    def _give_along(
        self,
        answer: Any,
        caller: Node | None,
        filed: blob_store.BlobStore,
        context: grpc.ServicerContext,
    ) -> None:
        """Attach small available objects; a message that is complete then counts as confirmed."""
        left = ALONG_BYTES
        for header, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            if left < ALONG_BYTES // 2:  # what is read might not fit
                break
            about = header.metadata
            whose = {"node": caller or Node(node_id=about.dst_node_id), "run_id": about.run_id}
            try:
                own, whole = self._small_of(tree, whose, filed, left, context)
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
        filed: blob_store.BlobStore,
        most: int,
        context: grpc.ServicerContext,
    ) -> tuple[list[bytes], bool]:
        """Return contents of a message's objects, and whether these are all."""
        objects = islice(inflatable_object.iterate_object_tree(tree), wire.MAX_OBJECTS + 1)
        ids = dict.fromkeys(one.object_id for one in objects)  # itself first
        if len(ids) > MOST_ALONG:
            return [], False
        found: dict[str, bytes] = {}
        for name in ids:
            if filed.has(name):
                continue
            pulled = super().PullObject(PullObjectRequest(**whose, object_id=name), context)
            if pulled.object_available:
                found[name] = bytes(pulled.object_content)
        fit = inline_objects.small(found.items(), most)
        return list(fit.values()), len(fit) == len(ids)


class FewCopies(grpc.ServerInterceptor):  # type: ignore[misc]
    """Calls that carry objects, read and written without protobuf's copies.

    It comes last, next to Flower's servicer: what it hands out is not Flower's type.
    """

    def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler, method = continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.endswith(("/PushObject", "/PullObject")):
            return handler
        read, write = handler.request_deserializer, handler.response_serializer
        if method.endswith("/PushObject"):
            read = pulled.read_push
        else:
            write = pulled.write_pulled
        return grpc.unary_unary_rpc_method_handler(handler.unary_unary, read, write)


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


def _is_empty(answer: Any) -> bool:
    return not answer.messages_list


def _is_on_its_way(answer: Any) -> bool:
    return bool(answer.object_found and not answer.object_available)
