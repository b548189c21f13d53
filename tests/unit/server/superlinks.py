"""A SuperLink in this process, served as ``engine.fast.superlink.serving`` does, with a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto import fleet_pb2_grpc
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from coterie.engine.fast.channel import GET, PUT, Part
from coterie.engine.fast.superlink.long_polling import Room
from coterie.engine.fast.superlink.quota import Quotas
from coterie.engine.fast.superlink.serving import Gate, Serving
from coterie.wire.enrolment import public_pem

LONG_S = 3600.0


@dataclass
class Served:
    """A SuperLink, and one run of it that goes on.

    Attributes:
        state: Flower's.
        store: of objects.
        token: of the run's ServerApp.
    """

    lifespan: Any
    state: Any
    store: Any
    run: int
    token: str

    @property
    def room(self) -> Room:
        """Where silos wait."""
        return self.lifespan._room  # type: ignore[no-any-return]

    @property
    def allowances(self) -> Quotas:
        """What silos may send."""
        return self.lifespan._fleet.allowances  # type: ignore[no-any-return]

    @property
    def address(self) -> str:
        """Where ServerApps call."""
        return str(self.lifespan.grpc_servers[1].bound_address)

    @property
    def fleet_address(self) -> str:
        return str(self.lifespan.grpc_servers[2].bound_address)

    @property
    def control_address(self) -> str:
        return str(self.lifespan.grpc_servers[0].bound_address)

    def enrolled(self, sign: Signature) -> Node:
        """A node that is online, with this key."""
        node = self.state.create_node("me", "me", public_pem(sign.key.public_key()), LONG_S)
        self.state.activate_node(node, LONG_S)
        return Node(node_id=node)


class Signature(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Signs a silo's calls, as every silo does."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.off_s = 0.0

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any):  # type: ignore[no-untyped-def]
        stamp = datetime.fromtimestamp(datetime.now(UTC).timestamp() + self.off_s, UTC).isoformat()
        signed = (
            ("flwr-public-key-bin", public_pem(self.key.public_key())),
            ("flwr-timestamp", stamp),
            ("flwr-signature-bin", self.key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))),
        )
        metadata = (*(details.metadata or ()), *signed)
        return continuation(details._replace(metadata=metadata), request)


@contextmanager
def serving(
    home: Path, database: str = FLWR_IN_MEMORY_DB_NAME, gate: Gate | None = None
) -> Iterator[Served]:
    """Serve at free ports until the end of the block."""
    options = ["--insecure", "--isolation", "process", "--database", database]
    command: Any = import_module("flwr.superlink.cli.flower_superlink")
    with patch.object(sys, "argv", ["flower-superlink", *options]):
        config = command._parse_superlink_lifespan_config()
    here = "127.0.0.1:0"
    config = replace(config, runtime_address=here, control_address=here, fleet_api_address=here)
    with ExitStack() as folders:
        states = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database))
        lifespan = Serving(config, states, home=home, folders=folders, gate=gate)
        lifespan.startup()
        folders.callback(lifespan.shutdown)
        state: Any = lifespan.state_factory.state()
        run, token = begun(state)
        yield Served(lifespan, state, lifespan.objectstore_factory.store(), run, token)


def begun(state: Any) -> tuple[int, str]:
    """A run that goes on, and the token of its ServerApp."""
    run = state.create_run("", "", "", {}, "@none/default", None, "me", "flwr-serverapp")
    (task,) = (one.primary_task_id for one in state.get_run_info(run_ids=[run]))
    token = state.claim_task(task)
    assert token and state.activate_task(task)
    state.acknowledge_task_heartbeat(task)
    return run, token


@contextmanager
def silo_of(superlink: Served, sign: Signature) -> Iterator[Any]:
    """The stub of a silo's calls, which are signed."""
    limits = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    with grpc.insecure_channel(superlink.fleet_address, options=limits) as channel:
        signed = grpc.intercept_channel(channel, sign)
        stub: Any = fleet_pb2_grpc.FleetStub(signed)
        body = Part.SerializeToString
        stub.Put, stub.Get = (signed.unary_unary(name, body) for name in (PUT, GET))
        yield stub
