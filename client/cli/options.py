"""Options shared by several commands of a silo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PATIENCE_S = 600.0


def option(metavar: str, text: str, *names: str, least: int | None = None) -> Any:
    """Return an option whose value is called ``metavar`` in the help."""
    return typer.Option(*names, metavar=metavar, help=text, min=least)


HomeOption = Annotated[
    Path | None,
    option("FOLDER", "The silo's folder. [default: $COTERIE_SILO, or the current folder]"),
]
SetOption = Annotated[
    list[str] | None,
    option(
        "KEY=VALUE",
        "Set an option of the task, for example data=/folder. Can be repeated.",
        "--set",
    ),
]
PatienceOption = Annotated[
    float,
    option(
        "SECONDS",
        "Time to keep trying to reach the SuperLink before giving up, in seconds.",
        "--retry-for",
    ),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Log every message.")]
AppOption = Annotated[
    str,
    option(
        "MODULE:ATTRIBUTE", "Flower ClientApp, installed on this machine, that replaces the task."
    ),
]
ModOption = Annotated[
    list[str] | None,
    option("MODULE:ATTRIBUTE", "With --app: Flower mod to wrap around the app. Can be repeated."),
]
