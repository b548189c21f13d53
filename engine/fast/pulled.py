"""Zero-copy reading and writing of the messages that carry objects to and from the SuperLink.

Protobuf copies an object's content twice each way, half of the cost of a megabyte at either end.
Here the same bytes are written and read around the content, so that the peer may be Flower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr.proto.message_pb2 import PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node

_HEAD = b"\x08\x01\x10\x01\x1a"
"""Head of an answer with an object: found (field 1) and available (2) are true, its content (3)
follows."""
_PUSHED = b"\x22"
"""Tag of the content in a request to store it, field 4."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Kinds of fields on the wire."""


@dataclass(frozen=True)
class Piece:
    """An object with separate head and body. ``bytes`` joins them."""

    head: bytes
    body: memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.body)

    def __bytes__(self) -> bytes:
        return b"".join((self.head, self.body))


Content = bytes | memoryview | Piece
"""The content of an object."""


def parts_of(content: Content) -> tuple[bytes | memoryview, ...]:
    """Return the consecutive parts of a content."""
    return (content.head, content.body) if isinstance(content, Piece) else (content,)


# ---------------------------------------------------------------- the answer to PullObject


@dataclass(frozen=True)
class Pulled:
    """Equivalent of Flower's ``PullObjectResponse``."""

    object_found: bool = False
    object_available: bool = False
    object_content: Content = b""


def read_pulled(data: bytes) -> Pulled | PullObjectResponse:
    """Read an answer to PullObject without copying its content; Flower reads other layouts."""
    if data.startswith(_HEAD):
        size, at = _varint(data, len(_HEAD))
        if at > len(_HEAD) and at + size == len(data):
            return Pulled(True, True, memoryview(data)[at:])
    answer: PullObjectResponse = PullObjectResponse.FromString(data)
    return answer


def write_pulled(answer: Any) -> bytes:
    """Return an answer to PullObject, Flower's or ours, as bytes; its content is copied once."""
    content = answer.object_content
    if answer.object_found and answer.object_available and len(content):
        return b"".join((_HEAD, as_varint(len(content)), *parts_of(content)))
    known = PullObjectResponse(
        object_found=answer.object_found,
        object_available=answer.object_available,
        object_content=b"".join(parts_of(content)),
    )
    return bytes(known.SerializeToString())


# ---------------------------------------------------------------- the request PushObject


@dataclass
class Pushed:
    """Equivalent of Flower's ``PushObjectRequest``."""

    node: Node
    run_id: int
    object_id: str
    session_id: str
    object_content: Content

    def SerializeToString(self) -> bytes:
        """Return the request as bytes, with its content copied once."""
        fields = PushObjectRequest(
            node=self.node,
            run_id=self.run_id,
            object_id=self.object_id,
            session_id=self.session_id,
        ).SerializeToString()
        content = self.object_content
        return b"".join((fields, _PUSHED, as_varint(len(content)), *parts_of(content)))


def read_push(data: bytes) -> Pushed:
    """Read a request to store an object without copying its content.

    Raises:
        google.protobuf.message.DecodeError: it is not such a request.
    """
    rest, content = list[memoryview](), memoryview(b"")
    whole, at = memoryview(data), 0
    while at < len(data):
        tag, body = _varint(data, at)
        end = _end_of_field(data, tag & 7, body)
        if end is None:  # which Flower's reader says in its words
            rest, content = [whole], memoryview(b"")
            break
        if tag == _PUSHED[0]:
            size, begin = _varint(data, body)
            content = whole[begin : begin + size]
        else:
            rest.append(whole[at:end])
        at = end
    request = PushObjectRequest.FromString(b"".join(rest))
    held: Content = content or request.object_content
    return Pushed(request.node, request.run_id, request.object_id, request.session_id, held)


# ---------------------------------------------------------------- protobuf's numbers


def as_varint(number: int) -> bytes:
    """Return a protobuf varint: seven bits per byte, lowest first."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and its end; the end equals its beginning if it is invalid."""
    number = 0
    for count, byte in enumerate(data[at : at + 10]):
        number |= (byte & 127) << 7 * count
        if byte < 128:
            return number, at + count + 1
    return 0, at


def _end_of_field(data: bytes, kind: int, at: int) -> int | None:
    """Return the end of the field whose body begins at ``at``; None if it is truncated."""
    if kind == _BYTES:
        size, begin = _varint(data, at)
        end = begin + size if begin > at else -1
    elif kind == _VARINT:
        end = _varint(data, at)[1]
    else:
        end = at + {_FIXED64: 8, _FIXED32: 4}.get(kind, -at)
    return end if at < end <= len(data) else None
