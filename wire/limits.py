"""How much a message may hold, and what its texts may do: whatever comes from a peer is bounded.

The limits are far above what any federation needs and far below what troubles a machine. Both
sides hold to them; the coordinator also checks objects and bytes before it takes them
(``coterie.server.machine.pulling``).
"""

from __future__ import annotations

from flwr.app import ArrayRecord, RecordDict

MAX_TEXT = 1000
"""Letters of a reason, or of any other text for people."""
MAX_WORD = 100
"""Letters of a device or a version."""
MAX_NAME = 256
"""Letters of a schema, and of the name of an array or a record."""
MAX_RECORDS = 1024
"""Records of a message: a strategy may send a model per silo."""
MAX_ARRAYS = 10_000
"""Arrays of a record."""
MAX_OBJECTS = 25_000
"""Objects that Flower takes a message apart into: two an array, and one per 5 MB."""
MAX_OBJECT_BYTES = 32 * 2**20
"""Of one object: an array travels in pieces of 5 MB."""
MAX_MODEL_BYTES = 2 * 2**30
"""Of the initial model, which answers a question that has no model in it."""
MAX_ANSWER_BYTES = 2**20
"""Of the answer to any other question."""
FLOOR_BYTES, TIMES_SENT = 256 * 2**20, 4
"""A reply to work may have so many bytes, or so many times those that it was sent."""


def plain_text(text: object, limit: int = MAX_TEXT) -> str:
    """A text of a peer as one line that a terminal, a log and a page show as it is.

    White space becomes a space; other characters that cannot be seen (escape sequences, marks that
    turn the direction of writing round) are written out; what is too long is cut.
    """
    whole = str(text)
    shown = "".join(map(_shown, whole[:limit]))[:limit]
    return shown if len(whole) <= limit else f"{shown}… ({len(whole) - limit:,} letters more)"


def sentence(text: object) -> str:
    """A text of others that ends with a full stop, so that another sentence can follow."""
    whole = str(text).rstrip(" \n,;:")
    return whole if whole.endswith((".", "!", "?", "…")) else f"{whole}."


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if letter.isspace() else letter.encode("unicode_escape").decode()


def is_plain_name(name: object) -> bool:
    """Whether arrays, metrics and records may be called so: any letters that can be seen."""
    return isinstance(name, str) and len(name) <= MAX_NAME and name.isprintable()


def content_objection(content: RecordDict, *, max_bytes: int) -> str:
    """Why a message holds too much to be looked at; empty if it does not.

    Args:
        content: nothing in it is decoded.
        max_bytes: of all arrays together, each counted as often as it is named.
    """
    if len(content) > MAX_RECORDS:
        return f"it holds {len(content):,} records, more than {MAX_RECORDS:,}."
    num_bytes = 0
    for name, record in content.items():
        if not is_plain_name(name):
            return f"a record is called {name[:MAX_NAME]!r}."
        if len(record) > MAX_ARRAYS:
            return f"its record {name!r} has {len(record):,} entries, more than {MAX_ARRAYS:,}."
        if not isinstance(record, ArrayRecord):
            continue
        for array_name, array in record.items():
            if not is_plain_name(array_name):
                return f"an array is called {array_name[:MAX_NAME]!r}."
            num_bytes += len(array.data)
    if num_bytes > max_bytes:
        return f"it holds {num_bytes:,} bytes of arrays, more than {max_bytes:,}."
    return ""


def most_bytes(message_type: str, sent: int) -> int:
    """Bytes that the reply to a message may have.

    Args:
        message_type: a question (``query.…``) brings no model but the initial one.
        sent: bytes of the message's own arrays.
    """
    if message_type == "query.initial":
        return MAX_MODEL_BYTES
    if message_type.startswith("query."):
        return MAX_ANSWER_BYTES
    return max(FLOOR_BYTES, TIMES_SENT * sent)


def num_array_bytes(content: RecordDict) -> int:
    """Bytes of a message's arrays as they travel."""
    records = [record for record in content.values() if isinstance(record, ArrayRecord)]
    return sum(len(array.data) for record in records for array in record.values())
