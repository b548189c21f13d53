"""A SuperLink of Flower 1.34: what it serves to whom, and within which limits.

    python -m coterie.engine.fast.superlink.serving OPTIONS OF flower-superlink

The calls, their meaning and the state are Flower's. It has three APIs:

- Silos call ``fleet.Fleet``. A call has at most ``CALL_BYTES``, and a silo its allowance.
- ServerApps call ``runtime.Runtime``; those of this machine share a folder of large objects.
- Operators call Flower's own servicer. In a federation (``coterie.server.site.gate``) a gate checks
  each caller, and a call has at most ``CALL_BYTES``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
from flwr.proto.control_pb2_grpc import add_ControlServicer_to_server
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server
from flwr.proto.runtime_pb2_grpc import add_RuntimeServicer_to_server
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore import interceptors
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH, generic_create_grpc_server
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.servicer.control.control_account_auth_interceptor import (
    ControlAccountAuthInterceptor,
)
from flwr.superlink.servicer.control.control_servicer import ControlServicer

from coterie.engine.fast.superlink.carrying import Channel, Exchange
from coterie.engine.fast.superlink.commands import flower_command, replace_in
from coterie.engine.fast.superlink.fleet import Fleet, Signed
from coterie.engine.fast.superlink.long_polling import GrpcWaiting
from coterie.engine.fast.superlink.quota import CALL_BYTES
from coterie.engine.fast.superlink.runtime import Runtime
from coterie.engine.fast.superlink.stores import Stores

log = logging.getLogger("flwr")

PER_MESSAGE = "[Fleet.PullMessages]", "[Fleet.PushMessages]"
"""Beginnings of Flower's log lines of which there is one per message."""
Gate = Callable[[grpc.ServerInterceptor], grpc.ServerInterceptor]
"""Makes the check of operators' calls, around Flower's own."""


class Serving(SuperLinkLifespan):
    """Flower's SuperLink with these servicers.

    Args:
        config: Flower's, of the command line.
        states: Flower's factory of the state; not used yet.
        home: the SuperLink's folder.
        folders: holds open folders until the SuperLink has ended.
        gate: of a federation.
    """

    def __init__(
        self,
        config: SuperLinkLifespanConfig,
        states: LinkStateFactory,
        *,
        home: Path,
        folders: ExitStack,
        gate: Gate | None = None,
    ) -> None:
        stores, exchange = Stores(config.database, home, folders), Exchange()
        own = LinkStateFactory(config.database, states.federation_manager, stores)
        super().__init__(config, own)
        self._gate, self._room = gate, exchange.room
        self._fleet = Fleet(exchange, own, stores, enrolled=config.enable_supernode_auth)
        self._runtime = Runtime(exchange, own, stores)
        self._control = ControlServicer(
            linkstate_factory=own,
            objectstore_factory=stores,
            authn_plugin=config.authn_plugin,
            artifact_provider=config.artifact_provider,
            fleet_api_type=config.fleet_api_type,
        )

    def shutdown(self) -> None:
        """Stop serving; silos that wait learn why."""
        self._room.close()
        super().shutdown()

    def _start_legacy_fleet_grpc_rere(self, fleet_address: str) -> None:
        self._serve(
            ("Fleet API (gRPC-rere)", fleet_address, self.config.certificates, CALL_BYTES),
            (self._fleet, add_FleetServicer_to_server),
            [
                GrpcWaiting(self._room),
                Channel("Fleet"),
                interceptors.RpcErrorTranslationServerInterceptor(),
                Signed(self.state_factory),
                interceptors.create_fleet_runtime_version_server_interceptor(),
            ],
        )

    def _start_legacy_fleet_grpc_adapter(self, fleet_address: str) -> None:
        raise ValueError("silos are not served by gRPC adapter here: their limits are of gRPC-rere")

    def _start_runtime_api(self) -> None:
        config, state = self.config, self.state_factory.state
        tokens = interceptors.create_superlink_runtime_token_auth_server_interceptor(state)
        checks: list[grpc.ServerInterceptor] = [tokens]
        if config.superexec_auth_secret is not None:
            checks.append(
                interceptors.create_superlink_runtime_superexec_auth_server_interceptor(
                    state_provider=state, master_secret=config.superexec_auth_secret
                )
            )
        address, most = config.runtime_address, GRPC_MAX_MESSAGE_LENGTH
        self._runtime_server = self._serve(
            ("Runtime API", address, config.runtime_certificates, most),
            (self._runtime, add_RuntimeServicer_to_server),
            [
                Channel("Runtime"),
                interceptors.RpcErrorTranslationServerInterceptor(),
                *checks,
                interceptors.create_superlink_runtime_version_server_interceptor(),
            ],
        )

    def _start_control_api(self) -> None:
        config, account = self.config, ControlAccountAuthInterceptor(self.config.authn_plugin)
        most = CALL_BYTES if self._gate else GRPC_MAX_MESSAGE_LENGTH
        self._serve(
            ("Control API", config.control_address, config.certificates, most),
            (self._control, add_ControlServicer_to_server),
            [
                interceptors.RpcErrorTranslationServerInterceptor(),
                self._gate(account) if self._gate else account,
                interceptors.create_control_runtime_version_server_interceptor(),
            ],
        )

    def _serve(
        self,
        where: tuple[str, str, tuple[bytes, bytes, bytes] | None, int],
        servicer: tuple[Any, Callable[..., Any]],
        before: Sequence[grpc.ServerInterceptor],
    ) -> grpc.Server:
        api, address, certificates, most_bytes = where
        server = generic_create_grpc_server(
            servicer_and_add_fn=servicer,
            server_address=address,
            max_message_length=most_bytes,
            certificates=certificates,
            interceptors=before,
        )
        log.info("Flower Deployment Runtime: Starting %s on %s", api, server.bound_address)
        server.start()
        self.grpc_servers.append(server)
        return server


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record says more than that a silo asked for a message or sent a reply.

    Flower logs each of these, which is a twentieth of the SuperLink's work, and most of its log.
    """
    return record.levelno != logging.INFO or not str(record.msg).startswith(PER_MESSAGE)


def serve(home: Path, gate: Gate | None = None) -> None:
    """Run ``flower-superlink`` with this process's arguments."""
    log.addFilter(_is_news)
    sys.argv[0] = "flower-superlink"
    command = flower_command("flower-superlink")
    with ExitStack() as folders:
        # The command reads its options, makes this by its name, and ends it at a signal.
        replace_in(
            import_module("flwr.superlink.cli.flower_superlink"),
            SuperLinkLifespan=partial(Serving, home=home, folders=folders, gate=gate),
        )
        command()


if __name__ == "__main__":
    serve(Path(os.environ.get("COTERIE_HOME", ".")))
