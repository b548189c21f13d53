"""Replies taken from the SuperLink one by one, each within limits.

Flower's Grid asks for all replies at once, waits for every object of the first before it looks at
the second, and raises if one of them cannot be read. So a single silo can hold up a round by
minutes (an object that it announced and does not send) and end a run. Here a reply waits by
itself until it is whole, and one that is too large or cannot be read becomes an error reply of its
silo. Read in Flower 1.34: ``flwr.superlink.grid.grpc_grid``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import grpc
from flwr.app import Error, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.proto.runtime_pb2_grpc import RuntimeStub
from flwr.serverapp import Grid
from flwr.supercore.grpc import create_channel
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.interceptors import (
    RuntimeTokenClientInterceptor,
    RuntimeVersionClientInterceptor,
)
from flwr.supercore.retry import wrap_stub
from flwr.superlink.grid.grpc_grid import GrpcGrid

from coterie import wire

log = logging.getLogger("coterie.run")

CALL_DEADLINE_S = 60.0
"""Of a call to the SuperLink: longer than it needs for the replies of a thousand silos."""
AT_ONCE = 16
"""Objects that are fetched before their bytes are added up."""
THREADS = 2
FETCH_S = 1.0
"""How long the objects of one reply are fetched before others have their turn."""


class _TooLargeError(ValueError):
    """A reply holds more than it may."""


@dataclass
class _Reply:
    """A reply that is announced.

    Attributes:
        message_id: of the message that it answers.
        object_id: its own.
        wanted: objects that have not been fetched, children first.
        contents: those that have been.
        most: bytes that it may have.
        why: it is refused, in words.
    """

    message_id: str
    object_id: str
    wanted: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    most: int = 0
    num_bytes: int = 0
    why: str = ""


def bounded(grid: Grid) -> Grid:
    """The Grid with replies taken one by one; one that has no SuperLink behind it as it is."""
    return _BoundedGrid(grid) if isinstance(grid, GrpcGrid) else grid


class _BoundedGrid(Grid):
    """Flower's Grid, but for ``pull_messages``."""

    def __init__(self, inner: GrpcGrid) -> None:
        self.inner = inner
        self._sent: dict[str, Message] = {}
        self._announced: dict[str, _Reply] = {}
        self._singly = False
        self._threads = ThreadPoolExecutor(THREADS)
        # A channel of its own for objects, so that gRPC refuses one that is too large, also one
        # that is small only while it is compressed, before it is in memory.
        channel = create_channel(
            server_address=inner._addr,
            insecure=inner._insecure,
            root_certificates=inner._cert,
            max_message_length=wire.MAX_OBJECT_BYTES,
            interceptors=[
                RuntimeVersionClientInterceptor(component_name="flwr-serverapp"),
                RuntimeTokenClientInterceptor(token=inner._token),
            ],
        )
        self._objects = RuntimeStub(channel)
        wrap_stub(self._objects, inner._retry_invoker)

    @property
    def run(self) -> Any:
        """Flower's record of the run."""
        return self.inner.run

    def set_run(self, run: Any) -> None:
        """As Flower's."""
        self.inner.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """As Flower's."""
        return self.inner.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """As Flower's."""
        return self.inner.get_node_ids()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As Flower's, which nothing here calls."""
        return self.inner.send_and_receive(messages, timeout=timeout)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As Flower's; what was sent says how large its reply may be."""
        messages = list(messages)
        ids = list(self.inner.push_messages(messages))
        self._sent |= {i: m for i, m in zip(ids, messages, strict=False) if i}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to these messages that are whole, or refused. Waits for none that is not there.

        What was announced for other messages, which nobody waits for any more, is let go.
        """
        asked = set(message_ids)
        for message_id in set(self._announced) - asked:
            self._let_go(self._announced.pop(message_id))
        self._sent = {i: m for i, m in self._sent.items() if i in asked}
        for reply in self._ask(sorted(asked - set(self._announced))):
            self._announced[reply.message_id] = reply
        whole = []
        for reply in list(self._announced.values()):
            if reply.why or self._fetch(reply):
                del self._announced[reply.message_id]
                self._let_go(reply)
                whole.append(self._read(reply))
        return whole

    # ---------------------------------------------------------------- what is announced

    def _ask(self, ids: Sequence[str]) -> Iterator[_Reply]:
        """Replies that the SuperLink has. It forgets those of a call that fails half-way."""
        if not ids:
            return
        if not self._singly:
            try:
                yield from self._announcements(ids)
                return
            except grpc.RpcError as error:
                self._singly = True
                log.warning(
                    "the SuperLink cannot give all replies at once (%s): from now on each is "
                    "asked for by itself",
                    _said(error),
                )
        for message_id in ids:
            try:
                yield from self._announcements([message_id])
            except grpc.RpcError as error:
                why = f"the SuperLink cannot give it: {_said(error)}"
                yield _Reply(message_id, "", [], why=why)

    def _announcements(self, ids: Sequence[str]) -> list[_Reply]:
        answer = self.inner._stub.PullMessages(
            PullAppMessagesRequest(message_ids=ids), timeout=CALL_DEADLINE_S
        )
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        found = [self._announced_reply(header.metadata, tree) for header, tree in pairs]
        return [reply for reply in found if reply.message_id in ids]

    def _announced_reply(self, metadata: Any, tree: ObjectTree) -> _Reply:
        reply = _Reply(metadata.reply_to_message_id, metadata.message_id, [])
        objects = inflatable_object.iterate_object_tree(tree)
        ids = [one.object_id for one in islice(objects, wire.MAX_OBJECTS + 1)]
        reply.wanted = list(dict.fromkeys(ids))
        sent = self._sent.get(reply.message_id)
        if sent is not None:
            kind = sent.metadata.message_type
            reply.most = wire.most_bytes(kind, wire.num_array_bytes(sent.content))
        if len(ids) > wire.MAX_OBJECTS:
            reply.why = f"it consists of more than {wire.MAX_OBJECTS:,} objects."
        elif tree.object_id != reply.object_id or not all(
            map(inflatable_object.is_valid_sha256_hash, ids)
        ):
            reply.why = "its objects have ids that cannot be."
        return reply

    # ---------------------------------------------------------------- its objects

    def _fetch(self, reply: _Reply) -> bool:
        """Fetch what is there of a reply; return whether that is all, or it is refused."""
        pull = make_pull_object_fn_protobuf(
            lambda request: self._objects.PullObject(request, timeout=CALL_DEADLINE_S),
            self.inner.node,
            self.inner.run.run_id,
        )

        def pulled(object_id: str) -> bytes | None:
            try:
                return pull(object_id)
            except inflatable_utils.ObjectUnavailableError:
                return None

        until = time.monotonic() + FETCH_S
        try:
            while reply.wanted:
                if time.monotonic() > until:
                    return False
                some = reply.wanted[:AT_ONCE]
                missing = []
                for object_id, content in zip(some, self._threads.map(pulled, some), strict=True):
                    if content is None:
                        missing.append(object_id)
                    else:
                        reply.contents[object_id] = content
                        reply.num_bytes += len(content)
                reply.wanted[:AT_ONCE] = missing
                if reply.num_bytes > reply.most + wire.MAX_OBJECT_BYTES:
                    raise _TooLargeError(f"it holds more than {reply.most:,} bytes.")
                if missing:
                    return False
        except grpc.RpcError as error:
            reply.why = f"it cannot be fetched: {_said(error)}"
        except (inflatable_utils.ObjectPullError, ValueError) as error:
            reply.why = str(error)
        return True

    def _let_go(self, reply: _Reply) -> None:
        """The SuperLink may delete the objects of this reply."""
        if not reply.object_id:
            return
        request = ConfirmMessageReceivedRequest(
            node=self.inner.node,
            run_id=self.inner.run.run_id,
            message_object_id=reply.object_id,
        )
        try:
            self.inner._stub.ConfirmMessageReceived(request, timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            log.debug("a reply was not confirmed: %s", _said(error))

    def _read(self, reply: _Reply) -> Message:
        why = reply.why
        if not why:
            try:
                message = wire.put_together(
                    reply.object_id,
                    reply.contents,
                    max_bytes=reply.most + wire.MAX_OBJECT_BYTES,
                )
                meta = message.metadata.__dict__
                meta["_message_id"] = reply.object_id
                meta["_reply_to_message_id"] = reply.message_id
                return message
            except wire.WireError as error:
                why = str(error)
        sent = self._sent[reply.message_id]
        told = Error(wire.UNREADABLE, f"its reply cannot be read: {wire.plain_text(why)}")
        return Message(told, reply_to=sent)


def _said(error: grpc.RpcError) -> str:
    """A gRPC error in a line."""
    return wire.plain_text(f"{error.code().name}: {error.details()}", 200)
