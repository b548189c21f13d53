"""The work and messages of ``coterie operator``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from coterie.server.site import audit, operators
from coterie.server.site.federation import Federation
from coterie.strategies.errors import refused
from coterie.system.commandline import print_json
from coterie.system.files import write_atomically
from coterie.system.terminal import print_table
from coterie.system.tokens import new_token
from coterie.wire import enrolment


def print_init(name: str, folder: Path | None) -> None:
    """Make this account's key; print only its request on standard output."""
    made = operators.make_identity(name, folder)
    public = enrolment.public_pem(made.key.public_key())
    _aside(
        f"The key of operator {name} is in {operators.own_folder(folder)}. Its fingerprint: "
        f"{enrolment.fingerprint_of_key(public)}"
    )
    _aside(
        "Send this line to the coordinator's administrator, and compare the fingerprint with them:"
    )
    print(enrolment.make_request(name, made.key, kind=enrolment.OPERATOR))


def take_operator(made: Federation, text: str, roles: Sequence[str]) -> None:
    """Enrol an operator and print what they need.

    Raises ``FederationError`` if the request or a role is invalid.
    """
    try:
        request = enrolment.read_request(text, kind=enrolment.OPERATOR)
    except enrolment.EnrolmentError as error:
        raise refused(str(error)) from None
    facts = {"operator": request.name, "key": enrolment.fingerprint_of_key(request.key)}
    with audit.acting(made, "enrol operator", **facts, roles=", ".join(roles)):
        new = operators.enrol(made, request, roles)
    print(
        f"Operator {new.name} is enrolled and may {_may(new)}. Key fingerprint: {new.fingerprint}"
    )
    print("Compare it with the one that the operator sees. Send them the CA certificate:")
    print(f"  {made.ca}")
    print(
        "They call with: --superlink HOST:PORT --root-certificates ca.pem. Operators on other "
        "machines reach HOST:PORT only if [listen] operators allows it; now it is "
        f"{made.config.listen.operators}."
    )


def print_operators(made: Federation, *, as_json: bool = False) -> None:
    """Print everybody who is, or was, enrolled."""
    known = operators.read(made)
    if as_json:
        facts = ("name", "roles", "enrolled", "removed", "fingerprint")
        print_json([{name: getattr(one, name) for name in facts} for one in known])
        return
    if not known:
        print(
            "No operator is enrolled: every account that can read this federation's folder may "
            "do everything."
        )
        return
    header = ("operator", "roles", "enrolled", "key fingerprint")
    rows = []
    for one in known:
        roles = f"removed {one.removed[:10]}" if one.removed else ", ".join(one.roles)
        rows.append((one.name, roles, one.enrolled[:10], one.fingerprint))
    print_table(Console(highlight=False, soft_wrap=True), header, rows)


def print_roles(made: Federation, name: str, roles: Sequence[str]) -> None:
    """Change an operator's roles and report it. Raises ``FederationError`` as the change does."""
    with audit.acting(made, "change roles", operator=name, roles=", ".join(roles)):
        changed = operators.change_roles(made, name, roles)
    print(f"Operator {name} may {_may(changed)}, effective immediately.")


def print_gone(made: Federation, name: str) -> None:
    """Remove an operator and report it. Raises ``FederationError`` if there is none."""
    with audit.acting(made, "remove operator", operator=name):
        operators.remove(made, name)
    print(f"Operator {name} is removed, effective immediately.")


def web_token(made: Federation, *, new: bool = False) -> str:
    """Return the token of this federation's live page; make it when first needed."""
    file = made.folder / "web.token"
    if new or not file.exists():
        with audit.acting(made, "new web token"):
            write_atomically(file, new_token().encode(), private=True)
    return file.read_text().strip()


def _may(one: operators.Operator) -> str:
    return "; ".join(operators.ROLES[role] for role in one.roles)


def _aside(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
