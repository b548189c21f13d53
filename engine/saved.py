"""The content of a reply as bytes, for a silo that keeps its replies on disk."""

from __future__ import annotations

from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from google.protobuf.message import DecodeError, EncodeError

from coterie.engine.flower import message_from_proto, message_to_proto


def packed(reply: Message) -> bytes:
    """Return a reply as bytes, from which ``content_of`` makes its content again.

    Raises:
        ValueError: it has 2 GiB or more, for which protobuf has no form.
    """
    try:
        return bytes(message_to_proto(reply).SerializeToString())
    except EncodeError as error:
        raise ValueError(str(error)) from None


def content_of(stored: bytes) -> RecordDict:
    """Return the content of a stored reply.

    Raises:
        ValueError: the bytes are damaged.
    """
    try:
        return message_from_proto(ProtoMessage.FromString(stored)).content
    except (DecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a stored reply ({type(error).__name__})") from None
