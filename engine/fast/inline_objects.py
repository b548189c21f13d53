"""Small objects that travel in the call that lists their message, which saves a call for each.

Between coterie's SuperLink and peers that support this, requests and answers that list messages
hold the contents of some objects in a protobuf field that Flower ignores. An object's id follows
from its content, so ids do not travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from coterie.engine.fast.channel import FROM_BYTES

FIELD = 9000
"""Number of the field; far beyond those of Flower."""
ALONG_BYTES = 2**22
"""Most bytes of objects in one call."""
_BYTES = 2
"""Wire type of the field: length-delimited."""


def small(objects: Iterable[tuple[str, bytes]], most: int = ALONG_BYTES) -> dict[str, bytes]:
    """Return the first of the objects that fit into one call, at most ``most`` bytes."""
    found, left = dict[str, bytes](), most
    for object_id, content in objects:
        if 0 < len(content) < FROM_BYTES and len(content) <= left:
            found[object_id] = content
            left -= len(content)
    return found


def attach(message: Any, contents: Iterable[bytes]) -> None:
    """Add contents of objects to a request or an answer."""
    head = _varint(FIELD << 3 | _BYTES)
    fields = [part for one in contents for part in (head, _varint(len(one)), one)]
    message.MergeFromString(b"".join(fields))


def attached(message: Any) -> dict[str, bytes]:
    """Remove and return the attached objects, id → content, as many as a call may have."""
    found = [
        field.data
        for field in UnknownFieldSet(message)
        if field.field_number == FIELD and field.wire_type == _BYTES
    ]
    if found:
        message.DiscardUnknownFields()
    return small((hashlib.sha256(one).hexdigest(), one) for one in found)


def _varint(number: int) -> bytes:
    """Return protobuf's form of a number: seven bits per byte, lowest first."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)
