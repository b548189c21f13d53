"""The ``coterie`` command. Each part is loaded when its command runs, to keep --help fast."""

from __future__ import annotations

from typing import Annotated

import click
import typer

from coterie.client.cli.main import app as silo
from coterie.server.cli import operator, people, runs, study
from coterie.system.commandline import Group

SECTIONS = {
    "Try and compare on this machine": ("", study.app),
    "Coordinate a federation": ("", operator.app),
    "Manage operators": ("operator", people.app),
    "Run a strategy": ("", runs.app),
    "Take part as a silo": ("silo", silo),
}
"""Sections of --help: title → the word before the commands, and the commands."""
MAX_SUMMARY = 100


class _Coterie(Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command in its section, including those of a silo."""
        for title, (word, part) in SECTIONS.items():
            group = typer.main.get_group(part)
            commands = {**({"": group} if word else {}), **group.commands}
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (f"{word} {name}".strip(), command.get_short_help_str(MAX_SUMMARY))
                        for name, command in commands.items()
                    ]
                )


app = typer.Typer(
    name="coterie",
    cls=_Coterie,
    help="Cross-silo federated learning that finds out which organisations should train together.",
    epilog="Start with:  coterie demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"coterie {version('coterie')}, Flower {version('flwr')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Show the versions of coterie and Flower and exit.",
        ),
    ] = False,
) -> None:
    pass


for _word, _part in SECTIONS.values():
    app.add_typer(_part, name=_word)


def main() -> None:
    """Run the command."""
    app(prog_name="coterie")
