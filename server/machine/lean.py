"""A SuperLink of Flower 1.34 that passes large objects on with few copies.

    python -m coterie.server.machine.lean OPTIONS OF flower-superlink

Its calls and what they mean are Flower's. In the places of Flower's by name are what reads and
writes the two calls that carry objects (``coterie.wire.pulled``), and the stores, that in memory as
that in a database: large objects lie in files, which ServerApps of this machine share
(``coterie.server.machine.shelf``). They are checked and written before Flower has its turn, which
stores one object at a time: so those of several silos are at once. A federation's SuperLink
(``coterie.server.machine.gate``) has the same.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from threading import Condition, Lock
from typing import Any, ClassVar

import grpc
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.servicer.runtime.runtime_servicer import SuperLinkRuntimeServicer
from sqlalchemy import event, text

from coterie import wire
from coterie.server.machine import shelf
from coterie.server.machine.allowance import limit_silos
from coterie.server.machine.holding import Room, hold_silos
from coterie.server.machine.superlink import flower_command, replace_in
from coterie.system.files import LockedError, why_unwritten
from coterie.wire.flower import inflatable_object, inflatable_utils

log = logging.getLogger("flwr")

Behaviour = Callable[[Any, grpc.ServicerContext], Any]
"""What answers a call."""
MOST_HELD = 200
"""Calls at once, of each kind: Flower's server has threads for a thousand."""
MOST_ALONG = 50
"""Objects of a message, of which some may go along with it."""
FILED = b"filed"
"""In the store in place of a content: it is in a file. No object has this content."""


@dataclass(frozen=True)
class Laid:
    """In place of a content that was checked: it is in this file.

    Attributes:
        file: that takes its place among the objects if Flower stores it.
        size: of the object; 0 of what a ServerApp has put there, which no call brought.
    """

    file: Path
    size: int = 0

    def __len__(self) -> int:
        return self.size


class _Filed:
    """What both of Flower's stores have here: large objects are in files.

    Attributes:
        shelf: the folder; None: they stay where Flower has them.
    """

    shelf: shelf.Shelf | None = None

    def lacks(self, object_id: str) -> bool:
        """Whether it waits for this object."""
        raise NotImplementedError

    def written(self, object_id: str, content: wire.Content) -> Laid | None:
        """An object that it waits for in a file; None if it is not what its name says, or small.

        Flower stores one object at a time. What takes long is done before.
        """
        body = _body_of(content)
        if self.shelf is None or body is None or not self.lacks(object_id):
            return None
        if object_id != wire.object_id(content):
            return None  # which it is told by ``put``
        try:
            return Laid(self.shelf.write(object_id, body), len(content))
        except OSError as error:
            log.warning("an object is kept without a file: %s", why_unwritten(error))
            return None

    def _stored(self, object_id: str, content: wire.Content | Laid) -> bytes:
        """What Flower is to keep of an object; ``Laid`` takes its place if it is waited for."""
        if isinstance(content, Laid):
            if self.shelf is not None and self.lacks(object_id):
                self.shelf.adopt(object_id, content.file)
            return FILED
        whole = bytes(content)
        if object_id != wire.object_id(whole):
            raise ValueError(f"Object ID {object_id} does not match content hash")
        inflatable_utils.validate_object_content(content=whole)
        return whole

    def _shown(self, object_id: str, content: bytes | None) -> Any:
        """What Flower has kept of it as it is; None if its file is gone."""
        if content != FILED:
            return content
        return self.shelf.shown(object_id) if self.shelf is not None else None


class FiledStore(_Filed, InMemoryObjectStore):
    """Flower's store in memory.

    Args:
        on: the folder, for as long as this process lasts.
    """

    def __init__(self, on: shelf.Shelf | None) -> None:
        super().__init__(verify=False)  # done here: the contents may be no bytes
        self.shelf = on

    def put(self, object_id: str, object_content: wire.Content | Laid) -> None:
        """As Flower's."""
        with self.lock_store:
            super().put(object_id, self._stored(object_id, object_content))

    def get(self, object_id: str) -> Any:
        """As Flower's, but what is in a file is shown from there."""
        with self.lock_store:
            return self._shown(object_id, super().get(object_id))

    def delete(self, object_id: str) -> None:
        """As Flower's, which calls it for each object that nobody needs any more."""
        with self.lock_store:
            entry = self.store.get(object_id)
            super().delete(object_id)
            if entry is not None and object_id not in self.store:
                self._drop(object_id, entry.content)

    def clear(self) -> None:
        """As Flower's."""
        with self.lock_store:
            for object_id, entry in self.store.items():
                self._drop(object_id, entry.content)
            super().clear()

    def _drop(self, object_id: str, content: bytes) -> None:
        if content == FILED and self.shelf is not None:
            self.shelf.drop(object_id)

    def lacks(self, object_id: str) -> bool:
        """See ``_Filed``."""
        with self.lock_store:
            entry = self.store.get(object_id)
            return entry is not None and not entry.is_available


class SqlStore(_Filed, SqlObjectStore):
    """Flower's store in a database, with a folder beside it, which is there after a restart.

    Args:
        database_path: as Flower's.
        opened: what enters a folder; None if that fails.
    """

    def __init__(
        self,
        database_path: str,
        opened: Callable[[AbstractContextManager[shelf.Shelf]], shelf.Shelf | None],
    ) -> None:
        super().__init__(database_path, verify=False)
        self._opened, self._turn = opened, Lock()

    def initialize(self, log_queries: bool = False) -> list[str]:
        """As Flower's; files that are not what the database says of them go."""
        tables = super().initialize(log_queries)
        if self._engine is not None and not self._is_in_memory_sqlite:
            folder = shelf.beside(Path(str(self._engine.url.database)))
            self.shelf = self._opened(shelf.kept(folder, self._filed()))
        return tables

    def _filed(self) -> set[str]:
        """Names of the objects that are in files."""
        found = self.query(
            "SELECT object_id FROM objects WHERE length(content) = :size AND content = :filed",
            {"size": len(FILED), "filed": FILED},
        )
        return {str(row["object_id"]) for row in found}

    def put(self, object_id: str, object_content: wire.Content | Laid) -> None:
        """As Flower's."""
        with self._turn:
            content = self._stored(object_id, object_content)
        super().put(object_id, content)

    def get(self, object_id: str) -> Any:
        """As Flower's, but what is in a file is shown from there."""
        return self._shown(object_id, super().get(object_id))

    def delete(self, object_id: str) -> None:
        """As Flower's; a file goes when the database has it that the object is gone."""
        with self.session() as session:
            super().delete(object_id)
            if self.shelf is not None and self.shelf.has(object_id) and object_id not in self:
                event.listen(session, "after_commit", lambda _: self._drop(object_id), once=True)

    def _drop(self, object_id: str) -> None:
        """Unless it was announced anew meanwhile. The session has just ended: this is another."""
        assert self.shelf is not None and self._engine is not None
        there = text("SELECT 1 FROM objects WHERE object_id = :name")
        with self._turn, self._engine.connect() as opened:
            if opened.execute(there, {"name": object_id}).first() is None:
                self.shelf.drop(object_id)

    def clear(self) -> None:
        """As Flower's."""
        super().clear()
        if self.shelf is not None:
            self.shelf.keep(())

    def lacks(self, object_id: str) -> bool:
        """See ``_Filed``."""
        asked = "SELECT is_available FROM objects WHERE object_id = :name"
        return any(not row["is_available"] for row in self.query(asked, {"name": object_id}))


def _body_of(content: wire.Content) -> memoryview | None:
    """What goes to a file of an object; None if it stays in memory."""
    if len(content) < shelf.FROM_BYTES or not wire.is_bundle(content):
        return None
    try:
        body = wire.body_of(content)
    except wire.WireError:
        return None
    own = wire.piece_of(body)
    return body if len(own) == len(content) and _begins(content, own.head) else None


def _begins(content: wire.Content, head: bytes) -> bool:
    return not isinstance(content, wire.Piece) and bytes(content[: len(head)]) == head


@contextmanager
def laid(store: object, request: Any) -> Iterator[None]:
    """A request to store an object, which goes on with a file in the place of a large content."""
    made = None
    if isinstance(store, _Filed):
        made = store.written(request.object_id, request.object_content)
    if made is None:
        yield
        return
    request.object_content = made
    try:
        yield
    finally:
        made.file.unlink(missing_ok=True)  # it was not taken


def laying(flower: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's function for what a silo sends, with large contents in files before it begins."""

    def push_object(request: Any, state: Any) -> Any:
        with laid(state.object_store, request):
            return flower(request=request, state=state)

    return push_object


class Runtime(SuperLinkRuntimeServicer):
    """Flower's API for ServerApps, which tells them of the folder and takes what they put there.

    Attributes:
        room: where silos wait.
    """

    room: ClassVar[Room | None] = None

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """As Flower's."""
        store = self.objectstore_factory.store()
        on = store.shelf if isinstance(store, _Filed) else None
        if request.object_id == shelf.WHERE and on is not None:
            on.forget_unannounced()
            return wire.Pulled(True, True, on.told())
        if request.object_id == wire.WAITING and self.room is not None:
            return wire.Pulled(True, True, json.dumps(self.room.nodes()).encode())
        answer = super().PullObject(request, context)
        if isinstance(answer.object_content, wire.Piece) and _told(context, wire.IN_FILE):
            return wire.Pulled(True, True)
        return answer

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """As Flower's."""
        store = self.objectstore_factory.store()
        if (
            isinstance(store, _Filed)
            and store.shelf is not None
            and not len(request.object_content)
        ):
            request.object_content = Laid(store.shelf.offered(request.object_id))
        with laid(store, request):
            return super().PushObject(request, context)


# ---------------------------------------------------------------- in the places of Flower's


class Arrivals:
    """Holds calls that ask for what is not there yet, of callers who want that, until it may be.

    A ServerApp that waits for replies would otherwise ask some fifty times in a round of a second,
    and whoever waits for an object as often: each call costs both ends a millisecond. A silo that
    waits for its next message holds another call (``holding``), which takes no thread.
    """

    def __init__(self) -> None:
        self._changed, self._count, self._held = Condition(), 0, 0

    def telling(self, behaviour: Behaviour) -> Behaviour:
        """A call that brings something."""

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behaviour(request, context)
            finally:
                with self._changed:
                    self._count += 1
                    self._changed.notify_all()

        return call

    def holding(
        self, behaviour: Behaviour, lacks: Callable[[Any], bool], *, again: bool
    ) -> Behaviour:
        """A call that asks for it.

        Args:
            behaviour: what answers.
            lacks: whether an answer has it not.
            again: who was held has the answer that there is then. Otherwise it has the first, and
                asks again: a message is handed out once, and whoever was held may be gone.
        """

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            until = time.monotonic() + _patience(context)
            while True:
                seen = self._count
                answer = behaviour(request, context)
                left = until - time.monotonic()
                if left <= 0 or not lacks(answer) or not self._wait(seen, left) or not again:
                    return answer

        return call

    def _wait(self, seen: int, seconds: float) -> bool:
        """Wait until there is more than was seen; whether there may be."""
        with self._changed:
            if self._held >= MOST_HELD:
                return False
            self._held += 1
            try:
                return self._changed.wait_for(lambda: self._count != seen, seconds)
            finally:
                self._held -= 1


def _patience(context: grpc.ServicerContext) -> float:
    """For how long a caller wants to be held."""
    told = _told(context, wire.PATIENCE) or "0"
    return min(int(told), wire.MOST_PATIENCE_MS) / 1000 if told.isdecimal() else 0.0


def _told(context: grpc.ServicerContext, name: str) -> str:
    """What a call says beside its request; empty: nothing."""
    return str(dict(context.invocation_metadata()).get(name, ""))


def _node_of(request: Any) -> Any:
    """Who calls, where a request says so, which Flower has checked; of a ServerApp's, None."""
    return request.node if "node" in request.DESCRIPTOR.fields_by_name else None


def taking_along(tell: Behaviour, push: Behaviour) -> Behaviour:
    """A call that tells of messages, and stores those of their objects that came along.

    Args:
        tell: Flower's.
        push: Flower's, for one object.
    """

    def call(request: Any, context: grpc.ServicerContext) -> Any:
        came = wire.attached(request)
        if not came or not request.messages_list:
            return tell(request, context)
        room = Runtime.room
        with room.telling_later() if room is not None else nullcontext():
            answer = tell(request, context)
            about, node = request.messages_list[0].metadata, _node_of(request)
            node = node or Node(node_id=about.src_node_id)
            left = []
            for name in answer.objects_to_push:
                # Of nobody else: Flower has just said of these that it waits for them.
                if (
                    name not in came
                    or not push(
                        wire.Pushed(node, about.run_id, name, answer.session_id, came[name]),
                        context,
                    ).stored
                ):
                    left.append(name)
            del answer.objects_to_push[:]
            answer.objects_to_push.extend(left)
        return answer

    return call


def giving_along(
    ask: Behaviour, pull: Behaviour, confirm: Behaviour, store: Callable[[], Any]
) -> Behaviour:
    """A call that asks for messages, and gets those of their objects that are small and there.

    Of a message that is whole then, it is as if whoever asked had said that it is.

    Args:
        ask: Flower's.
        pull: Flower's, for one object.
        confirm: Flower's, of a message whose objects were received.
        store: where objects are.
    """

    def small_of(
        tree: ObjectTree, node: Node, run_id: int, filed: shelf.Shelf, most: int, context: Any
    ) -> tuple[list[bytes], bool]:
        """Contents of a message's objects, and whether these are all."""
        objects = islice(inflatable_object.iterate_object_tree(tree), wire.MAX_OBJECTS + 1)
        ids = dict.fromkeys(one.object_id for one in objects)  # itself first
        if len(ids) > MOST_ALONG:
            return [], False
        found: dict[str, bytes] = {}
        for name in ids:
            if filed.has(name):
                continue
            request = PullObjectRequest(node=node, run_id=run_id, object_id=name)
            pulled = pull(request, context)
            if pulled.object_available:
                found[name] = bytes(pulled.object_content)
        fit = wire.small(found.items(), most)
        return list(fit.values()), len(fit) == len(ids)

    def call(request: Any, context: grpc.ServicerContext) -> Any:
        answer = ask(request, context)
        objects = store()
        filed = objects.shelf if isinstance(objects, _Filed) else None
        if not answer.messages_list or filed is None or not _told(context, wire.ALONG):
            return answer
        left = wire.ALONG_BYTES
        for header, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            if left < wire.ALONG_BYTES // 2:  # what is read might not fit
                break
            about = header.metadata
            node = _node_of(request) or Node(node_id=about.dst_node_id)
            try:
                own, whole = small_of(tree, node, about.run_id, filed, left, context)
                if whole:
                    confirm(
                        ConfirmMessageReceivedRequest(
                            node=node, run_id=about.run_id, message_object_id=tree.object_id
                        ),
                        context,
                    )
            except Exception as error:  # whoever asks for them by calls is told
                log.debug("objects do not go along with their message: %s", error)
                continue
            wire.attach(answer, own)
            left -= sum(map(len, own))
        return answer

    return call


class _Lean:
    """A gRPC server to which the handlers of a service are added.

    Those of calls that carry objects read and write them without protobuf's copies. Those that ask
    are held if they want. Small objects go along with their messages.
    """

    def __init__(
        self, server: grpc.Server, messages: Arrivals, objects: Arrivals, servicer: Any
    ) -> None:
        self._server, self._messages, self._objects = server, messages, objects
        self._servicer = servicer

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """They follow, by name."""

    def add_registered_method_handlers(
        self, service: str, methods: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """Add a service's methods."""
        tell, ask = methods["PushMessages"], methods["PullMessages"]
        push, pull = methods["PushObject"], methods["PullObject"]
        confirm = methods["ConfirmMessageReceived"].unary_unary
        store = self._servicer.objectstore_factory.store
        taking = taking_along(tell.unary_unary, self._objects.telling(push.unary_unary))
        giving = giving_along(ask.unary_unary, pull.unary_unary, confirm, store)
        own = {
            **methods,
            "PushMessages": grpc.unary_unary_rpc_method_handler(
                self._messages.telling(taking),
                tell.request_deserializer,
                tell.response_serializer,
            ),
            "PullMessages": grpc.unary_unary_rpc_method_handler(
                self._messages.holding(giving, _is_empty, again=False),
                ask.request_deserializer,
                ask.response_serializer,
            ),
            "PushObject": grpc.unary_unary_rpc_method_handler(
                self._objects.telling(push.unary_unary), wire.read_push, push.response_serializer
            ),
            "PullObject": grpc.unary_unary_rpc_method_handler(
                self._objects.holding(pull.unary_unary, _is_on_its_way, again=True),
                pull.request_deserializer,
                wire.write_pulled,
            ),
        }
        handler = grpc.method_handlers_generic_handler(service, own)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_registered_method_handlers(service, own)


def _is_empty(answer: Any) -> bool:
    return not answer.messages_list


def _is_on_its_way(answer: Any) -> bool:
    return bool(answer.object_found and not answer.object_available)


def added(
    *flowers: Callable[[Any, Any], None],
) -> list[Callable[[Any, Any], None]]:
    """Flower's functions that add services to servers, for those that hold calls for each other."""
    messages, objects = Arrivals(), Arrivals()

    def of(add: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        return lambda servicer, server: add(servicer, _Lean(server, messages, objects, servicer))

    return [of(add) for add in flowers]


def install(home: Path) -> ExitStack:
    """Put all of it in the places of Flower's; what is returned is closed at the end.

    Args:
        home: of the SuperLink's files.
    """
    stack = ExitStack()
    silos = import_module("flwr.superlink.cli.flower_superlink")
    apps = import_module("flwr.superlink.servicer.runtime.runtime_grpc")
    fleet_added, runtime_added = added(
        silos.add_FleetServicer_to_server, apps.add_RuntimeServicer_to_server
    )
    replace_in(silos, add_FleetServicer_to_server=fleet_added)
    replace_in(apps, add_RuntimeServicer_to_server=runtime_added, SuperLinkRuntimeServicer=Runtime)
    fleet = import_module("flwr.server.superlink.fleet.message_handler.message_handler")
    for module in (fleet, import_module("flwr.superlink.servicer.runtime.runtime_handlers")):
        replace_in(module, PullObjectResponse=wire.Pulled)
    replace_in(fleet, push_object=laying(fleet.push_object))

    def opened(folder: AbstractContextManager[shelf.Shelf]) -> shelf.Shelf | None:
        try:
            return stack.enter_context(folder)
        except (OSError, LockedError) as error:
            log.warning("large objects are kept without files: %s", why_unwritten(error))
            return None

    stores = import_module("flwr.supercore.object_store.object_store_factory")
    replace_in(
        stores,
        InMemoryObjectStore=lambda: FiledStore(opened(shelf.opened(home))),
        SqlObjectStore=lambda database: SqlStore(database, opened),
    )
    return stack


def main() -> None:
    """Be ``flower-superlink``, with its arguments, in which silos are limited and may wait."""
    with install(Path(os.environ.get("COTERIE_HOME", "."))):
        limit_silos()
        Runtime.room = hold_silos()
        sys.argv[0] = "flower-superlink"
        flower_command("flower-superlink")()


if __name__ == "__main__":
    main()
