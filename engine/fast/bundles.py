"""Messages in one object, with large arrays in separate ones.

Flower splits a message into an object for each record, array and piece of an array, and every
object is a call on each leg of its way: six for a reply with one packed model. Between a resident
silo and coterie's ServerApp a message is one object, and a large array is a separate content,
which the channel (``coterie.engine.fast.channel``) stores once however many messages name it.
Messages to the silos of one process travel in one bundle.

An object is Flower's head of a piece of an array, then: 8 bytes, the length of an index; the index,
JSON; the messages as Flower's protobuf, their arrays empty; the small arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree

from coterie.engine.flower import (
    inflatable_object,
    message_from,
    message_from_proto,
    message_to_proto,
    set_message_id,
)
from coterie.wire.errors import WireError
from coterie.wire.limits import MAX_INDEX_BYTES, MAX_OBJECTS, MAX_RECORDS
from coterie.wire.names import PACKED_NAME

Content = bytes | memoryview
"""The content of an object."""
KIND = b"ArrayChunk "
"""The head of a bundle. A message in Flower's own form begins with another word."""
HEAD_BYTES = 64
"""The longest head: the kind and a length in decimals."""
INLINE_BYTES = 12_000_000
"""Most bytes of arrays in a bundle itself. It keeps a message far below ``MAX_OBJECT_BYTES``."""
OWN_BYTES, SHARED_BYTES = 2**20, 2**16
"""An array of more bytes is a separate content: in a reply, and in a message to silos, of which
several may receive it."""
MAX_BUNDLED = 10_000
"""The most messages of one bundle."""


@dataclass(frozen=True)
class Blob:
    """A content outside of the bundle: its name, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Bundle:
    """Messages as an object.

    Attributes:
        content: of the object.
        blobs: names of the contents that it names.
    """

    content: bytes
    blobs: tuple[str, ...] = ()

    def tree(self, root: str) -> ObjectTree:
        """Return the tree of objects that the SuperLink receives, with this id of the object."""
        pieces = [ObjectTree(object_id=one) for one in dict.fromkeys(self.blobs)]
        return ObjectTree(object_id=root, children=pieces)


def bundle(
    messages: Sequence[Message],
    put: Callable[[Array], str],
    to: Sequence[int] | None = None,
    *,
    inline: int = OWN_BYTES,
) -> Bundle:
    """Put messages into one object; an ``Array`` that several of them hold is stored once.

    Args:
        put: stores the bytes of a large array, and returns their name.
        to: for each message the number of its silo in its process; None: the only silo.
        inline: the largest array, in bytes, that stays in the object.
    """
    table, blobs = _Arrays(inline), list[str]()
    protos = [_without_arrays(message, table).SerializeToString() for message in messages]
    places: list[int | list[Any]] = []
    for array, stays in table.placed():
        if stays:
            places.append(len(array.data))
            continue
        blobs.append(put(array))
        places.append([blobs[-1], len(array.data)])
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
    return Bundle(content, tuple(blobs))


def is_bundle(content: Content) -> bool:
    """Return whether a message's root object is a bundle."""
    return bytes(content[: len(KIND)]) == KIND


def object_id(content: Content) -> str:
    """Return an object's id: the SHA-256 of its content."""
    return hashlib.sha256(content).hexdigest()


def blobs_of(content: Content) -> list[Blob]:
    """Return the contents that a bundle names. Raises ``WireError`` if it cannot be read."""
    try:
        _, index, _ = _opened(content)
        named = [Blob(*place) for place in index["arrays"] if isinstance(place, list)]
        if not all(_is_name(one.name) and type(one.size) is int and one.size > 0 for one in named):
            raise WireError("a bundle names a content that cannot exist.")
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"{type(error).__name__}: {error}") from None
    return list(dict.fromkeys(named))


def unbundle(
    root: str, content: Content, blobs: Mapping[str, memoryview], *, max_bytes: int
) -> tuple[list[Message], list[int] | None]:
    """Return the messages of a bundle, and the silos they are for: the inverse of ``bundle``.

    A single message has the id of its object, one of several ``ID.NUMBER``.

    Args:
        root: the id of its object.
        content: of its object.
        blobs: contents that it names.
        max_bytes: of a message's arrays, each counted as often as it is named; 0: no limit.

    Raises:
        WireError: it is not a bundle, cannot be read, or one of its messages would be too large.
    """
    try:
        messages, to = _read(content, blobs, max_bytes)
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


def _opened(content: Content) -> tuple[memoryview, dict[str, Any], int]:
    """Return a bundle without its head, its index, and where that ends."""
    head = bytes(content[:HEAD_BYTES])
    if not head.startswith(KIND) or b"\0" not in head:
        raise WireError("it is not a bundle.")
    body = memoryview(content)[head.index(b"\0") + 1 :]
    start = 8 + int.from_bytes(body[:8], "little")
    if start > MAX_INDEX_BYTES:
        raise WireError(f"a bundle's index has more than {MAX_INDEX_BYTES:,} bytes.")
    return body, json.loads(bytes(body[8:start])), start


def _read(
    content: Content, blobs: Mapping[str, memoryview], max_bytes: int
) -> tuple[list[Message], list[int] | None]:
    body, index, at = _opened(content)
    sizes, to = _whole_numbers(index["messages"]), index.get("to")
    if not 0 < len(sizes) <= (1 if to is None else MAX_BUNDLED):
        raise WireError(f"a bundle contains {len(sizes):,} messages.")
    if to is not None and len(_whole_numbers(to)) != len(sizes):
        raise WireError("a bundle does not name the silo of each message.")
    messages = []
    for size in sizes:
        proto = ProtoMessage.FromString(bytes(body[at : at + size]))
        _require_few(proto)
        messages.append(message_from_proto(proto))
        at += size
    arrays: list[memoryview] = []
    for place in index["arrays"]:
        if isinstance(place, int):
            arrays.append(body[at : at + _whole_numbers([place])[0]])
            at += place + -place % 8
            continue
        name, size = place
        arrays.append(blobs[name])
        if len(arrays[-1]) != size:
            raise WireError(f"a content has {len(arrays[-1]):,} bytes instead of {size:,}.")
    if at != len(body):
        raise WireError("the length of a bundle does not match its index.")
    _fill(messages, arrays, _whole_numbers(index["refs"]), max_bytes)
    return messages, to


def _require_few(proto: ProtoMessage) -> None:
    """Refuse too many records or entries, before Flower makes objects of them."""
    records = proto.content.items
    if len(records) > MAX_RECORDS:
        raise WireError(f"it contains {len(records):,} records, more than {MAX_RECORDS:,}.")
    kinds = ((one.array_record, one.metric_record, one.config_record) for one in records)
    if (count := sum(len(kind.items) for own in kinds for kind in own)) > MAX_OBJECTS:
        raise WireError(f"it contains {count:,} entries, more than {MAX_OBJECTS:,}.")


def _fill(
    messages: Sequence[Message],
    arrays: Sequence[memoryview],
    refs: Sequence[int],
    max_bytes: int,
) -> None:
    """Give the messages' arrays their values; shared arrays also share memory."""
    left = iter(refs)
    for message in messages:
        num_bytes = 0
        for array in _arrays_of(message):
            data = arrays[next(left)]
            num_bytes += len(data)
            if max_bytes and num_bytes > max_bytes:
                raise WireError(
                    f"its arrays have {num_bytes:,} bytes in total, more than {max_bytes:,}."
                )
            # Other apps' arrays are Flower's, whose bytes are bytes.
            array.data = data if array.stype == PACKED_NAME else bytes(data)  # type: ignore[assignment]
    if next(left, None) is not None:
        raise WireError("a bundle names more arrays than its messages contain.")


def _arrays_of(message: Message) -> Iterator[Array]:
    if not message.has_content():
        return
    for record in message.content.values():
        if isinstance(record, ArrayRecord):
            yield from record.values()


def _is_name(value: object) -> bool:
    return isinstance(value, str) and inflatable_object.is_valid_sha256_hash(value)


def _whole_numbers(values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise WireError("a bundle's index contains something other than numbers.")
    return values
