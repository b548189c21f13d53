"""A SuperLink of Flower 1.34 that forwards large objects with few copies.

    python -m coterie.server.machine.lean OPTIONS OF flower-superlink

The calls and their meaning are Flower's. Replaced by name are the serialisation of the two calls
that carry objects (``coterie.wire.pulled``), and both object stores (in memory and in a database):
large objects lie in files that ServerApps of this machine share (``coterie.server.machine.shelf``).
They are checked and written before Flower stores them one at a time, so objects of several silos
are written in parallel. A federation's SuperLink (``coterie.server.site.gate``) uses the same
replacements.
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
"""The handler of a call."""
MOST_HELD = 200
"""Limit on held calls of each kind; Flower's server has threads for a thousand."""
MOST_ALONG = 50
"""Largest number of objects of a message that may travel with it."""
FILED = b"filed"
"""Stored in place of a content that is in a file. No object has this content."""


@dataclass(frozen=True)
class Laid:
    """A stand-in for a checked content that lies in a file.

    Attributes:
        file: moved into the store's folder if Flower stores the object.
        size: of the object; 0 if a ServerApp put the file there without a call.
    """

    file: Path
    size: int = 0

    def __len__(self) -> int:
        return self.size


class _Filed:
    """The base of both stores: large objects are in files of ``shelf``, if there is one."""

    shelf: shelf.Shelf | None = None

    def lacks(self, object_id: str) -> bool:
        """Return whether the store waits for this object."""
        raise NotImplementedError

    def written(self, object_id: str, content: wire.Content) -> Laid | None:
        """Write an expected object to a file; None if it is small or does not match its name.

        Flower stores one object at a time, so the slow part is done first.
        """
        body = _body_of(content)
        if self.shelf is None or body is None or not self.lacks(object_id):
            return None
        if object_id != wire.object_id(content):
            return None  # ``put`` reports that
        try:
            return Laid(self.shelf.write(object_id, body), len(content))
        except OSError as error:
            log.warning("an object is stored without a file: %s", why_unwritten(error))
            return None

    def _stored(self, object_id: str, content: wire.Content | Laid) -> bytes:
        """Return the content for Flower to keep; move a ``Laid`` file to its place if expected."""
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
        """Return the object for a content that Flower kept; None if its file is gone."""
        if content != FILED:
            return content
        return self.shelf.shown(object_id) if self.shelf is not None else None


class FiledStore(_Filed, InMemoryObjectStore):
    """Flower's store in memory, with a folder that is open while this process lasts."""

    def __init__(self, on: shelf.Shelf | None) -> None:
        super().__init__(verify=False)  # done here: the contents may be no bytes
        self.shelf = on

    def put(self, object_id: str, object_content: wire.Content | Laid) -> None:
        with self.lock_store:
            super().put(object_id, self._stored(object_id, object_content))

    def get(self, object_id: str) -> Any:
        with self.lock_store:
            return self._shown(object_id, super().get(object_id))

    def delete(self, object_id: str) -> None:
        with self.lock_store:
            entry = self.store.get(object_id)
            super().delete(object_id)
            if entry is not None and object_id not in self.store:
                self._drop(object_id, entry.content)

    def clear(self) -> None:
        with self.lock_store:
            for object_id, entry in self.store.items():
                self._drop(object_id, entry.content)
            super().clear()

    def _drop(self, object_id: str, content: bytes) -> None:
        if content == FILED and self.shelf is not None:
            self.shelf.drop(object_id)

    def lacks(self, object_id: str) -> bool:
        with self.lock_store:
            entry = self.store.get(object_id)
            return entry is not None and not entry.is_available


class SqlStore(_Filed, SqlObjectStore):
    """Flower's store in a database, with a folder next to it that survives a restart.

    Args:
        database_path: as in Flower.
        opened: enters a folder's context; returns None if that fails.
    """

    def __init__(
        self,
        database_path: str,
        opened: Callable[[AbstractContextManager[shelf.Shelf]], shelf.Shelf | None],
    ) -> None:
        super().__init__(database_path, verify=False)
        self._opened, self._turn = opened, Lock()

    def initialize(self, log_queries: bool = False) -> list[str]:
        """Create the tables as Flower does; delete files that do not match the database."""
        tables = super().initialize(log_queries)
        if self._engine is not None and not self._is_in_memory_sqlite:
            folder = shelf.beside(Path(str(self._engine.url.database)))
            self.shelf = self._opened(shelf.kept(folder, self._filed()))
        return tables

    def _filed(self) -> set[str]:
        found = self.query(
            "SELECT object_id FROM objects WHERE length(content) = :size AND content = :filed",
            {"size": len(FILED), "filed": FILED},
        )
        return {str(row["object_id"]) for row in found}

    def put(self, object_id: str, object_content: wire.Content | Laid) -> None:
        with self._turn:
            content = self._stored(object_id, object_content)
        super().put(object_id, content)

    def get(self, object_id: str) -> Any:
        return self._shown(object_id, super().get(object_id))

    def delete(self, object_id: str) -> None:
        """Delete an object as Flower does; its file is deleted after the commit."""
        with self.session() as session:
            super().delete(object_id)
            if self.shelf is not None and self.shelf.has(object_id) and object_id not in self:
                event.listen(session, "after_commit", lambda _: self._drop(object_id), once=True)

    def _drop(self, object_id: str) -> None:
        """Delete the file, unless the object was announced again meanwhile."""
        assert self.shelf is not None and self._engine is not None
        there = text("SELECT 1 FROM objects WHERE object_id = :name")
        with self._turn, self._engine.connect() as opened:
            if opened.execute(there, {"name": object_id}).first() is None:
                self.shelf.drop(object_id)

    def clear(self) -> None:
        super().clear()
        if self.shelf is not None:
            self.shelf.keep(())

    def lacks(self, object_id: str) -> bool:
        asked = "SELECT is_available FROM objects WHERE object_id = :name"
        return any(not row["is_available"] for row in self.query(asked, {"name": object_id}))


def _body_of(content: wire.Content) -> memoryview | None:
    """Return the part of an object that goes to a file; None if it stays in memory."""
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
    """Replace a large content in a request to store it by a file, for the duration of the block."""
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
    """Wrap Flower's handler of sent objects so that it finds large contents in files."""

    def push_object(request: Any, state: Any) -> Any:
        with laid(state.object_store, request):
            return flower(request=request, state=state)

    return push_object


class Runtime(SuperLinkRuntimeServicer):
    """Flower's API for ServerApps, which also share the folder; ``room`` is where silos wait."""

    room: ClassVar[Room | None] = None

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        store = self.objectstore_factory.store()
        on = store.shelf if isinstance(store, _Filed) else None
        if request.object_id == shelf.WHERE and on is not None:
            on.forget_unannounced()
            return wire.Pulled(True, True, on.location())
        if request.object_id == wire.WAITING and self.room is not None:
            return wire.Pulled(True, True, json.dumps(self.room.nodes()).encode())
        answer = super().PullObject(request, context)
        if isinstance(answer.object_content, wire.Piece) and _metadatum(context, wire.IN_FILE):
            return wire.Pulled(True, True)
        return answer

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
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
    """Held calls for data that is not there yet, of callers who want to wait for it.

    Otherwise a waiting ServerApp would ask about fifty times in a round of a second, at a
    millisecond per call on both ends. A silo that waits for its next message holds another call
    (``holding``), which takes no thread.
    """

    def __init__(self) -> None:
        self._changed, self._count, self._held = Condition(), 0, 0

    def notifying(self, behaviour: Behaviour) -> Behaviour:
        """Wrap a handler whose calls bring data, so that held calls notice."""

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
        """Wrap a handler whose calls ask for data, so that they are held while ``lacks(answer)``.

        If ``again``, a held caller gets the latest answer. Otherwise it gets the first one and asks
        again: a message is handed out once, and a held caller may be gone.
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
        """Wait until there is more than was seen; return whether there may be."""
        with self._changed:
            if self._held >= MOST_HELD:
                return False
            self._held += 1
            try:
                return self._changed.wait_for(lambda: self._count != seen, seconds)
            finally:
                self._held -= 1


def _patience(context: grpc.ServicerContext) -> float:
    """Return for how many seconds a caller wants to be held."""
    value = _metadatum(context, wire.PATIENCE) or "0"
    return min(int(value), wire.MOST_PATIENCE_MS) / 1000 if value.isdecimal() else 0.0


def _metadatum(context: grpc.ServicerContext, name: str) -> str:
    """Return a value of a call's metadata; empty if it is absent."""
    return str(dict(context.invocation_metadata()).get(name, ""))


def _node_of(request: Any) -> Any:
    """Return the calling node, which Flower has checked; None for calls of a ServerApp."""
    return request.node if "node" in request.DESCRIPTOR.fields_by_name else None


def taking_along(announce: Behaviour, push: Behaviour) -> Behaviour:
    """Wrap the call that announces messages, so that it stores objects sent with it."""

    def call(request: Any, context: grpc.ServicerContext) -> Any:
        came = wire.attached(request)
        if not came or not request.messages_list:
            return announce(request, context)
        room = Runtime.room
        with room.notifying_later() if room is not None else nullcontext():
            answer = announce(request, context)
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
    """Wrap the call that asks for messages, so that small available objects come with the answer.

    A message that is complete that way counts as confirmed by the caller. ``pull``, ``confirm`` and
    ``ask`` are Flower's handlers.
    """

    def small_of(
        tree: ObjectTree, node: Node, run_id: int, filed: shelf.Shelf, most: int, context: Any
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
        if not answer.messages_list or filed is None or not _metadatum(context, wire.ALONG):
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
            except Exception as error:  # a caller that pulls them gets the error
                log.debug("objects are not sent together with their message: %s", error)
                continue
            wire.attach(answer, own)
            left -= sum(map(len, own))
        return answer

    return call


class _Lean:
    """A gRPC server to which the handlers of a service are added.

    Calls that carry objects are read and written without protobuf's copies. Calls that ask for data
    are held if the caller wants that. Small objects travel with their messages.
    """

    def __init__(
        self, server: grpc.Server, messages: Arrivals, objects: Arrivals, servicer: Any
    ) -> None:
        self._server, self._messages, self._objects = server, messages, objects
        self._servicer = servicer

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignore these: ``add_registered_method_handlers`` adds them by name."""

    def add_registered_method_handlers(
        self, service: str, methods: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """Add a service's methods."""
        announce, ask = methods["PushMessages"], methods["PullMessages"]
        push, pull = methods["PushObject"], methods["PullObject"]
        confirm = methods["ConfirmMessageReceived"].unary_unary
        store = self._servicer.objectstore_factory.store
        taking = taking_along(announce.unary_unary, self._objects.notifying(push.unary_unary))
        giving = giving_along(ask.unary_unary, pull.unary_unary, confirm, store)
        own = {
            **methods,
            "PushMessages": grpc.unary_unary_rpc_method_handler(
                self._messages.notifying(taking),
                announce.request_deserializer,
                announce.response_serializer,
            ),
            "PullMessages": grpc.unary_unary_rpc_method_handler(
                self._messages.holding(giving, _is_empty, again=False),
                ask.request_deserializer,
                ask.response_serializer,
            ),
            "PushObject": grpc.unary_unary_rpc_method_handler(
                self._objects.notifying(push.unary_unary), wire.read_push, push.response_serializer
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
    """Wrap Flower's functions that add services, so that their calls share arrivals."""
    messages, objects = Arrivals(), Arrivals()

    def of(add: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        return lambda servicer, server: add(servicer, _Lean(server, messages, objects, servicer))

    return [of(add) for add in flowers]


def install(home: Path) -> ExitStack:
    """Install all replacements for a SuperLink's folder; close the returned stack at the end."""
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
            log.warning("large objects are stored without files: %s", why_unwritten(error))
            return None

    stores = import_module("flwr.supercore.object_store.object_store_factory")
    replace_in(
        stores,
        InMemoryObjectStore=lambda: FiledStore(opened(shelf.opened(home))),
        SqlObjectStore=lambda database: SqlStore(database, opened),
    )
    return stack


def main() -> None:
    """Run ``flower-superlink`` with its arguments, with limits for silos and held calls."""
    with install(Path(os.environ.get("COTERIE_HOME", "."))):
        limit_silos()
        Runtime.room = hold_silos()
        sys.argv[0] = "flower-superlink"
        flower_command("flower-superlink")()


if __name__ == "__main__":
    main()
