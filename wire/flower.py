"""All uses of Flower's private modules: the form in which messages travel.

``flwr.app`` and the like, and the protobuf messages of ``flwr.proto``, are Flower's public API. The
conversion of a message to protobuf, and its split into objects under their SHA-256, is private, but
it is the wire format. tests/test_imports.py checks this list.
"""

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
]
