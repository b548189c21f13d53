"""Enrolled silos: the operator's list of names and keys, and its copy at the SuperLink.

``roster.json`` is authoritative. The SuperLink's table of nodes follows it whenever one of the two
changes or the SuperLink starts, so a lost database loses no silo. A removed key stays in the list:
it is never accepted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from coterie.engine.control import Node
from coterie.features.secure.protocol import signed_by_ca
from coterie.features.secure.sums import Voucher
from coterie.server.machine.link import Control
from coterie.server.site import certificates
from coterie.server.site.register import Keyed, Register
from coterie.strategies.errors import refused
from coterie.system.processes import utc_now
from coterie.wire.enrolment import Request


@dataclass(frozen=True)
class Entry(Keyed):
    """A silo. ``node_id``: Flower's id of its key; 0 until the SuperLink knows it."""

    node_id: int = 0


def _register(file: Path) -> Register[Entry]:
    return Register(file, Entry, "silo")


def read(file: Path) -> list[Entry]:
    """Return all entries by name, including removed ones; see ``Register.read``."""
    return _register(file).read()


def names_by_node(file: Path) -> Mapping[int, str]:
    """Return node id → name of every silo that is enrolled now."""
    return {e.node_id: e.name for e in read(file) if e.node_id and not e.removed}


def vouchers(file: Path, tls: Path) -> Mapping[str, Voucher]:
    """Return name → voucher of every silo that is enrolled now.

    ``tls`` is the folder with the CA, which signs that the key is this silo's.
    """
    return {
        one.name: Voucher(
            one.key.encode(), certificates.sign(tls, signed_by_ca(one.name, one.key.encode()))
        )
        for one in read(file)
        if not one.removed
    }


def enrol(file: Path, request: Request) -> Entry:
    """Bind a name to a key. Repeating the same request changes nothing.

    Raises:
        FederationError: the name belongs to another key, or the key to another name or a removed
            silo.
    """
    register, new = _register(file), Entry(request.name, request.key.decode(), utc_now())
    with register.changing() as entries:
        for entry in entries:
            if entry.key == new.key and entry.removed:
                raise refused(
                    f"this key was removed on {entry.removed[:10]}, and a removed key is never "
                    "accepted again. The silo creates a new one with `coterie silo init --name "
                    "NAME --new-key`."
                )
            if entry.key == new.key and entry.name != new.name:
                raise refused(f"this key is enrolled already, as {entry.name!r}.")
            if entry.name == new.name and not entry.removed:
                if entry.key == new.key:
                    return entry
                raise refused(
                    f"the name {new.name!r} belongs to another key ({entry.fingerprint}). "
                    f"Choose another name, or run `coterie members remove {new.name}` first."
                )
        entries.append(new)
    return new


def remove(file: Path, name: str) -> Entry:
    """Remove a silo from the list. Raises ``FederationError`` if no such silo is enrolled."""
    return _register(file).change(name, removed=utc_now())


def sync(file: Path, superlink: Control) -> dict[str, Node]:
    """Make the SuperLink accept only the keys of the list; return name → node of the enrolled."""
    with _register(file).changing() as entries:
        known = {node.key: node for node in superlink.nodes()}
        wanted = {entry.key for entry in entries if not entry.removed}
        for key, node in known.items():
            if key not in wanted and node.status != "unregistered":
                superlink.unregister(node.node_id)
        for number, entry in enumerate(entries):
            if not entry.removed and entry.key not in known:
                node_id = superlink.register(entry.key.encode())
                known[entry.key] = Node(node_id, entry.key, "registered")
            node_id = known[entry.key].node_id if entry.key in known else entry.node_id
            entries[number] = replace(entry, node_id=node_id)
        return {entry.name: known[entry.key] for entry in entries if not entry.removed}
