"""``coterie superlink`` of a federation: TLS, enrolled silos only, and it outlives a crash.

Two processes are kept alive: the SuperLink, and the executor that starts ServerApps. A ServerApp
is not the SuperLink's child, so with the database on a run carries on while a crashed SuperLink
is restarted.
"""

from __future__ import annotations

import os
import secrets
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from coterie.server.machine import superlink
from coterie.server.machine.link import Node, control
from coterie.server.site import enrolled, operators
from coterie.server.site.federation import ENVIRONMENT, Federation
from coterie.server.site.metrics import Collector
from coterie.server.site.steward import Steward
from coterie.strategies.errors import FederationError, refused
from coterie.system import logs
from coterie.system.exposition import Exposition
from coterie.system.files import LockedError, held_by, locked, write_atomically
from coterie.system.ports import check_free, listens
from coterie.system.processes import Program, noting_signals

STOP_DEADLINE_S = 10.0
LOOK_S = 0.2
LOCK = "superlink.lock"
CHECK_S, CHECK_SHARE = 15.0, 0.01
"""Least seconds between two looks at the database for damage, and the share of time they take."""
DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ")
"""SQLite's names for what a truncated or overwritten file gives."""


def answers(federation: Federation) -> bool:
    """Whether something listens where the SuperLink takes operators."""
    return listens(federation.control_address)


def tell_superlink(federation: Federation) -> dict[str, Node]:
    """Make the running SuperLink follow the roster; return name → node."""
    with control(
        federation.control_address,
        root_certificates=federation.ca,
        identity=operators.local_identity(federation),
    ) as calls:
        return enrolled.sync(federation.roster, calls)


def serve(federation: Federation, say: Callable[[str], None]) -> int:
    """Run the SuperLink in the foreground until SIGTERM, SIGHUP or Ctrl-C; return the exit status.

    Raises:
        FederationError: a port is taken, the SuperLink does not start, or another process serves
            this folder already.
    """
    try:
        with locked(federation.folder, name=LOCK):
            return _serve(federation, say)
    except LockedError:
        process = held_by(federation.folder, LOCK)
        raise refused(
            f"{federation.folder} is served already, by process {process}. Two coordinators would "
            "ruin its state: stop that one first, or give this one a folder of its own."
        ) from None


def _serve(federation: Federation, say: Callable[[str], None]) -> int:
    operators.local_identity(federation)  # commands in other containers may only read it
    reason = federation.renew_certificate()
    if reason:
        say(f"The server's certificate was renewed: {reason}.")
    listen = federation.config.listen
    for address in (listen.silos, listen.operators, listen.serverapp):
        _require_free(address)
    if federation.config.monitoring.metrics:
        _require_free(federation.config.monitoring.metrics, "[monitoring]")
    secret = federation.folder / "executor.secret"
    if not secret.exists():
        write_atomically(secret, secrets.token_bytes(32), private=True)
    shared = ("--superexec-auth-secret-file", str(secret), "--parent-pid", str(os.getpid()))
    started = superlink.executor_command(listen.serverapp, *shared)
    link = _program("SuperLink", _superlink_command(federation, secret), federation)
    executor = _program("executor", started, federation)
    with ExitStack() as looking, noting_signals() as stopped:
        try:
            set_aside_if_damaged(federation, say)
            link.start()
            superlink.wait_until_it_answers(link, [federation.control_address], stopped)
            tell_superlink(federation)
            executor.start()
            steward = looking.enter_context(Steward(federation, say))
            programs = {"superlink": link, "runs": executor}
            looking.enter_context(_exposed(federation, Collector(federation, steward, programs)))
            _greet(federation, say)
            due = time.monotonic() + CHECK_S
            while not stopped():
                time.sleep(LOOK_S)
                if time.monotonic() >= due:
                    looked = time.monotonic()
                    if damage_of(federation.database):
                        link.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGTERM)
                    took_s = time.monotonic() - looked
                    due = time.monotonic() + max(CHECK_S, took_s / CHECK_SHARE)
                if link.ended:
                    set_aside_if_damaged(federation, say)
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


def damage_of(database: Path) -> str:
    """What is wrong with the SuperLink's database; empty if nothing is, or there is none."""
    if not database.exists():
        return ""
    try:
        with closing(
            sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=1)
        ) as opened:
            (found,) = opened.execute("PRAGMA quick_check(1)").fetchone()
            return "" if found == "ok" else str(found)
    except sqlite3.DatabaseError as error:
        damaged = getattr(error, "sqlite_errorname", "").startswith(DAMAGE)
        return str(error) if damaged else ""  # else it is busy, or may not be read now


def set_aside_if_damaged(federation: Federation, say: Callable[[str], None]) -> None:
    """Give the SuperLink a new database if its own is damaged.

    Who is enrolled is in the roster, where runs stand is in their checkpoints.
    """
    database = federation.database
    damage = damage_of(database)
    if not damage:
        return
    aside = database.with_name(f"{database.name}.damaged-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    for suffix in ("-wal", "-shm", ""):
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    say(
        f"The SuperLink's database was damaged ({damage}) and is now {aside}. It begins with a new "
        "one. Silos come back by themselves; a run that was going on is resumed with "
        "`coterie run --resume RUN`."
    )


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
    if metrics := federation.config.monitoring.metrics:
        say(f"Metrics: http://{metrics}/metrics")
    if federation.is_open_to_operators_elsewhere:
        say(
            f"Operators' API listens on {federation.config.listen.operators}: operators elsewhere "
            "need a key that is enrolled here (`coterie operator`)."
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
    """Numbers for Prometheus while this is open, if the federation wants them."""
    address = federation.config.monitoring.metrics
    return Exposition(address, collect) if address else nullcontext()


def _require_free(address: str, section: str = "[listen]") -> None:
    try:
        check_free(address)
    except OSError as error:
        raise refused(
            f"coterie cannot listen on {address}: {error.strerror}. Stop what listens there, or "
            f"change it under {section} in coterie.toml."
        ) from None
