"""Health checks of a coordinator, for ``coterie federation check``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coterie.server.machine.link import control
from coterie.server.machine.signing import Identity
from coterie.server.site import certificates, coordinator, operators
from coterie.server.site.database import damage_of
from coterie.server.site.federation import RENEW_BELOW_DAYS, Federation
from coterie.server.site.queue import Queue
from coterie.strategies.errors import FederationError
from coterie.system.files import UNKNOWN, held_by
from coterie.system.health import BAD, OK, WARNING, Finding, disk
from coterie.system.ports import listens
from coterie.wire import counted

SUPERLINK = "superlink"
LAST_DAYS = 3.0
"""Remaining days below which a certificate is bad."""


def findings(federation: Federation) -> Iterator[Finding]:
    """Check a federation whose folder is here; yield the findings."""
    yield _process(federation)
    identity = operators.local_identity(federation)
    yield superlink(federation.control_address, federation.ca, identity)
    yield _database(federation)
    yield disk(federation.folder)
    yield _certificate(
        federation.tls / "server.pem", "server", "a restart of `coterie superlink` renews it"
    )
    yield _certificate(federation.ca, "ca", "every silo must join again with a new bundle")
    yield _queue(federation)


def superlink(
    address: str, root_certificates: Path | None, identity: Identity | None = None
) -> Finding:
    """Check whether a SuperLink answers operators, and count its silos."""
    if not listens(address):
        return Finding(BAD, SUPERLINK, f"nothing listens at {address}")
    try:
        with control(address, root_certificates=root_certificates, identity=identity) as calls:
            nodes = [node for node in calls.nodes() if node.status != "unregistered"]
    except FederationError as error:
        return Finding(BAD, SUPERLINK, str(error))
    online = sum(node.status == "online" for node in nodes)
    return Finding(
        OK, SUPERLINK, f"answers at {address}; {online} of {counted(len(nodes), 'silo')} online"
    )


def _process(federation: Federation) -> Finding:
    holder = held_by(federation.folder, coordinator.LOCK)
    if holder is None:
        return Finding(BAD, "process", f"no `coterie superlink` serves {federation.folder}")
    text = "running" if holder == UNKNOWN else f"{holder}"
    return Finding(OK, "process", text)


def _database(federation: Federation) -> Finding:
    if not federation.config.state.database:
        return Finding(OK, "database", "in memory, as coterie.toml says")
    if not federation.database.exists():
        return Finding(WARNING, "database", f"{federation.database} is missing")
    damage = damage_of(federation.database)
    if damage:
        return Finding(BAD, "database", f"{federation.database} is damaged: {damage}")
    return Finding(
        OK, "database", f"{federation.database.stat().st_size / 1e6:.1f} MB, not damaged"
    )


def _certificate(file: Path, what: str, remedy: str) -> Finding:
    name = f"{what} cert"
    try:
        days = certificates.days_left(file)
    except (OSError, ValueError) as error:
        return Finding(BAD, name, f"{file} cannot be read: {error}")
    level = BAD if days < LAST_DAYS else WARNING if days < RENEW_BELOW_DAYS else OK
    text = f"{days:.0f} days left" if days >= 0 else f"expired {-days:.0f} days ago"
    return Finding(level, name, text if level == OK else f"{text}: {remedy}")


def _queue(federation: Federation) -> Finding:
    try:
        waiting = len(Queue(federation.folder).waiting())
    except FederationError as error:
        return Finding(BAD, "queue", str(error))
    return Finding(OK, "queue", f"{waiting} run{'s' * (waiting != 1)} waiting")
