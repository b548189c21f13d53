"""Operators of the coordinator, each with a key and roles, in ``operators.json``.

The coordinator's folder has its own key, ``operator.key``, which commands use when they are given
the folder: an account that can read it may do everything. Other operators need a key that is
enrolled here, and may do what its roles allow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from coterie.server.machine.signing import Identity
from coterie.server.paths import default_home, place
from coterie.server.site.certificates import private_key
from coterie.server.site.federation import Federation
from coterie.server.site.register import Keyed, Register
from coterie.strategies.errors import refused
from coterie.system import keys
from coterie.system.files import make_folder, write_atomically
from coterie.system.processes import utc_now
from coterie.wire import is_silo_name
from coterie.wire.enrolment import Request, public_pem

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
LIST, LOCAL_KEY = "operators.json", "operator.key"


@dataclass(frozen=True)
class Operator(Keyed):
    """An operator, with roles."""

    roles: Sequence[str] = ()


def _register(made: Federation) -> Register[Operator]:
    return Register(made.folder / LIST, Operator, "operator")


def read(made: Federation) -> list[Operator]:
    """Return all operators by name, including removed ones; see ``Register.read``."""
    return _register(made).read()


def find(made: Federation, name: str) -> Operator | None:
    """Return the operator enrolled under a name; ``LOCAL`` may do everything."""
    if name == LOCAL:
        key = public_pem(local_identity(made).key.public_key()).decode()
        return Operator(LOCAL, key, "", roles=[*ROLES])
    return next((one for one in read(made) if one.name == name and not one.removed), None)


def enrol(made: Federation, request: Request, roles: Sequence[str]) -> Operator:
    """Bind a name to a key, with roles. Repeating the same request changes nothing.

    Raises ``FederationError`` if a role or name is invalid, the name belongs to another key, or the
    key was removed or belongs to another name.
    """
    chosen = _roles(roles)
    if not is_silo_name(request.name) or request.name == LOCAL:
        raise refused(f"an operator cannot be named {request.name!r}: choose another name.")
    new = Operator(request.name, request.key.decode(), utc_now(), roles=chosen)
    with _register(made).changing() as entries:
        for one in entries:
            if one.key == new.key and (one.removed or one.name != new.name):
                was = "was removed" if one.removed else f"is enrolled as {one.name!r}"
                raise refused(f"this key {was}. The operator must create another one.")
            if one.name == new.name and not one.removed:
                if one.key == new.key and one.roles == chosen:
                    return one
                raise refused(
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
    return _register(made).change(name, roles=_roles(roles))


def remove(made: Federation, name: str) -> Operator:
    """Remove an operator, with effect from the next call.

    Raises ``FederationError`` if no such operator is enrolled.
    """
    return _register(made).change(name, removed=utc_now())


def _roles(roles: Sequence[str]) -> tuple[str, ...]:
    if not roles or set(roles) - ROLES.keys():
        known = "; ".join(f"{role}: {what}" for role, what in ROLES.items())
        raise refused(f"a role must be one of these. {known}. Got {', '.join(roles) or 'none'}.")
    return tuple(role for role in ROLES if role in roles)


# ---------------------------------------------------------------- keys


def local_identity(made: Federation) -> Identity:
    """Return the identity of the coordinator's folder; make its key when it is first needed.

    Raises ``FederationError`` if this account may not read it.
    """
    file = made.folder / LOCAL_KEY
    try:
        if not file.exists():
            with _register(made).locked():
                if not file.exists():
                    _write_key(file)
        return Identity(LOCAL, private_key(file))
    except OSError as error:
        raise refused(
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
        raise refused(f"the operator's key in {where} cannot be read: {error}.") from None


def make_identity(name: str, folder: Path | None = None) -> Identity:
    """Return this account's identity; make it if there is none.

    Raises ``FederationError`` if the name is invalid, or there is one with another name.
    """
    if not is_silo_name(name) or name == LOCAL:
        raise refused(
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
        raise refused(
            f"{own_folder(folder)} contains the key of {known.name!r}. Choose another folder "
            f"with --home or ${ENVIRONMENT}."
        )
    return known


def _write_key(file: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    write_atomically(file, keys.private_pem(key), private=True)
