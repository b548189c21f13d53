"""Flower's API for ServerApps: those of this machine share the folder of large objects."""

from __future__ import annotations

import json
from typing import Any

import grpc
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import get_authenticated_task
from flwr.superlink.servicer.runtime.runtime_servicer import SuperLinkRuntimeServicer

from coterie import wire
from coterie.engine.fast.pulled import Piece, Pulled
from coterie.engine.fast.superlink import blob_store
from coterie.engine.fast.superlink.carrying import Carrying, Exchange, metadatum
from coterie.engine.fast.superlink.stores import Laid, Stores, laid


class _Sharing(SuperLinkRuntimeServicer):
    """Flower's servicer, with large objects in files."""

    objectstore_factory: Stores

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Store an object; one without content lies in the folder already."""
        store = self.objectstore_factory.store()
        if store.shelf is not None and not len(request.object_content):
            request.object_content = Laid(store.shelf.offered(request.object_id))
        with laid(store, request):
            return super().PushObject(request, context)

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out an object of the ServerApp's run, as Flower does."""
        task = get_authenticated_task()
        if task.type != TaskType.SERVER_APP or request.node.node_id != SUPERLINK_NODE_ID:
            return super().PullObject(request, context)  # which says what is wrong
        content = self.state().get_object(task.run_id, request.object_id)
        return Pulled(content is not None, bool(content), content or b"")


class Runtime(Carrying, _Sharing):
    """The calls of ServerApps."""

    def __init__(self, exchange: Exchange, states: LinkStateFactory, stores: Stores) -> None:
        super().__init__(states, stores)
        self.exchange = exchange

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Announce messages; silos that wait learn of theirs when their objects are there."""
        try:
            return super().PushMessages(request, context)
        finally:  # of several some may be stored
            self.exchange.room.came([one.metadata.dst_node_id for one in request.messages_list])

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out an object, but not one that its caller finds in the folder."""
        on = self.objectstore_factory.store().shelf
        if request.object_id == blob_store.WHERE and on is not None:
            on.forget_unannounced()
            return Pulled(True, True, on.location())
        if request.object_id == wire.WAITING:
            return Pulled(True, True, json.dumps(self.exchange.room.nodes()).encode())
        answer = super().PullObject(request, context)
        if isinstance(answer.object_content, Piece) and metadatum(context, wire.IN_FILE):
            return Pulled(True, True)
        return answer
