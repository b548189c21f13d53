"""Common behaviour of our command lines: one-line errors, and help without markup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from coterie.system import terminal
from coterie.system.files import explained
from coterie.system.ports import address_of, host_of

EXIT_CONFIG = 2


class MisuseError(Exception):
    """The command line cannot be executed; the message says what to type instead."""


class _Formatter(click.HelpFormatter):
    def write_dl(
        self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        # Where rich is installed, typer escapes brackets for it, also in plain help.
        plain = [(term, text.replace("\\[", "[")) for term, text in rows]
        super().write_dl(plain, col_max, col_spacing)


class _Context(click.Context):
    formatter_class = _Formatter


class Group(TyperGroup):
    """A command group that reports errors that a person can fix in one line.

    They have the attribute ``exit_code``; a subclass may add others in ``exit_status``.
    """

    context_class = _Context

    def exit_status(self, error: Exception) -> int | None:
        """Return the exit status for an error; None: it is a bug, shown in full."""
        known = isinstance(error, OSError | MisuseError)
        return EXIT_CONFIG if known else getattr(error, "exit_code", None)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, with our help format."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.context_class = _Context
        return command

    def main(self, *arguments: Any, **options: Any) -> Any:
        terminal.show_everything()
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            status = self.exit_status(error)
            if status is None or isinstance(error, BrokenPipeError):  # typer ends quietly then
                raise
            text = explained(error) if isinstance(error, OSError) else str(error)
            print(f"{ctx.command_path}: {text}", file=sys.stderr)
            ctx.exit(status)


def address_option(text: str, port: int) -> Any:
    """Return an option for the address of a SuperLink, with this default port."""
    read = _reading(lambda value: address_of(value, port))
    return typer.Option(metavar="HOST:PORT", help=text, callback=read)


def host_option(text: str, **more: Any) -> Any:
    """Return an option for an address to listen on."""
    return typer.Option(help=text, callback=_reading(host_of), **more)


def _reading(read: Callable[[str], str]) -> Callable[[str | None], str | None]:
    def callback(value: str | None) -> str | None:
        try:
            return read(value) if value else value
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from None

    return callback


MetricsOption = Annotated[
    str,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Address at which to serve metrics for Prometheus, at /metrics. Without HOST: to "
        "this machine only.",
    ),
]
LogFormatOption = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="Log format: text, or json (one object per line). [default: $COTERIE_LOG_FORMAT, or "
        "text]",
    ),
]


def given(context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the name and the spelling of every parameter that was given."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source and source.name != "DEFAULT":
            yield option.name or "", "/".join([*option.opts, *option.secondary_opts])
