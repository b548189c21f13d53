"""``coterie superlink`` of a federation: TLS, enrolled silos only, restarts after crashes.

It keeps two processes alive: the SuperLink, and the executor that starts ServerApps. A ServerApp is
not a child of the SuperLink, so with the database a run continues while a crashed SuperLink is
restarted.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from coterie.engine.control import Node
from coterie.server.machine import superlink
from coterie.server.machine.link import control
from coterie.server.paths import ENVIRONMENT
from coterie.server.site import certificates, enrolled, operators
from coterie.server.site.database import compact, damage_of, set_aside_if_damaged
from coterie.server.site.federation import Federation
from coterie.server.site.metrics import Collector
from coterie.server.site.steward import Steward
from coterie.strategies.errors import FederationError, refused
from coterie.system import keys, logs
from coterie.system.exposition import Exposition
from coterie.system.files import LockedError, held_by, locked, write_atomically
from coterie.system.ports import check_free, listens
from coterie.system.processes import Program, noting_signals, raise_open_files

STOP_DEADLINE_S = 10.0
LOOK_S = 0.2
LOCK = "superlink.lock"
OPEN_FILES, FEW_FILES = 65_536, 10_000
"""Files and connections requested for the SuperLink, and the number below which it warns: 1,500
idle connections, which anybody can open, end a run if only 1,024 are allowed."""
CHECK_S, CHECK_SHARE = 15.0, 0.01
"""Least seconds between two checks of the database for damage, and their largest share of time."""
COMPACT_S = 60.0
"""Interval of checks whether the database can shrink, while no run is active."""


def answers(federation: Federation) -> bool:
    """Return whether something listens at the SuperLink's address for operators."""
    return listens(federation.control_address)


def sync_superlink(federation: Federation) -> dict[str, Node]:
    """Apply the roster to the running SuperLink; return name → node."""
    with control(
        federation.control_address,
        root_certificates=federation.ca,
        identity=operators.local_identity(federation),
    ) as calls:
        return enrolled.sync(federation.roster, calls)


def serve(federation: Federation, say: Callable[[str], None]) -> int:
    """Run the SuperLink in the foreground until SIGTERM, SIGHUP or Ctrl-C; return the exit status.

    Raises ``FederationError`` if a port is taken, the SuperLink does not start, or another process
    serves this folder already.
    """
    try:
        with locked(federation.folder, name=LOCK):
            return _serve(federation, say)
    except LockedError:
        process = held_by(federation.folder, LOCK)
        raise refused(
            f"process {process} already serves {federation.folder}. Two coordinators would "
            "corrupt its state: stop that process, or use a different folder."
        ) from None


def _serve(federation: Federation, say: Callable[[str], None]) -> int:
    operators.local_identity(federation)  # commands in other containers may only read it
    allowed = raise_open_files(OPEN_FILES)
    if allowed < FEW_FILES:
        say(
            f"Only {allowed:,} files and connections may be open here, so idle connections can "
            f"end a run. Allow {OPEN_FILES:,}: `ulimit -n`, or LimitNOFILE in a systemd unit."
        )
    reason = federation.renew_certificate()
    if reason:
        say(f"The server certificate was renewed: {reason}.")
    _check_keys(federation, say)
    listen = federation.config.listen
    for address in (listen.silos, listen.operators, listen.serverapp):
        _require_free(address)
    if federation.config.monitoring.metrics_address:
        _require_free(federation.config.monitoring.metrics_address, "[monitoring]")
    secret = federation.folder / "executor.secret"
    if not secret.exists():
        write_atomically(secret, secrets.token_bytes(32), private=True)
    shared = ("--superexec-auth-secret-file", str(secret), "--parent-pid", str(os.getpid()))
    started = superlink.executor_command(listen.serverapp, *shared)
    link = _program("SuperLink", _superlink_command(federation, secret), federation)
    executor = _program("executor", started, federation)
    with ExitStack() as looking, noting_signals() as stopped:
        try:
            set_aside_if_damaged(federation.database, say)
            compact(federation.database, say, most=math.inf)
            link.start()
            superlink.wait_until_it_answers(link, [federation.control_address], stopped)
            sync_superlink(federation)
            executor.start()
            steward = looking.enter_context(Steward(federation, say))
            programs = {"superlink": link, "runs": executor}
            looking.enter_context(_exposed(federation, Collector(federation, steward, programs)))
            _greet(federation, say)
            due, compacting = time.monotonic() + CHECK_S, time.monotonic() + COMPACT_S
            while not stopped():
                time.sleep(LOOK_S)
                if time.monotonic() >= due:
                    looked = time.monotonic()
                    if damage_of(federation.database):
                        link.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGTERM)
                    took_s = time.monotonic() - looked
                    due = time.monotonic() + max(CHECK_S, took_s / CHECK_SHARE)
                if time.monotonic() >= compacting and steward.is_idle:
                    compact(federation.database, say)
                    compacting = time.monotonic() + COMPACT_S
                if link.ended:
                    set_aside_if_damaged(federation.database, say)
                if link.ended and link.restart(say, stopped):
                    _come_back(link, federation, say, stopped)
                if executor.ended:
                    executor.restart(say, stopped)
        finally:
            looking.close()
            for program in (executor, link):
                program.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGTERM)
    say("The SuperLink has ended.")
    return 0


def _check_keys(federation: Federation, say: Callable[[str], None]) -> None:
    """Reject keys that others may read; the CA's may be elsewhere until it signs a certificate.

    Raises:
        FederationError: names the key, and the remedy.
    """
    tls = federation.tls
    for file in (tls / "ca.key", tls / "server.key", federation.folder / operators.LOCAL_KEY):
        if file.exists():
            certificates.private_key(file)
        if text := keys.remark(file):
            say(f"WARNING: {text}")


def _come_back(
    link: Program, federation: Federation, say: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    """Wait for a restarted SuperLink; on failure only report, as a full disk may pass."""
    try:
        superlink.wait_until_it_answers(link, [federation.control_address], stopped)
        if not stopped():
            sync_superlink(federation)
            say("The SuperLink answers again.")
    except FederationError as error:
        say(str(error))


def _greet(federation: Federation, say: Callable[[str], None]) -> None:
    count = len(enrolled.names_by_node(federation.roster))
    silos, operators = ", ".join(federation.config.addresses), federation.control_address
    say(f"SuperLink: silos connect to {silos} (TLS, {count} enrolled), operators to {operators}")
    if metrics := federation.config.monitoring.metrics_address:
        say(f"Metrics: http://{metrics}/metrics")
    if federation.is_open_to_operators_elsewhere:
        say(
            f"The operators' API listens on {federation.config.listen.operators}: operators on "
            "other machines need a key enrolled here (`coterie operator`)."
        )


def _superlink_command(federation: Federation, secret: Path) -> list[str]:
    listen, tls = federation.config.listen, federation.tls
    database = ("--database", str(federation.database))
    return superlink.gated_command(
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
    own |= {logs.ENVIRONMENT: federation.config.monitoring.log_format}
    return Program(
        name,
        command,
        log=federation.folder / "logs" / f"{name.lower()}.log",
        environment={**superlink.environment(federation.folder), **own},
    )


def _exposed(federation: Federation, collect: Collector) -> AbstractContextManager[object]:
    """Return a context that serves numbers to Prometheus, if the federation wants that."""
    address = federation.config.monitoring.metrics_address
    return Exposition(address, collect) if address else nullcontext()


def _require_free(address: str, section: str = "[listen]") -> None:
    try:
        check_free(address)
    except OSError as error:
        raise refused(
            f"coterie cannot listen on {address}: {error.strerror}. Stop the process that "
            f"listens there, or change the address under {section} in coterie.toml."
        ) from None
