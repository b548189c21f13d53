"""Enrolled silos: the operator's list of names and keys, and its copy at the SuperLink.

``roster.json`` is authoritative. The SuperLink's table of nodes follows it whenever one of the two
changes or the SuperLink starts, so a lost database loses no silo. A removed key stays in the list:
it is never accepted again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from coterie.engine.control import Node
from coterie.features.secure.protocol import signed_by_ca
from coterie.features.secure.sums import Voucher
from coterie.server.machine.link import Control
from coterie.server.site import certificates
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.system.files import LockedError, locked, write_atomically
from coterie.wire.enrolment import Request, fingerprint_of_key

LOCK_DEADLINE_S = 60.0
"""Time limit of one change of the list, including calls to the SuperLink."""


@dataclass(frozen=True)
class Entry:
    """A silo that is, or was, enrolled; ``name`` is bound to ``key`` (public, PEM).

    Attributes:
        enrolled: ISO 8601, UTC.
        removed: likewise, or empty.
        node_id: Flower's id of the key; 0 until the SuperLink knows it.
        voucher: the CA's signature that the key is this silo's, hexadecimal; empty if enrolled
            before vouchers existed.
    """

    name: str
    key: str
    enrolled: str
    removed: str = ""
    node_id: int = 0
    voucher: str = ""

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint."""
        return fingerprint_of_key(self.key.encode())


def read(file: Path) -> list[Entry]:
    """Read all entries by name, including removed ones.

    Raises ``FederationError`` if the file is damaged.
    """
    try:
        entries = [Entry(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise _enrolment_error(
            f"{file} cannot be read: {error}. Restore it from a backup."
        ) from None
    return sorted(entries, key=lambda entry: (entry.name, entry.enrolled))


def names_by_node(file: Path) -> Mapping[int, str]:
    """Return node id → name of every silo that is enrolled now."""
    return {e.node_id: e.name for e in read(file) if e.node_id and not e.removed}


def vouchers(file: Path, tls: Path) -> Mapping[str, Voucher]:
    """Return name → voucher of every silo that is enrolled now.

    ``tls`` is the folder with the CA, which signs entries that have none.
    """
    found = {}
    for entry in read(file):
        if not entry.removed:
            key = entry.key.encode()
            signature = (
                bytes.fromhex(entry.voucher)
                if entry.voucher
                else certificates.sign(tls, signed_by_ca(entry.name, key))
            )
            found[entry.name] = Voucher(key, signature)
    return found


def enrol(file: Path, request: Request, tls: Path | None = None) -> Entry:
    """Bind a name to a key. Repeating the same request changes nothing.

    ``tls`` is the folder with the CA; if given, the CA vouches for the key.

    Raises:
        FederationError: the name belongs to another key, or the key to another name or a removed
            silo.
    """
    key = request.key.decode()
    with _locked(file):
        entries = read(file)
        for entry in entries:
            if entry.key == key and entry.removed:
                raise _enrolment_error(
                    f"this key was removed on {entry.removed[:10]}, and a removed key is never "
                    "accepted again. The silo creates a new one with `coterie silo init --name "
                    "NAME --new-key`."
                )
            if entry.key == key and entry.name != request.name:
                raise _enrolment_error(f"this key is enrolled already, as {entry.name!r}.")
            if entry.name == request.name and not entry.removed:
                if entry.key == key:
                    return entry
                raise _enrolment_error(
                    f"the name {request.name!r} belongs to another key ({entry.fingerprint}). "
                    f"Choose another name, or run `coterie members remove {request.name}` first."
                )
        voucher = (
            certificates.sign(tls, signed_by_ca(request.name, request.key)).hex() if tls else ""
        )
        new = Entry(request.name, key, _now(), voucher=voucher)
        _write(file, [*entries, new])
        return new


def remove(file: Path, name: str) -> Entry:
    """Remove a silo from the list. Raises ``FederationError`` if no such silo is enrolled."""
    with _locked(file):
        entries = read(file)
        found = [e for e in entries if e.name == name and not e.removed]
        if not found:
            known = ", ".join(e.name for e in entries if not e.removed) or "no silo"
            raise _enrolment_error(f"no silo {name!r} is enrolled. Enrolled: {known}.")
        gone = replace(found[0], removed=_now())
        _write(file, [gone if e == found[0] else e for e in entries])
        return gone


def sync(file: Path, superlink: Control) -> dict[str, Node]:
    """Make the SuperLink accept only the keys of the list; return name → node of the enrolled."""
    with _locked(file):
        entries = read(file)
        known = {node.key: node for node in superlink.nodes()}
        wanted = {entry.key for entry in entries if not entry.removed}
        for key, node in known.items():
            if key not in wanted and node.status != "unregistered":
                superlink.unregister(node.node_id)
        synced = []
        for entry in entries:
            if not entry.removed and entry.key not in known:
                node_id = superlink.register(entry.key.encode())
                known[entry.key] = Node(node_id, entry.key, "registered")
            node_id = known[entry.key].node_id if entry.key in known else entry.node_id
            synced.append(replace(entry, node_id=node_id))
        if synced != entries:
            _write(file, synced)
        return {entry.name: known[entry.key] for entry in synced if not entry.removed}


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Allow one writer at a time; the lock ends with its process.

    Raises ``FederationError`` if another process holds it for longer than the deadline.
    """
    try:
        with locked(file.parent, name=f"{file.stem}.lock", deadline_s=LOCK_DEADLINE_S):
            yield
    except LockedError as error:
        raise _enrolment_error(
            f"{file} cannot be changed: another command has been changing it for more than "
            f"{LOCK_DEADLINE_S:.0f} s ({error}). Stop that process, and try again."
        ) from None


def _write(file: Path, entries: Sequence[Entry]) -> None:
    write_atomically(file, json.dumps([asdict(entry) for entry in entries], indent=1).encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _enrolment_error(text: str) -> FederationError:
    return FederationError(text, phase="enrolment", exit_code=EXIT_CONFIG)
