"""Options that several commands of a silo have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="FOLDER",
        help="The silo's folder. [default: $COTERIE_SILO, or the current folder]",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set an option of the task, e.g. data=/folder. Can be repeated.",
    ),
]
PatienceOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Give up if the SuperLink cannot be reached for this long."
    ),
]
PATIENCE_S = 600.0
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Log every message.")]
