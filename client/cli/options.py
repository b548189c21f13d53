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
    option("KEY=VALUE", "Set an option of the task, e.g. data=/folder. Can be repeated.", "--set"),
]
PatienceOption = Annotated[
    float, option("SECONDS", "Give up if the SuperLink cannot be reached for this long.")
]
MetricsOption = Annotated[
    str,
    option(
        "[HOST:]PORT",
        "Serve numbers for Prometheus there, at /metrics. Without HOST to this machine alone.",
    ),
]
LogFormatOption = Annotated[
    str,
    option(
        "FORMAT",
        "How to log: text, or json (one object a line). [default: $COTERIE_LOG_FORMAT, or text]",
    ),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Log every message.")]
AppOption = Annotated[
    str,
    option(
        "MODULE:ATTRIBUTE",
        "A Flower ClientApp that is installed here, in place of the task. See "
        "docs/how-to/flower-app.md.",
    ),
]
ModOption = Annotated[
    list[str] | None,
    option("MODULE:ATTRIBUTE", "With --app: a Flower mod around the app. Can be repeated."),
]
