"""The ``coterie`` command. Each part is loaded when its command runs, to keep --help fast."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from enum import StrEnum
from typing import Annotated, ClassVar

import click
import typer
from typer.models import TyperInfo

from coterie.client.cli.main import app as silo
from coterie.server.cli import operator, people, runs, study
from coterie.system.commandline import Group, When
from coterie.system.terminal import shown, use_color

completion = typer.Typer()
Shell = StrEnum("Shell", ["bash", "zsh", "fish"])
SECTIONS = {
    "Try and compare on this machine": {"": study.app},
    "Run a strategy": {"": runs.app, "runs": runs.recorded},
    "Coordinate a federation": {"federation": operator.federation_app, "": operator.app},
    "Manage the federation's silos": {"members": operator.members},
    "Manage operators": {"operator": people.app},
    "Take part as a silo": {"silo": silo},
    "Other": {"": completion},
}
"""Sections of --help: title → the word before the commands, and the commands."""
MAX_SUMMARY = 100
GARBAGE = 200_000
"""Objects after which `coterie run` looks for garbage: more than its imports make, which are none.
Other commands may hold models in garbage."""
EXIT_CODES = (
    "Exit codes: 0 done; 1 negative answer, such as a warning; 2 wrong usage or settings; "
    "3 a run failed; 4 too few silos; 5 no connection."
)


class _Coterie(Group):
    spelled: ClassVar[Mapping[str, str]] = {
        "enroll": "members enrol",
        "run resume": "run --resume",
        "run continue": "run --continue",
    }

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command in its section, including those of a silo."""
        for title, parts in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (f"{word} {name}".strip(), command.get_short_help_str(MAX_SUMMARY))
                        for word, part in parts.items()
                        for name, command in _commands(word, typer.main.get_group(part))
                    ]
                )


def _commands(word: str, group: click.Group) -> Iterator[tuple[str, click.Command]]:
    yield from [("", group)] if word else []
    yield from group.commands.items()


app = typer.Typer(
    name="coterie",
    cls=_Coterie,
    help="Cross-silo federated learning that finds out which organisations should train together.",
    epilog="Options can also follow the command, as in `coterie demo -q`.\n\n"
    f"Start with:  coterie demo\n\n{EXIT_CODES}",
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
            "-V",
            is_eager=True,
            callback=_print_version,
            help="Show the versions of coterie and Flower and exit.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only results and errors.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print more about the progress of a run.")
    ] = False,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="Print lines instead of a display that moves.")
    ] = False,
    color: Annotated[
        When, typer.Option(metavar="WHEN", help="Colour: always, never, or auto (terminals).")
    ] = When.auto,
) -> None:
    use_color(color)
    shown.quiet, shown.verbose, shown.still = quiet, verbose, no_progress


@completion.command("completion", epilog="Example:  coterie completion bash >> ~/.bashrc")
def complete(shell: Annotated[Shell, typer.Argument(help="Shell: bash, zsh or fish.")]) -> None:
    """Print the script that completes commands and options in a shell."""
    from typer._completion_shared import get_completion_script

    variable = "_COTERIE_COMPLETE"
    print(get_completion_script(prog_name="coterie", complete_var=variable, shell=shell.value))


for _parts in SECTIONS.values():
    for _word, _part in _parts.items():
        app.add_typer(_part, name=_word)


def main() -> None:
    """Run the command.

    To make the options of every command takes as long as to read a run's settings, so a word that
    is a command leaves the other parts out.
    """
    asked, word = copy(app), "".join(sys.argv[1:2])
    if word == "run":
        gc.set_threshold(GARBAGE)
    asked.registered_groups = [one for one in app.registered_groups if word in _words(one)]
    (asked if asked.registered_groups else app)(prog_name="coterie")


def _words(part: TyperInfo) -> Sequence[str]:
    """Return the words with which a part's commands begin."""
    if part.name:
        return [part.name]
    own = part.typer_instance.registered_commands if part.typer_instance else []
    return [str(one.name or getattr(one.callback, "__name__", "")) for one in own]
