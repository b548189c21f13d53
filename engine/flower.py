"""All uses of Flower's private modules: the form in which messages travel.

``flwr.app`` and the like, and the protobuf messages of ``flwr.proto``, are Flower's public API. The
conversion of a message to protobuf, and its split into objects under their SHA-256, is private, but
it is the wire format. What Flower sets in a message by itself, and how a run's Grid is connected,
can only be had by private attributes; tests/rules/test_structure.py checks that they are used
nowhere else.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    user_config_from_proto,
    user_config_to_proto,
)
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
)

__all__ = [
    "message_from_proto",
    "message_to_proto",
    "user_config_from_proto",
    "user_config_to_proto",
    "inflatable_object",
    "inflatable_utils",
    "make_confirm_message_received_fn_protobuf",
    "make_pull_object_fn_protobuf",
    "ObjectPullError",
    "ObjectPushError",
    "ObjectUnavailableError",
    "Connected",
    "connection_of",
    "message_from",
    "set_asked_id",
    "set_message_id",
    "set_run",
    "set_sender",
]


def set_message_id(message: Message, message_id: str) -> None:
    """Name a message, which Flower does when it sends one."""
    message.metadata.__dict__["_message_id"] = message_id


def set_asked_id(reply: Message, message_id: str) -> None:
    """Name the message that a reply answers."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id


def set_sender(message: Message, node_id: int) -> None:
    """Name the node that sends a message."""
    message.metadata.__dict__["_src_node_id"] = node_id


def set_run(message: Message, run_id: int) -> None:
    """Name the run of a message."""
    message.metadata.__dict__["_run_id"] = run_id


def message_from(
    message: Message, content: RecordDict | None = None, error: Error | None = None
) -> Message:
    """Return a message with another content or error; its metadata are a copy."""
    return make_message(copy(message.metadata), content, error)


@dataclass(frozen=True)
class Connected:
    """How a run's Grid reaches its SuperLink: ``HOST:PORT``, CA (None: plain text), and token."""

    address: str
    certificates: bytes | None
    token: str


def connection_of(grid: Any) -> Connected | None:
    """Return how a Grid is connected; None if it has no SuperLink."""
    if not hasattr(grid, "_token"):
        return None
    certificates = None if grid._insecure else grid._cert or b""
    return Connected(grid._addr, certificates, grid._token)
