"""Objects on their way to and from the SuperLink, read and written where they lie.

Protobuf copies the content of an object twice on its way in (into the message and out of it) and
twice on its way out. That is half of what a megabyte costs at either end. Here the same bytes are
written and read around the content: whoever is at the other end may be Flower's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flwr.proto.message_pb2 import PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node

_HEAD = b"\x08\x01\x10\x01\x1a"
"""Of an answer with an object: found (field 1) and available (2) are true, its content (3)
follows."""
_PUSHED = b"\x22"
"""Of the content in a request to store it, field 4."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Kinds of fields on the wire."""


@dataclass(frozen=True)
class Piece:
    """An object of which head and body lie apart. ``bytes`` puts them together."""

    head: bytes
    body: memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.body)

    def __bytes__(self) -> bytes:
        return b"".join((self.head, self.body))


Content = bytes | memoryview | Piece
"""Of an object."""


def parts_of(content: Content) -> tuple[bytes | memoryview, ...]:
    """What it consists of, one behind the other."""
    return (content.head, content.body) if isinstance(content, Piece) else (content,)


# ---------------------------------------------------------------- the answer to PullObject


@dataclass(frozen=True)
class Pulled:
    """As Flower's ``PullObjectResponse``."""

    object_found: bool = False
    object_available: bool = False
    object_content: Content = b""


def read_pulled(data: bytes) -> Pulled | PullObjectResponse:
    """An answer to PullObject, its content not copied; what is written otherwise reads Flower."""
    if data.startswith(_HEAD):
        size, at = _varint(data, len(_HEAD))
        if at > len(_HEAD) and at + size == len(data):
            return Pulled(True, True, memoryview(data)[at:])
    answer: PullObjectResponse = PullObjectResponse.FromString(data)
    return answer


def write_pulled(answer: Any) -> bytes:
    """An answer to PullObject, its content copied once; of Flower's or ours."""
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
    """As Flower's ``PushObjectRequest``."""

    node: Node
    run_id: int
    object_id: str
    session_id: str
    object_content: Content

    def SerializeToString(self) -> bytes:
        """The request as it travels, its content copied once."""
        told = PushObjectRequest(
            node=self.node,
            run_id=self.run_id,
            object_id=self.object_id,
            session_id=self.session_id,
        ).SerializeToString()
        content = self.object_content
        return b"".join((told, _PUSHED, as_varint(len(content)), *parts_of(content)))


def read_push(data: bytes) -> Pushed:
    """A request to store an object, its content not copied.

    Raises:
        google.protobuf.message.DecodeError: it is none.
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
    told = PushObjectRequest.FromString(b"".join(rest))
    held: Content = content or told.object_content
    return Pushed(told.node, told.run_id, told.object_id, told.session_id, held)


# ---------------------------------------------------------------- protobuf's numbers


def as_varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends: at its beginning if it is none."""
    number = 0
    for count, byte in enumerate(data[at : at + 10]):
        number |= (byte & 127) << 7 * count
        if byte < 128:
            return number, at + count + 1
    return 0, at


def _end_of_field(data: bytes, kind: int, at: int) -> int | None:
    """Where a field ends whose body begins there; None if it does not."""
    if kind == _BYTES:
        size, begin = _varint(data, at)
        end = begin + size if begin > at else -1
    elif kind == _VARINT:
        end = _varint(data, at)[1]
    else:
        end = at + {_FIXED64: 8, _FIXED32: 4}.get(kind, -at)
    return end if at < end <= len(data) else None
