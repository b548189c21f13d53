"""An ingress before a SuperLink that passes every call on, but for those that are too large."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

REFUSED = "Received http2 header with status: 413"
"""What gRPC makes of an answer over HTTP/2 with this status (see ``ingress``, beside this)."""
NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Limiting(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A context manager.

    Args:
        behind: address of the SuperLink.

    Attributes:
        most: bytes of a call.
        refused: methods of the calls that were not passed on.
    """

    def __init__(self, behind: str) -> None:
        self.most, self.refused = 2**31, list[str]()
        self._channel = grpc.insecure_channel(behind, options=NO_LIMIT)
        self._server = grpc.server(ThreadPoolExecutor(16), options=NO_LIMIT)
        self._server.add_generic_rpc_handlers((self,))
        self.fleet_address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Limiting:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None)
        self._channel.close()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        """Every method, as bytes."""
        method, given = handler_call_details.method, handler_call_details.invocation_metadata
        call = self._channel.unary_unary(method)
        metadata = [(key, value) for key, value in given if key != "user-agent"]

        def passed_on(body: bytes, context: grpc.ServicerContext) -> Any:
            if len(body) > self.most:
                self.refused.append(method.rpartition("/")[2])
                context.abort(grpc.StatusCode.UNKNOWN, REFUSED)
            try:
                return call(body, timeout=context.time_remaining(), metadata=metadata)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        return grpc.unary_unary_rpc_method_handler(passed_on)
