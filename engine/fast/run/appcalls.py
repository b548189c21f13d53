"""A ServerApp's calls on the runtime API of a SuperLink, over gRPC.

They use only Flower's protobuf messages, and the address and the token of Flower's Grid.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
from flwr.proto.runtime_pb2_grpc import RuntimeStub

from coterie import wire
from coterie.engine import flower
from coterie.engine.fast.channel import calls_of
from coterie.system.calls import Retry, open_channel

CALL_DEADLINE_S = 60.0
"""Deadline of a call to the SuperLink, ample for the replies of a thousand silos."""


class RunOverError(BaseException):
    """Raised when the SuperLink has ended the run and rejects its calls; do not continue."""


def runtime_calls(grid: Any, max_bytes: int = 2**31 - 1) -> Any:
    """Return the calls of a run's ServerApp.

    They wait for a SuperLink that is away, as Flower's do. The SuperLink ends a run whose ServerApp
    has been silent for long. ``max_bytes`` limits the size of an answer.
    """
    connected = flower.connection_of(grid)
    assert connected is not None, "the Grid is not connected to a run"
    channel = open_channel(connected.address, connected.certificates, max_bytes=max_bytes)
    token = (("flwr-task-token", connected.token),)
    retry = Retry(partial(_is_lasting, grid), max_s=None, first_s=1.0, most_s=20.0)
    calls = calls_of(channel, RuntimeStub)

    def calling(call: Callable[..., Any]) -> Callable[..., Any]:
        def invoke(request: Any, *, more: tuple[tuple[str, str], ...] = (), **how: Any) -> Any:
            return retry.invoke(call, request, metadata=(*token, *more), **how)

        return invoke

    named = {name.rpartition("/")[2]: calling(call) for name, call in calls.items()}
    return SimpleNamespace(**named, close=channel.close)


def _is_lasting(grid: Any, error: grpc.RpcError) -> bool:
    """Return whether an error is permanent; end this process if it means that the run is over.

    If the run's token is gone, one of Flower's own calls fails too. Flower then ends the process by
    one signal for all its calls; a second signal would interrupt writes in progress.
    """
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        with suppress(Exception):  # it is about to end already
            grid.get_node_ids()
    if error.code() == grpc.StatusCode.PERMISSION_DENIED:
        raise RunOverError("the SuperLink has ended the run.") from error
    return bool(error.code() != grpc.StatusCode.UNAVAILABLE)


def said(error: grpc.RpcError) -> str:
    """Return what a failed call says, in plain text."""
    return wire.plain_text(f"{error.code().name}: {error.details()}", 200)
