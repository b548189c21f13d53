"""The channel for bytes: the calls ``Put`` and ``Get`` beside Flower's APIs.

A large content travels in parts of raw bytes, each a call: so a proxy needs to pass no more than
``PART_BYTES`` at once, a call that is cut costs one part, and a slow peer occupies no thread of the
SuperLink. ``Put`` answers how much has arrived, at the end with the SHA-256 of the whole, which is
the content's name; it is computed once, where the content arrives. Messages carry names only. The
SuperLink checks the caller, the run and its limits as it does for Flower's ``PushObject`` and
``PullObject``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
from flwr.proto.node_pb2 import Node

from coterie.engine.flower import ObjectPullError, ObjectUnavailableError

PUT, GET = "/coterie.Blobs/Put", "/coterie.Blobs/Get"
HEAD = "coterie-blob"
"""Metadata of a call: which content, and which part of it."""
PART_BYTES = 2**23
"""Size of a part; the last is the remainder."""
FROM_BYTES = 2**18
"""Smallest content that is put. A smaller one travels in the call that announces its message."""
NAME_BYTES = 64
"""Length of a content's name."""
UNKNOWN = b"unknown"
"""Answer to a part of an upload that the SuperLink does not know: it was restarted."""
TRIES = 3
"""How often an upload is begun."""
MOST_BYTES = 2**40
"""Limit on stated sizes and positions."""


class ChannelError(RuntimeError):
    """A content was not taken, or has another size."""


@dataclass
class Part:
    """A call of the channel, in place of Flower's request for an object.

    Attributes:
        node: of the caller.
        object_id: the name of the content, or the random number of an upload.
        at: position of the part in the content.
        size: of the whole content; 0 in a request.
        object_content: the part's bytes; empty in a request.
    """

    node: Node
    run_id: int
    object_id: str
    at: int
    size: int = 0
    object_content: bytes = b""
    session_id: str = ""

    @property
    def head(self) -> tuple[tuple[str, str], ...]:
        """The metadata that describe it."""
        fields = [self.node.node_id, self.run_id, self.object_id, self.at, self.size]
        return ((HEAD, json.dumps(fields)),)

    def SerializeToString(self) -> bytes:
        """Return the body of the call."""
        return self.object_content


def calls_of(
    channel: grpc.Channel,
    stub: Callable[[grpc.Channel], Any],
    own: Mapping[str, Callable[[bytes], Any]] = MappingProxyType({}),
) -> dict[str, Callable[..., Any]]:
    """Return the calls of an API of Flower's by name, with ``Put`` and ``Get``.

    Args:
        stub: Flower's, of the API.
        own: further calls of ours, and what reads their answers.
    """
    calls: dict[str, Callable[..., Any]] = dict(vars(stub(channel)))
    for name, read in {PUT: bytes, GET: bytes, **own}.items():
        calls[name] = channel.unary_unary(
            name,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=read,
        )
    return calls


def read_part(head: str, body: bytes) -> Part:
    """Return the call with these metadata. Raises ``ValueError`` if they are none."""
    try:
        node, run, name, at, size = json.loads(head)
    except (TypeError, RecursionError):
        raise ValueError("no list of five") from None
    numbers = all(type(one) is int for one in (node, run, at, size))
    if not numbers or type(name) is not str or len(name) > 64 or not name.isalnum():
        raise ValueError("a field has the wrong type")
    if not (0 <= node < 2**64 and 0 <= run < 2**64 and 0 <= at <= size <= MOST_BYTES):
        raise ValueError("a number is out of range")
    return Part(Node(node_id=node), run, name, at, size, body)


def new_upload() -> str:
    """Return the number of a new upload."""
    return secrets.token_hex(16)


def put(
    call: Callable[[Part], bytes], node: Node, run_id: int, content: memoryview, upload: str
) -> str:
    """Send a content, at least one byte; return its name.

    With the same ``upload`` number as before, what has arrived is not sent again. Raises
    ``ChannelError``.
    """
    at, size = 0, len(content)
    for _ in range(TRIES):
        while at < size:
            part = bytes(content[at : at + PART_BYTES])
            answer = call(Part(node, run_id, upload, at, size, part))
            if answer == UNKNOWN:
                break
            if len(answer) == NAME_BYTES:
                return answer.decode("ascii")
            at = int(answer)
        at, upload = 0, new_upload()
    raise ChannelError("the SuperLink has forgotten the beginning of an upload.")


def get(
    call: Callable[[Part], bytes], node: Node, run_id: int, name: str, size: int
) -> Iterator[bytes]:
    """Yield the parts of a content of this size.

    Raises:
        ObjectUnavailableError: it is on its way.
        ObjectPullError: it is not there.
        ChannelError: it has another size.
        grpc.RpcError: a call failed.
    """
    at = 0
    while at < size:
        try:
            part = call(Part(node, run_id, name, at, size))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            raise ObjectPullError(name, "the SuperLink does not have it") from None
        if not part and not at:
            raise ObjectUnavailableError(name)
        at += len(part)
        if not part or at > size:
            raise ChannelError(f"a content has {at:,} bytes instead of {size:,}.")
        yield part
