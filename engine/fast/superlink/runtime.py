"""Flower's API for ServerApps: those of this machine share the folder of large objects."""

from __future__ import annotations

import json
from typing import Any

import grpc
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import get_authenticated_task
from flwr.superlink.servicer.runtime.runtime_servicer import SuperLinkRuntimeServicer

from coterie import wire
from coterie.engine.fast.channel import Part
from coterie.engine.fast.superlink import blob_store
from coterie.engine.fast.superlink.carrying import Carrying, Exchange
from coterie.engine.fast.superlink.stores import Stores


class _Parts(SuperLinkRuntimeServicer):
    """Flower's servicer, with contents that travel in parts."""

    objectstore_factory: Stores

    def PushObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Store an object as Flower does, or a part of a content."""
        if isinstance(request, Part) and _of_serverapp(request):
            return self.objectstore_factory.uploads.take(request)
        return super().PushObject(request, context)  # which says what is wrong with a part

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out an object as Flower does, or a part of a content."""
        answer = super().PullObject(request, context)
        return self.objectstore_factory.store().read(request, answer)[0]


def _of_serverapp(request: Part) -> bool:
    is_run = get_authenticated_task().type == TaskType.SERVER_APP
    return is_run and request.node.node_id == SUPERLINK_NODE_ID


class Runtime(Carrying, _Parts):
    """The calls of ServerApps."""

    def __init__(self, exchange: Exchange, states: LinkStateFactory, stores: Stores) -> None:
        super().__init__(states, stores)
        self.exchange = exchange

    def state_now(self) -> Any:
        return self.state()

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Announce messages; silos that wait learn of theirs when their objects are there."""
        try:
            return super().PushMessages(request, context)
        finally:  # of several some may be stored
            self.exchange.room.came([one.metadata.dst_node_id for one in request.messages_list])

    def PullObject(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out an object, or what is known here by the name of one."""
        found = b""
        if request.object_id == blob_store.WHERE:
            found = self.objectstore_factory.store().shelf.location()
        elif request.object_id == wire.WAITING:
            found = json.dumps(self.exchange.room.nodes()).encode()
        if not found:
            return super().PullObject(request, context)
        return PullObjectResponse(object_found=True, object_available=True, object_content=found)
