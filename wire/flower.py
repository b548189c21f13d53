"""All uses of Flower's private modules: the form in which messages travel.

``flwr.app`` and the like, and the protobuf messages of ``flwr.proto``, are Flower's public API. The
conversion of a message to protobuf, and its split into objects under their SHA-256, is private, but
it is the wire format: it is the same in 1.34 and 1.42, or the two could not be mixed.
tests/test_imports.py checks this list.
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

    There a message needs the run of its process, and raises without one, as in a test or in a
    simulation in one process. Flower sets it when a run begins.
    """
    with suppress(ModuleNotFoundError):
        identity = import_module("flwr.supercore.task_identity").TaskIdentity
        for part in ("task_id", "run_id", "node_id"):
            if getattr(identity, f"_{part}") is None:
                setattr(identity, part, 0)


_allow_messages_outside_a_run()
