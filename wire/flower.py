"""What this project uses of Flower's inside, in one place: the form in which messages travel.

``flwr.app`` and the like, and the protobuf messages of ``flwr.proto``, are Flower's public part.
How a message becomes protobuf, and how it is taken apart into objects under the SHA-256 of their
content, is not, but it is the wire: it is the same in 1.34 and 1.42, or the two could not be
mixed. tests/test_imports.py holds this list to what it is.
"""

from contextlib import suppress
from importlib import import_module

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


def _allow_messages_outside_a_run() -> None:
    """Let this process make messages in 1.40 and later as in 1.34.

    There a message asks which run its process is of, and raises where it is of none: a test, or a
    simulation in one process. Flower sets it when a run begins.
    """
    with suppress(ModuleNotFoundError):
        identity = import_module("flwr.supercore.task_identity").TaskIdentity
        for part in ("task_id", "run_id", "node_id"):
            if getattr(identity, f"_{part}") is None:
                setattr(identity, part, 0)


_allow_messages_outside_a_run()
