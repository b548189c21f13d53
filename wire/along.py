"""Small objects that travel in the call that tells of their message, instead of a call for each.

Between coterie's SuperLink and those that know of this they stand in a field of protobuf that
Flower does not have, and passes over: in a request or answer that lists messages, the contents of
some of their objects. What an object is called follows from its content, so names do not travel.
Whatever does not come along is asked for, or sent, by calls as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from coterie.wire.pulled import Content, as_varint, parts_of

FIELD = 9000
"""Number of the field; far beyond those that Flower has."""
OBJECT_BYTES = 2**18
"""An object is smaller than this: a larger one may lie in a file, and is worth a call."""
ALONG_BYTES = 2**22
"""Most bytes of objects that one call takes along."""
_BYTES = 2
"""Kind of the field: bytes behind their length."""


def small(objects: Iterable[tuple[str, Content]], most: int = ALONG_BYTES) -> dict[str, bytes]:
    """Those of some objects that may travel in one call, of so many bytes, the first first."""
    found, left = dict[str, bytes](), most
    for object_id, content in objects:
        if 0 < len(content) < OBJECT_BYTES and len(content) <= left:
            found[object_id] = b"".join(parts_of(content))
            left -= len(content)
    return found


def attach(message: Any, contents: Iterable[bytes]) -> None:
    """Put contents of objects into a request or an answer."""
    head = as_varint(FIELD << 3 | _BYTES)
    fields = [part for one in contents for part in (head, as_varint(len(one)), one)]
    message.MergeFromString(b"".join(fields))


def attached(message: Any) -> dict[str, bytes]:
    """Take them out again: id → content, as many as a call may take along."""
    found = [
        field.data
        for field in UnknownFieldSet(message)
        if field.field_number == FIELD and field.wire_type == _BYTES
    ]
    if found:
        message.DiscardUnknownFields()
    return small((hashlib.sha256(one).hexdigest(), one) for one in found)
