"""Limits on the size of messages and on the texts in them: all data from a peer are bounded.

They are far above what any federation needs and far below what troubles a machine. Both sides
enforce them; the coordinator also checks objects before it accepts them
(``coterie.engine.fast.run.pulling``).
"""

from __future__ import annotations

from flwr.app import ArrayRecord, RecordDict

MAX_TEXT = 1000
"""Characters of a reason, or of any other text for people."""
MAX_WORD = 100
"""Characters of a device or a version."""
MAX_NAME = 256
"""Characters of a schema, and of the name of an array or a record."""
MAX_RECORDS = 1024
"""Records of a message: a strategy may send a model per silo."""
MAX_ARRAYS = 10_000
MAX_OBJECTS = 25_000
"""Objects into which Flower splits a message: two per array, and one per 5 MB."""
MAX_INDEX_BYTES = 8 * 2**20
"""Most bytes of JSON that describes arrays; once read, it takes twenty times the memory."""
MAX_OBJECT_BYTES = 32 * 2**20
"""Size of one object: an array travels in pieces of 5 MB."""
MAX_MODEL_BYTES = 2 * 2**30
"""Size of the initial model, which answers a question without a model."""
MAX_ANSWER_BYTES = 2**20
"""Size of the answer to any other question."""
OVER_ALLOWANCE = "in this run it has sent or announced"
"""Beginning of the reason why the SuperLink stores no more of a silo's replies in a run."""
FLOOR_BYTES, TIMES_SENT = 256 * 2**20, 4
"""Largest reply to work: this many bytes, or this multiple of what the silo was sent."""


def plain_text(text: object, limit: int = MAX_TEXT) -> str:
    """Return a peer's text as one line that a terminal, a log and a page display literally.

    White space becomes a space; other invisible characters (escape sequences, marks that reverse
    the direction of writing) are escaped; a text that is too long is cut.
    """
    whole = str(text)
    shown = "".join(map(_shown, whole[:limit]))[:limit]
    return shown if len(whole) <= limit else f"{shown}… ({len(whole) - limit:,} characters more)"


def sentence(text: object) -> str:
    """Return a text from elsewhere with a full stop, so that another sentence can follow."""
    whole = str(text).rstrip(" \n,;:")
    return whole if whole.endswith((".", "!", "?", "…")) else f"{whole}."


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if letter.isspace() else letter.encode("unicode_escape").decode()


def is_plain_name(name: object) -> bool:
    """Return whether arrays, metrics and records may have this name: any visible characters."""
    return isinstance(name, str) and len(name) <= MAX_NAME and name.isprintable()


def content_objection(content: RecordDict, *, max_bytes: int) -> str:
    """Return why a message exceeds the limits; empty if it does not. Nothing is decoded.

    ``max_bytes`` bounds all arrays together, each counted as often as it is named.
    """
    if len(content) > MAX_RECORDS:
        return f"it contains {len(content):,} records, more than {MAX_RECORDS:,}."
    num_bytes = 0
    for name, record in content.items():
        if not is_plain_name(name):
            return f"it has a record with the invalid name {name[:MAX_NAME]!r}."
        if len(record) > MAX_ARRAYS:
            return f"its record {name!r} has {len(record):,} entries, more than {MAX_ARRAYS:,}."
        if not isinstance(record, ArrayRecord):
            continue
        for array_name, array in record.items():
            if not is_plain_name(array_name):
                return f"it has an array with the invalid name {array_name[:MAX_NAME]!r}."
            num_bytes += len(array.data)
    if num_bytes > max_bytes:
        return f"it contains {num_bytes:,} bytes of arrays, more than {max_bytes:,}."
    return ""


def most_bytes(message_type: str, sent: int) -> int:
    """Return the most bytes of a reply to a message whose own arrays have ``sent`` bytes.

    A question (``query.…``) has no model in its answer, except the initial one.
    """
    if message_type == "query.initial":
        return MAX_MODEL_BYTES
    if message_type.startswith("query."):
        return MAX_ANSWER_BYTES
    return max(FLOOR_BYTES, TIMES_SENT * sent)


def num_array_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's arrays on the wire."""
    records = [record for record in content.values() if isinstance(record, ArrayRecord)]
    return sum(len(array.data) for record in records for array in record.values())
