"""Operators of the coordinator, each with a key and roles, in ``operators.json``.

The coordinator's folder has its own key, ``operator.key``, which commands use when they are given
the folder: an account that can read it may do everything. Other operators need a key that is
enrolled here, and may do what its roles allow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.server.machine.signing import Identity
from coterie.server.paths import default_home, place
from coterie.server.site.certificates import private_key
from coterie.server.site.federation import Federation
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.system.files import LockedError, locked, make_folder, write_atomically
from coterie.wire import is_silo_name
from coterie.wire.enrolment import Request, fingerprint_of_key, public_pem

ROLES = {
    "run": "start and stop runs",
    "enrol": "enrol, remove and withdraw silos",
    "look": "see silos, runs and their logs",
}
"""Role → what it allows; every enrolled operator may look."""
ENVIRONMENT = "COTERIE_OPERATOR"
"""Variable with the folder of an operator's own key."""
LOCAL = "local"
"""Name of the operator who has the coordinator's folder."""
LIST, LOCK, LOCAL_KEY = "operators.json", "operators.lock", "operator.key"
LOCK_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Operator:
    """An operator who is, or was, enrolled; ``name`` is bound to ``key`` (public, PEM).

    ``enrolled`` and ``removed`` are ISO 8601, UTC; ``removed`` is empty while enrolled.
    """

    name: str
    key: str
    roles: tuple[str, ...]
    enrolled: str
    removed: str = ""

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint."""
        return fingerprint_of_key(self.key.encode())


def read(made: Federation) -> list[Operator]:
    """Return all operators by name, including removed ones.

    Raises ``FederationError`` if the file is damaged.
    """
    file = made.folder / LIST
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        found = [Operator(**{**one, "roles": tuple(one["roles"])}) for one in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _error(f"{file} cannot be read: {error}. Restore it from a backup.") from None
    return sorted(found, key=lambda one: (one.name, one.enrolled))


def find(made: Federation, name: str) -> Operator | None:
    """Return the operator enrolled under a name; ``LOCAL`` may do everything."""
    if name == LOCAL:
        key = public_pem(local_identity(made).key.public_key()).decode()
        return Operator(LOCAL, key, tuple(ROLES), "")
    return next((one for one in read(made) if one.name == name and not one.removed), None)


def enrol(made: Federation, request: Request, roles: Sequence[str]) -> Operator:
    """Bind a name to a key, with roles. Repeating the same request changes nothing.

    Raises ``FederationError`` if a role or name is invalid, the name belongs to another key, or the
    key was removed or belongs to another name.
    """
    chosen = _roles(roles)
    if not is_silo_name(request.name) or request.name == LOCAL:
        raise _error(f"an operator cannot be named {request.name!r}: choose another name.")
    new = Operator(request.name, request.key.decode(), chosen, _now())
    with _changing(made) as entries:
        for one in entries:
            if one.key == new.key and (one.removed or one.name != new.name):
                was = "was removed" if one.removed else f"is enrolled as {one.name!r}"
                raise _error(f"this key {was}. The operator must create another one.")
            if one.name == new.name and not one.removed:
                if one.key == new.key and one.roles == chosen:
                    return one
                raise _error(
                    f"operator {one.name!r} is enrolled already, with key {one.fingerprint} and "
                    f"roles {', '.join(one.roles)}. `coterie operator set-roles` changes roles; "
                    "before enrolling another key, run `coterie operator remove`."
                )
        entries.append(new)
    return new


def change_roles(made: Federation, name: str, roles: Sequence[str]) -> Operator:
    """Replace an operator's roles.

    Raises ``FederationError`` if no such operator is enrolled, or a role is unknown.
    """
    return _replace(made, name, roles=_roles(roles))


def remove(made: Federation, name: str) -> Operator:
    """Remove an operator, with effect from the next call.

    Raises ``FederationError`` if no such operator is enrolled.
    """
    return _replace(made, name, removed=_now())


def _replace(made: Federation, name: str, **changes: object) -> Operator:
    with _changing(made) as entries:
        here = [i for i, one in enumerate(entries) if one.name == name and not one.removed]
        if not here:
            known = ", ".join(one.name for one in entries if not one.removed) or "none"
            raise _error(f"no operator {name!r} is enrolled. Enrolled: {known}.")
        entries[here[0]] = changed = replace(entries[here[0]], **changes)  # type: ignore[arg-type]
    return changed


def _roles(roles: Sequence[str]) -> tuple[str, ...]:
    if not roles or set(roles) - ROLES.keys():
        known = "; ".join(f"{role}: {what}" for role, what in ROLES.items())
        raise _error(f"a role must be one of these. {known}. Got {', '.join(roles) or 'none'}.")
    return tuple(role for role in ROLES if role in roles)


# ---------------------------------------------------------------- keys


def local_identity(made: Federation) -> Identity:
    """Return the identity of the coordinator's folder; make its key when it is first needed.

    Raises ``FederationError`` if this account may not read it.
    """
    file = made.folder / LOCAL_KEY
    try:
        if not file.exists():
            with _locked(made):
                if not file.exists():
                    _write_key(file)
        return Identity(LOCAL, private_key(file))
    except OSError as error:
        raise _error(
            f"{file} cannot be read ({error.strerror}): only the coordinator's account may. "
            f"With your own key, name the coordinator with --superlink {made.control_address} "
            "--root-certificates CA."
        ) from None


def own_folder(given: Path | None = None) -> Path:
    """Return the folder of this account's key: as given, ``$COTERIE_OPERATOR``, or the default."""
    named = given or os.environ.get(ENVIRONMENT)
    return place(named) if named else default_home() / "operator"


def own_identity(folder: Path | None = None) -> Identity | None:
    """Return this account's identity, or None. Raises ``FederationError`` if it cannot be read."""
    where = own_folder(folder)
    try:
        name = json.loads((where / "operator.json").read_text(encoding="utf-8"))["name"]
        return Identity(str(name), private_key(where / "key.pem"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _error(f"the operator's key in {where} cannot be read: {error}.") from None


def make_identity(name: str, folder: Path | None = None) -> Identity:
    """Return this account's identity; make it if there is none.

    Raises ``FederationError`` if the name is invalid, or there is one with another name.
    """
    if not is_silo_name(name) or name == LOCAL:
        raise _error(
            "an operator's name must have 1 to 64 letters, digits, '.', '_' or '-', start with a "
            f"letter or digit, and not be {LOCAL!r}. Got {name!r}."
        )
    known = own_identity(folder)
    if known is None:
        where = own_folder(folder)
        make_folder(where, private=True)
        _write_key(where / "key.pem")
        write_atomically(where / "operator.json", json.dumps({"name": name}).encode())
        return Identity(name, private_key(where / "key.pem"))
    if known.name != name:
        raise _error(
            f"{own_folder(folder)} contains the key of {known.name!r}. Choose another folder "
            f"with --home or ${ENVIRONMENT}."
        )
    return known


def _write_key(file: Path) -> None:
    content = ec.generate_private_key(ec.SECP384R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    write_atomically(file, content, private=True)


# ---------------------------------------------------------------- the list


@contextmanager
def _changing(made: Federation) -> Iterator[list[Operator]]:
    """Yield the list; write it when the block ends without an error."""
    with _locked(made):
        entries = read(made)
        before = list(entries)
        yield entries
        if entries != before:
            content = json.dumps([asdict(one) for one in entries], indent=1).encode()
            write_atomically(made.folder / LIST, content)


@contextmanager
def _locked(made: Federation) -> Iterator[None]:
    try:
        with locked(made.folder, name=LOCK, deadline_s=LOCK_DEADLINE_S):
            yield
    except LockedError as error:
        raise _error(f"operators cannot be changed now: {error}.") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _error(text: str) -> FederationError:
    return FederationError(text, phase="operators", exit_code=EXIT_CONFIG)
