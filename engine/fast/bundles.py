"""Messages in one object, with large or shared arrays in separate ones: fewer calls, fewer copies.

Flower splits a message into an object for each record, array and piece of an array, and every
object is a call on each leg of its way: six for a reply with one packed model. Between a resident
silo and coterie's ServerApp a message is one object; arrays that are large or shared by several
messages are separate objects, stored and fetched once. Messages to the silos of one process travel
in one bundle. To the SuperLink, which passes on bytes under their SHA-256, all of these objects are
pieces of an array.

An object is Flower's head, then: 8 bytes, the length of an index; the index, JSON; the messages as
Flower's protobuf, their arrays empty; the small arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree

from coterie.engine.fast.pulled import Content, Piece, parts_of
from coterie.engine.flower import (
    message_from,
    message_from_proto,
    message_to_proto,
    set_message_id,
)
from coterie.wire.errors import WireError
from coterie.wire.limits import MAX_RECORDS
from coterie.wire.names import PACKED_NAME

KIND = b"ArrayChunk "
"""The head of a bundle and of a piece. A message in Flower's own form begins with another word."""
HEAD_BYTES = 64
"""The longest head: the kind and a length in decimals."""
PIECE_BYTES = 2**23
"""Size of the pieces of a large array; the last is the remainder. They are whole memory pages, so
that files with pieces can be mapped contiguously."""
INLINE_BYTES = 12_000_000
"""Most bytes of arrays in a bundle itself. It keeps a message far below ``MAX_OBJECT_BYTES``."""
SHARED_BYTES = 16_000
"""An array of at least this size that several silos receive is a separate object."""
MAX_BUNDLED = 10_000
"""The most messages of one bundle."""


@dataclass
class Bundle:
    """Messages as objects: id → content, the root last.

    The root is sent first, as it gives the order of the others.
    """

    root: str = ""
    objects: dict[str, Content] = field(default_factory=dict)

    def sent(self, wanted: Container[str]) -> list[tuple[str, Any]]:
        """Return the wanted objects, in the order in which they are sent."""
        ids = dict.fromkeys((self.root, *self.objects))
        return [(one, self.objects[one]) for one in ids if one in wanted]

    @property
    def tree(self) -> ObjectTree:
        """The tree of objects that the SuperLink receives."""
        pieces = [ObjectTree(object_id=one) for one in self.objects if one != self.root]
        return ObjectTree(object_id=self.root, children=pieces)


class Pieces:
    """A cache of arrays in pieces: an array in several bundles is cut and hashed once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Array, list[str], dict[str, Content]]] = {}

    def of(self, array: Array) -> tuple[list[str], dict[str, Content]]:
        """Return the ids of an array's pieces in order, and the contents, views of the array."""
        if id(array) not in self._made:  # which keeps it, so that its id stays its own
            data = memoryview(array.data)
            parts = (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))
            contents = [piece_of(part) for part in parts]
            ids = _ids_of(contents)
            self._made[id(array)] = array, ids, dict(zip(ids, contents, strict=True))
        return self._made[id(array)][1:]


def bundle(
    messages: Sequence[Message],
    to: Sequence[int] | None = None,
    *,
    inline: int = INLINE_BYTES,
    pieces: Pieces | None = None,
) -> Bundle:
    """Put messages into one object; an ``Array`` that several of them hold is stored once.

    Args:
        to: for each message the number of its silo in its process; None: the only silo.
        inline: the largest array, in bytes, that stays in the object.
        pieces: of arrays that other bundles hold as well.
    """
    made, table, pieces = Bundle(), _Arrays(inline), pieces or Pieces()
    protos = [_without_arrays(message, table).SerializeToString() for message in messages]
    places: list[int | list[str]] = []
    for array, stays in table.placed():
        if stays:
            places.append(len(array.data))
            continue
        ids, contents = pieces.of(array)
        made.objects |= contents
        places.append(ids)
    index: dict[str, Any] = {
        "messages": [len(proto) for proto in protos],
        "arrays": places,
        "refs": table.refs,
    }
    if to is not None:
        index["to"] = list(to)
    head = json.dumps(index).encode()
    small = [_padded(array.data) for array, stays in table.placed() if stays]
    rest = sum(map(len, protos)) + sum(map(len, small))
    # Blanks, so that the arrays begin at eight bytes.
    head += next(
        blanks
        for blanks in (b" " * number for number in range(16))  # a longer head shifts it by one
        if (len(_head(8 + len(head) + len(blanks) + rest)) + 8 + len(head + blanks) + rest) % 8 == 0
    )
    content = _as_object(len(head).to_bytes(8, "little"), head, *protos, *small)
    made.root = object_id(content)
    made.objects[made.root] = content
    return made


def is_bundle(content: Content) -> bool:
    """Return whether a message's root object is a bundle."""
    return bytes(parts_of(content)[0][: len(KIND)]) == KIND


def object_id(content: Content) -> str:
    """Return an object's id: the SHA-256 of its content."""
    digest = hashlib.sha256()
    for part in parts_of(content):
        digest.update(part)
    return digest.hexdigest()


def _ids_of(contents: Sequence[Content]) -> list[str]:
    """Return the ids; two threads help because hashlib releases the GIL."""
    if len(contents) < 2:
        return [object_id(content) for content in contents]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(object_id, contents))


def piece_of(body: memoryview) -> Piece:
    """Return the object with this body."""
    return Piece(_head(len(body)), body)


def body_of(content: Content) -> memoryview:
    """Return a bundle or a piece without its head.

    Raises:
        WireError: it is something else.
    """
    if isinstance(content, Piece):
        return content.body
    head = bytes(content[:HEAD_BYTES])
    if not head.startswith(KIND) or b"\0" not in head:
        raise WireError("a part of a bundle has the wrong type.")
    return memoryview(content)[head.index(b"\0") + 1 :]


def pieces_in(content: Content) -> list[str]:
    """Return the ids of a bundle's pieces, in the order of its arrays; empty if it is not a bundle.

    A SuperLink with a database lists a message's objects in another order.
    """
    try:
        body = body_of(content)
        index = json.loads(bytes(body[8 : 8 + int.from_bytes(body[:8], "little")]))
        named = [piece for place in index["arrays"] if isinstance(place, list) for piece in place]
        return list(dict.fromkeys(piece for piece in named if isinstance(piece, str)))
    except Exception:  # it is read again, by who says what is wrong
        return []


def unbundle(
    root: str, contents: Mapping[str, Content], *, max_bytes: int
) -> tuple[list[Message], list[int] | None]:
    """Return the messages of a bundle, and the silos they are for: the inverse of ``bundle``.

    A single message has the id of its object, one of several ``ID.NUMBER``. Bodies of pieces that
    are contiguous in memory are not copied.

    Args:
        root: the object that holds them.
        contents: of all objects by id.
        max_bytes: of a message's arrays, each counted as often as it is named; 0: no limit.

    Raises:
        WireError: it is not a bundle, cannot be read, or one of its messages would be too large.
    """
    try:
        messages, to = _read(root, contents, max_bytes)
    except WireError:
        raise
    except Exception as error:  # Flower, json and protobuf raise all sorts of things
        raise WireError(f"{type(error).__name__}: {error}") from None
    for number, message in enumerate(messages):
        set_message_id(message, root if to is None else f"{root}.{number}")
    return messages, to


# ---------------------------------------------------------------- writing


class _Arrays:
    """The distinct arrays of a bundle, and the array at each place in its messages."""

    def __init__(self, inline: int) -> None:
        self.refs: list[int] = []
        self._inline = inline
        self._numbers: dict[int, int] = {}
        self._arrays: list[Array] = []

    def number(self, array: Array) -> None:
        if id(array) not in self._numbers:
            self._numbers[id(array)] = len(self._arrays)
            self._arrays.append(array)
        self.refs.append(self._numbers[id(array)])

    def placed(self) -> Iterator[tuple[Array, bool]]:
        """Yield each array, and whether its bytes stay in the bundle itself."""
        left = INLINE_BYTES
        for array in self._arrays:
            stays = len(array.data) <= min(self._inline, left)
            left -= len(array.data) * stays
            yield array, stays


def _without_arrays(message: Message, table: _Arrays) -> ProtoMessage:
    if not message.has_content():
        return message_to_proto(message)
    content = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            empty = {}
            for key, array in record.items():
                table.number(array)
                empty[key] = Array(array.dtype, tuple(array.shape), array.stype, b"")
            record = ArrayRecord(empty)
        content[name] = record
    return message_to_proto(message_from(message, content))


def _as_object(*parts: bytes | memoryview) -> bytes:
    return b"".join((_head(sum(map(len, parts))), *parts))


def _head(size: int) -> bytes:
    return KIND + b" %d\0" % size


def _padded(data: bytes) -> bytes:
    return bytes(data) + b"\0" * (-len(data) % 8) if len(data) % 8 else data


# ---------------------------------------------------------------- reading


def _read(
    root: str, contents: Mapping[str, Content], max_bytes: int
) -> tuple[list[Message], list[int] | None]:
    body = body_of(contents[root])
    start = 8 + int.from_bytes(body[:8], "little")
    index = json.loads(bytes(body[8:start]))
    sizes, to = _whole_numbers(index["messages"]), index.get("to")
    if not 0 < len(sizes) <= (1 if to is None else MAX_BUNDLED):
        raise WireError(f"a bundle contains {len(sizes):,} messages.")
    if to is not None and len(_whole_numbers(to)) != len(sizes):
        raise WireError("a bundle does not name the silo of each message.")
    at = start
    messages = []
    for size in sizes:
        messages.append(message_from_proto(ProtoMessage.FromString(bytes(body[at : at + size]))))
        at += size
    arrays: list[list[memoryview]] = []
    for place in index["arrays"]:
        if isinstance(place, int):
            arrays.append([body[at : at + _whole_numbers([place])[0]]])
            at += place + -place % 8
        else:
            arrays.append([body_of(contents[piece]) for piece in place])
    if at != len(body):
        raise WireError("the length of a bundle does not match its index.")
    _fill(messages, arrays, _whole_numbers(index["refs"]), max_bytes)
    return messages, to


def _fill(
    messages: Sequence[Message],
    arrays: Sequence[Sequence[memoryview]],
    refs: Sequence[int],
    max_bytes: int,
) -> None:
    """Give the messages' arrays their values; shared arrays also share memory."""
    whole: dict[int, memoryview | bytes] = {}
    left = iter(refs)
    for message in messages:
        num_bytes = 0
        for array in _arrays_of(message):
            number = next(left)
            pieces = arrays[number]
            num_bytes += sum(map(len, pieces))
            if max_bytes and num_bytes > max_bytes:
                raise WireError(
                    f"its arrays have {num_bytes:,} bytes in total, more than {max_bytes:,}."
                )
            if number not in whole:
                whole[number] = _joined(pieces)
            # Other apps' arrays are Flower's, whose bytes are bytes.
            data = whole[number]
            array.data = data if array.stype == PACKED_NAME else bytes(data)  # type: ignore[assignment]
    if next(left, None) is not None:
        raise WireError("a bundle names more arrays than its messages contain.")


def _arrays_of(message: Message) -> Iterator[Array]:
    if not message.has_content():
        return
    if len(message.content) > MAX_RECORDS:
        raise WireError(f"it contains {len(message.content):,} records, more than {MAX_RECORDS:,}.")
    for record in message.content.values():
        if isinstance(record, ArrayRecord):
            yield from record.values()


def _joined(pieces: Sequence[memoryview]) -> memoryview | bytes:
    """Join pieces: a view if they are contiguous in memory, else a copy."""
    if len(pieces) == 1:
        return pieces[0]
    starts = [np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces if len(piece)]
    follow = all(a + len(p) == b for a, b, p in zip(starts, starts[1:], pieces, strict=False))
    one = pieces[0].obj
    if len(starts) < len(pieces) or not follow or any(piece.obj is not one for piece in pieces):
        return b"".join(pieces)
    held = memoryview(one)
    begin = starts[0] - np.frombuffer(held, np.uint8).ctypes.data
    return held[begin : begin + sum(map(len, pieces))].toreadonly()


def _whole_numbers(values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise WireError("a bundle's index contains something other than numbers.")
    return values
