"""Commands for operators: their keys, and their roles at a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.server.cli.options import FederationOption, folder_option
from coterie.system.commandline import JsonOption, YesOption, confirm, group

app = group(
    *("coterie operator", "Manage operators' keys and roles."),
    "coterie operator list --federation lung-study",
)

NameArgument = Annotated[str, typer.Argument(help="Name of the operator.")]
RoleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Role of the operator. run: start and stop runs. enrol: enrol, remove and erase "
        "silos. look: see silos, runs and logs, which every operator may. Can be repeated.",
    ),
]


@app.command(epilog="Example:  coterie operator init --name ada")
def init(
    name: Annotated[str, typer.Option(help="Name of the operator, for example ada.")],
    home: Annotated[
        Path | None,
        folder_option(
            "Folder for the key. [default: $COTERIE_OPERATOR, or ~/.coterie/operator]", "--home"
        ),
    ] = None,
) -> None:
    """Create an operator's key and enrolment request."""
    from coterie.server.site.people import print_init

    print_init(name, home)


@app.command(epilog="Example:  coterie operator enrol coterie-operator.… --role run")
def enrol(
    request: Annotated[
        list[str], typer.Argument(help="Enrolment request: the line that the operator sent.")
    ],
    role: RoleOption = None,
    federation: FederationOption = None,
) -> None:
    """Enrol an operator with these roles."""
    from coterie.server.site.federation import load
    from coterie.server.site.people import take_operator

    take_operator(load(federation), "".join(request), role or [])


@app.command("list", epilog="Example:  coterie operator list --federation lung-study")
def list_(federation: FederationOption = None, as_json: JsonOption = False) -> None:
    """List the operators and their roles."""
    from coterie.server.site.federation import load
    from coterie.server.site.people import print_operators

    print_operators(load(federation), as_json=as_json)


@app.command("set-roles", epilog="Example:  coterie operator set-roles ada --role run --role enrol")
def roles(name: NameArgument, role: RoleOption = None, federation: FederationOption = None) -> None:
    """Replace an operator's roles."""
    from coterie.server.site.federation import load
    from coterie.server.site.people import print_roles

    print_roles(load(federation), name, role or [])


@app.command(epilog="Example:  coterie operator remove ada --federation lung-study")
def remove(name: NameArgument, federation: FederationOption = None, yes: YesOption = False) -> None:
    """Revoke an operator's access, from the next call on."""
    confirm(f"Remove operator {name}? Their key is no longer accepted.", yes=yes)
    from coterie.server.site.federation import load
    from coterie.server.site.people import print_gone

    print_gone(load(federation), name)
