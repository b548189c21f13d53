"""A SuperLink of Flower 1.34 that passes large objects on with few copies.

    python -m coterie.server.machine.lean OPTIONS OF flower-superlink

Its calls and what they mean are Flower's. In the places of Flower's by name are what reads and
writes the two calls that carry objects (``coterie.wire.pulled``), and, where the state is in
memory, the store: large objects lie in files, which ServerApps of this machine share
(``coterie.server.machine.shelf``). A federation's SuperLink (``coterie.server.machine.gate``) has
the same.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.servicer.runtime.runtime_servicer import SuperLinkRuntimeServicer

from coterie import wire
from coterie.server.machine import shelf
from coterie.server.machine.allowance import limit_silos
from coterie.server.machine.holding import hold_silos
from coterie.server.machine.superlink import flower_command, replace_in
from coterie.system.files import LockedError, why_unwritten
from coterie.wire.flower import inflatable_utils

log = logging.getLogger("flwr")

FILED = b"filed"
"""In the store in place of a content: it is in a file. No object has this content."""
LAID = wire.Piece(b"", memoryview(b""))
"""In place of what a call brings: a ServerApp has put it there."""


class FiledStore(InMemoryObjectStore):
    """Flower's store, which has large objects in files.

    Args:
        on: the folder; None: they stay in memory.
    """

    def __init__(self, on: shelf.Shelf | None) -> None:
        super().__init__(verify=False)  # done here: the contents may be no bytes
        self.shelf = on

    def put(self, object_id: str, object_content: wire.Content) -> None:
        """As Flower's; ``LAID`` alone, of what is empty, stands for a file."""
        if object_content is LAID and self.shelf is not None:
            with self.lock_store:
                if self._lacks(object_id):
                    self.shelf.adopt(object_id)
                super().put(object_id, FILED)
            return
        if object_id != wire.object_id(object_content):
            raise ValueError(f"Object ID {object_id} does not match content hash")
        body = _body_of(object_content)
        if self.shelf is None or body is None or not self._lacks(object_id):
            content = bytes(object_content)
            inflatable_utils.validate_object_content(content=content)
            super().put(object_id, content)
            return
        try:
            self.shelf.lay(object_id, body)
        except OSError as error:
            log.warning("an object is kept in memory: %s", why_unwritten(error))
            super().put(object_id, bytes(object_content))
            return
        with self.lock_store:
            try:
                super().put(object_id, FILED)
            except Exception:
                self.shelf.drop(object_id)
                raise

    def get(self, object_id: str) -> Any:
        """As Flower's, but what is in a file is shown from there."""
        with self.lock_store:
            content = super().get(object_id)
            if content is not FILED or self.shelf is None:
                return content
            return self.shelf.shown(object_id)

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
        if content is FILED and self.shelf is not None:
            self.shelf.drop(object_id)

    def _lacks(self, object_id: str) -> bool:
        """Whether it waits for this object."""
        with self.lock_store:
            entry = self.store.get(object_id)
            return entry is not None and not entry.is_available


class SqlStore(SqlObjectStore):
    """Flower's store in a database, which takes bytes."""

    def put(self, object_id: str, object_content: wire.Content) -> None:
        """As Flower's."""
        super().put(object_id, bytes(object_content))


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


class Runtime(SuperLinkRuntimeServicer):
    """Flower's API for ServerApps, which tells them of the folder and takes what they put there."""

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """As Flower's."""
        store = self.objectstore_factory.store()
        on = store.shelf if isinstance(store, FiledStore) else None
        if request.object_id == shelf.WHERE and on is not None:
            on.forget_unannounced()
            return wire.Pulled(True, True, on.told())
        return super().PullObject(request, context)

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """As Flower's."""
        if not len(request.object_content):
            request.object_content = LAID
        return super().PushObject(request, context)


# ---------------------------------------------------------------- in the places of Flower's


class _Lean:
    """A gRPC server to which the handlers of a service are added.

    Those of calls that carry objects read and write them without protobuf's copies.
    """

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """They follow, by name."""

    def add_registered_method_handlers(
        self, service: str, methods: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        """Add a service's methods."""
        push, pull = methods["PushObject"], methods["PullObject"]
        own = {
            **methods,
            "PushObject": grpc.unary_unary_rpc_method_handler(
                push.unary_unary, wire.read_push, push.response_serializer
            ),
            "PullObject": grpc.unary_unary_rpc_method_handler(
                pull.unary_unary, pull.request_deserializer, wire.write_pulled
            ),
        }
        handler = grpc.method_handlers_generic_handler(service, own)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_registered_method_handlers(service, own)


def _added(flowers: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    return lambda servicer, server: flowers(servicer, _Lean(server))


def install(home: Path) -> ExitStack:
    """Put all of it in the places of Flower's; what is returned is closed at the end.

    Args:
        home: of the SuperLink's files.
    """
    stack = ExitStack()
    silos = import_module("flwr.superlink.cli.flower_superlink")
    apps = import_module("flwr.superlink.servicer.runtime.runtime_grpc")
    replace_in(silos, add_FleetServicer_to_server=_added(silos.add_FleetServicer_to_server))
    replace_in(
        apps,
        add_RuntimeServicer_to_server=_added(apps.add_RuntimeServicer_to_server),
        SuperLinkRuntimeServicer=Runtime,
    )
    for module in (
        import_module("flwr.server.superlink.fleet.message_handler.message_handler"),
        import_module("flwr.superlink.servicer.runtime.runtime_handlers"),
    ):
        replace_in(module, PullObjectResponse=wire.Pulled)
    try:
        on = stack.enter_context(shelf.opened(home))
    except (OSError, LockedError) as error:
        log.warning("large objects are kept in memory: %s", why_unwritten(error))
        on = None
    stores = import_module("flwr.supercore.object_store.object_store_factory")
    replace_in(stores, InMemoryObjectStore=lambda: FiledStore(on), SqlObjectStore=SqlStore)
    return stack


def main() -> None:
    """Be ``flower-superlink``, with its arguments, in which silos are limited and may wait."""
    limit_silos()
    hold_silos()
    with install(Path(os.environ.get("COTERIE_HOME", "."))):
        sys.argv[0] = "flower-superlink"
        flower_command("flower-superlink")()


if __name__ == "__main__":
    main()
