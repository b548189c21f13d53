"""What the commands that install units have in common: options, and what is said."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coterie.system.services import Service


class Action(StrEnum):
    """What to do with a unit."""

    INSTALL = "install"
    UNINSTALL = "uninstall"


ActionArgument = Annotated[Action, typer.Argument(help="install or uninstall.", metavar="ACTION")]
UserOption = Annotated[
    bool, typer.Option("--user", help="A service of your own, which needs no root.")
]
AccountOption = Annotated[
    str,
    typer.Option(help="Account to run under. [default: the owner of the folder]"),
]
NameOption = Annotated[
    str, typer.Option(help="Name of the unit. [default: made from the folder's or silo's]")
]
UnitsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the unit to this folder. [default: systemd's]",
        file_okay=False,
    ),
]


def carry_out(
    action: Action, unit: Service, *, user: bool, account: str, units: Path | None
) -> None:
    """Install or uninstall, and say what to type next."""
    from coterie.system.services import install, uninstall

    if action is Action.INSTALL:
        file, following = install(unit, user=user, account=account, units=units)
        print(f"The unit is in {file}. It starts when you type:")
    else:
        file, following = uninstall(unit.name, user=user, units=units)
        print(f"{file} is removed. Stop what still runs with:")
    print(*(f"  {line}" for line in following), sep="\n")
