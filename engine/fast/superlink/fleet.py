"""Flower's API for silos: within limits, and with calls that wait for messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import grpc
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.server.superlink.linkstate import LinkStateFactory

from coterie.engine.fast.superlink.carrying import Carrying, Exchange
from coterie.engine.fast.superlink.quota import ANNOUNCED_BYTES, Limited, refused
from coterie.engine.fast.superlink.stores import Stores


class Fleet(Carrying, Limited):
    """The calls of silos."""

    def __init__(
        self, exchange: Exchange, states: LinkStateFactory, stores: Stores, *, enrolled: bool
    ) -> None:
        super().__init__(states, stores, enrolled)
        self.exchange = exchange

    def state_now(self) -> Any:
        return self.state_factory.state()

    def PushMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Announce a reply; one with a large header is refused unread."""
        ids = sum(tree.ByteSize() for tree in request.message_object_trees)
        if request.ByteSize() - ids > ANNOUNCED_BYTES:
            raise refused(f"the header of a reply has at most {ANNOUNCED_BYTES:,} bytes.")
        return super().PushMessages(request, context)

    def PullMessages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Hand out a message; a silo that finds none may wait for the next."""
        got = self.exchange.room.looks(request.node.node_id)
        answer = super().PullMessages(request, context)
        got(len(answer.messages_list))
        return answer


class Signed(NodeAuthServerInterceptor):
    """Flower's check of a silo's signature; a refusal of its time gives the time here."""

    def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = super().intercept_service(continuation, handler_call_details)
        if handler is None or handler.request_deserializer is not None:
            return handler

        # It is none of the API's: what Flower makes to refuse a call.
        def refuse(request: Any, context: grpc.ServicerContext) -> Any:
            def abort(code: grpc.StatusCode, why: str) -> None:
                context.abort(code, with_the_time(why, datetime.now(UTC)))

            return handler.unary_unary(request, SimpleNamespace(abort=abort))

        return grpc.unary_unary_rpc_method_handler(refuse)


def with_the_time(why: str, now: datetime) -> str:
    """Add the time here to a rejection that is about the clock."""
    return f"{why}; here it is {now.isoformat()}" if why == "Invalid timestamp" else why
