"""A message assembled from the objects into which Flower splits it.

All data from a peer are assembled here, at the coordinator and at a silo, so that every failure of
Flower, JSON or protobuf becomes the reason of a ``WireError``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from flwr.app import Array, Message

from coterie.engine.flower import inflatable_object, inflatable_utils
from coterie.wire.errors import WireError


def put_together(message_id: str, contents: Mapping[str, bytes], *, max_bytes: int) -> Message:
    """Assemble a message, with the id ``message_id``, from the objects into which Flower split it.

    ``max_bytes`` limits its arrays, each piece counted as often as it is named; 0: no limit.

    Raises:
        WireError: it is not a message, cannot be read, or would be too large.
    """
    try:
        num_bytes = _expanded_bytes(contents) if max_bytes else 0
        if num_bytes > max_bytes:
            raise WireError(
                f"its arrays have {num_bytes:,} bytes in total, more than {max_bytes:,}."
            )
        message = inflatable_utils.inflate_object_from_contents(message_id, dict(contents))
    except WireError:
        raise
    except Exception as error:  # Flower, json and protobuf raise all sorts of things
        raise WireError(f"{type(error).__name__}: {error}") from None
    if not isinstance(message, Message):
        raise WireError("it is not a message.")
    return message


def _expanded_bytes(contents: Mapping[str, bytes]) -> int:
    """Return the assembled size of all arrays, which may name a piece any number of times."""
    total = 0
    for content in contents.values():
        kind, children, _ = inflatable_object.get_object_head_values_from_object_content(content)
        if kind == "Array":
            body = json.loads(inflatable_object.get_object_body(content, Array))
            sizes = [len(contents[child]) for child in children]
            total += sum(sizes[piece] for piece in body["arraychunk_ids"])
    return total
