"""``coterie superlink`` of a federation: TLS, enrolled silos only, and it outlives a crash.

Two processes are kept alive: the SuperLink, and the executor that starts ServerApps. A ServerApp
is not the SuperLink's child, so with the database on a run carries on while a crashed SuperLink
is restarted.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from coterie.strategies.errors import FederationError, refused
from coterie.server.machine import superlink
from coterie.server.machine.link import Node, control
from coterie.server.site import enrolled
from coterie.server.site.federation import ENVIRONMENT, Federation
from coterie.system.files import write_atomically
from coterie.system.ports import check_free, listens
from coterie.system.processes import Program, noting_signals

STOP_DEADLINE_S = 10.0
LOOK_S = 0.2


def answers(federation: Federation) -> bool:
    """Whether something listens where the SuperLink takes operators."""
    return listens(federation.control_address)


def tell_superlink(federation: Federation) -> dict[str, Node]:
    """Make the running SuperLink follow the roster; return name → node."""
    with control(federation.control_address, root_certificates=federation.ca) as calls:
        return enrolled.sync(federation.roster, calls)


def serve(federation: Federation, say: Callable[[str], None]) -> int:
    """Run the SuperLink in the foreground until SIGTERM, SIGHUP or Ctrl-C; return the exit status.

    Raises:
        FederationError: a port is taken, or the SuperLink does not start.
    """
    reason = federation.renew_certificate()
    if reason:
        say(f"The server's certificate was renewed: {reason}.")
    listen = federation.config.listen
    for address in (listen.silos, listen.operators, listen.serverapp):
        _require_free(address)
    secret = federation.folder / "executor.secret"
    if not secret.exists():
        write_atomically(secret, secrets.token_bytes(32), private=True)
    shared = ("--superexec-auth-secret-file", str(secret), "--parent-pid", str(os.getpid()))
    started = superlink.executor_command(listen.serverapp, *shared)
    link = _program("SuperLink", _superlink_command(federation, secret), federation)
    executor = _program("executor", started, federation)
    with noting_signals() as stopped:
        try:
            link.start()
            superlink.wait_until_it_answers(link, [federation.control_address], stopped)
            tell_superlink(federation)
            executor.start()
            _greet(federation, say)
            while not stopped():
                time.sleep(LOOK_S)
                if link.ended and link.restart(say, stopped):
                    _come_back(link, federation, say, stopped)
                if executor.ended:
                    executor.restart(say, stopped)
        finally:
            for program in (executor, link):
                program.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGTERM)
    say("The SuperLink has ended.")
    return 0


def _come_back(
    link: Program,
    federation: Federation,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """After a crash: whatever keeps it from starting may pass (a full disk), so never give up."""
    try:
        superlink.wait_until_it_answers(link, [federation.control_address], stopped)
        if not stopped():
            tell_superlink(federation)
            say("The SuperLink is back.")
    except FederationError as error:
        say(str(error))


def _greet(federation: Federation, say: Callable[[str], None]) -> None:
    count = len(enrolled.names_by_node(federation.roster))
    silos, operators = ", ".join(federation.config.addresses), federation.control_address
    say(f"SuperLink: silos connect to {silos} (TLS, {count} enrolled), operators to {operators}")
    if federation.is_open_to_operators_elsewhere:
        say(
            f"WARNING: operators' API listens on {federation.config.listen.operators}. It asks for "
            "no password: anyone who can reach it can start runs and enrol silos."
        )


def _superlink_command(federation: Federation, secret: Path) -> list[str]:
    listen, tls = federation.config.listen, federation.tls
    database = ("--database", str(federation.folder / "superlink.db"))
    return superlink.command(
        listen.silos,
        listen.operators,
        listen.serverapp,
        *("--ssl-ca-certfile", str(federation.ca)),
        *("--ssl-certfile", str(tls / "server.pem")),
        *("--ssl-keyfile", str(tls / "server.key")),
        "--enable-supernode-auth",
        *superlink.NO_EXECUTOR,
        *("--superexec-auth-secret-file", str(secret)),
        *(database if federation.config.state.database else ()),
    )


def _program(name: str, command: list[str], federation: Federation) -> Program:
    own = {"COTERIE_RUNS": str(federation.runs), ENVIRONMENT: str(federation.folder)}
    return Program(
        name,
        command,
        log=federation.folder / "logs" / f"{name.lower()}.log",
        environment={**superlink.environment(federation.folder), **own},
    )


def _require_free(address: str) -> None:
    try:
        check_free(address)
    except OSError as error:
        raise refused(
            f"coterie cannot listen on {address}: {error.strerror}. Stop what listens there, or "
            "change it under [listen] in coterie.toml."
        ) from None
