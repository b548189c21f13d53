"""Common behaviour of our command lines: one-line errors, JSON, plain help."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import click
import typer
from typer.core import TyperGroup

from coterie.system import terminal
from coterie.system.files import explained
from coterie.system.ports import address_of, host_of

EXIT_CONFIG, EXIT_LINK = 2, 5
EVERYWHERE = {"-q": "quiet", "--quiet": "quiet", "-v": "verbose", "--verbose": "verbose"}
EVERYWHERE |= {"--no-progress": "still"}
"""Options of every command → the attribute of ``terminal.shown`` that they set."""
COLOR = "--color"
When = StrEnum("When", ["auto", "always", "never"])


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

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "help_option_names": ["-h", "--help"]})


class Group(TyperGroup):
    """A command group that reports errors that a person can fix in one line.

    They have the attribute ``exit_code``; a subclass may add others in ``exit_status``.

    Attributes:
        spelled: another spelling of a command → ours, below this group.
    """

    context_class = _Context
    spelled: ClassVar[Mapping[str, str]] = {"enroll": "enrol"}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for command in self.commands.values():
            command.context_class = _Context

    def exit_status(self, error: Exception) -> int | None:
        """Return the exit status for an error; None: it is a bug, shown in full."""
        known = isinstance(error, OSError | MisuseError)
        return EXIT_CONFIG if known else getattr(error, "exit_code", None)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by any of its spellings."""
        for number in (2, 1):
            now = self.spelled.get(" ".join(args[:number]), "")
            if now.partition(" ")[0] in self.commands:
                args = [*now.split(), *args[number:]]
                break
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or isinstance(command, click.Group):
            return name, command, rest
        return name, command, list(_own_options(command, rest))

    def main(self, *arguments: Any, **options: Any) -> Any:
        terminal.show_everything()
        vars(terminal.shown).update(quiet=False, verbose=False, still=False)
        if "_COTERIE_COMPLETE" in os.environ:
            from typer._completion_classes import completion_init

            completion_init()
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _with_home(error) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            status = self.exit_status(error)
            if status is None or isinstance(error, BrokenPipeError):  # typer ends quietly then
                raise
            text = explained(error) if isinstance(error, OSError) else str(error)
            print(f"coterie: {text}", file=sys.stderr)
            ctx.exit(status)


def _with_home(error: click.UsageError) -> click.UsageError:
    """Return the error; for a folder that is given by itself, it names the option."""
    options = [] if error.ctx is None else [o for p in error.ctx.command.params for o in p.opts]
    if "--home" in options and "unexpected extra argument" in error.message:
        hint = ". To name a silo's folder, use --home FOLDER"
        error.message = error.message.removesuffix(hint) + hint
    return error


def _own_options(command: click.Command, arguments: Sequence[str]) -> Iterator[str]:
    """Yield a command's arguments; ``EVERYWHERE`` and ``COLOR`` take effect here."""
    known = {name for one in command.params for name in one.opts}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument == "--":
            yield from (argument, *rest)
        elif argument in EVERYWHERE and argument not in known:
            setattr(terminal.shown, EVERYWHERE[argument], True)
        elif name == COLOR:
            when = value if equals else next(rest, "")
            if when not in [*When]:
                raise click.BadParameter(
                    f"{when!r} is not one of {', '.join(When)}.", None, None, COLOR
                )
            terminal.use_color(when)
        else:
            yield argument


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text.")
]
YesOption = Annotated[
    bool,
    typer.Option(
        "--yes", "-y", help="Do not ask for confirmation. Required where there is no terminal."
    ),
]


def print_json(document: Any) -> None:
    """Print a document; see ``plain``."""
    print(json_text(document), flush=True)


def json_text(document: Any) -> str:
    """Return ``plain`` values as JSON."""
    return json.dumps(plain(document), indent=1, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: a dataclass is an object, an infinite number is null."""
    if is_dataclass(value):
        value = {one.name.replace("_", "-"): getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone.

    Raises:
        MisuseError: there is no terminal at which to ask, and ``yes`` is not given.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise MisuseError(f"{question} There is no terminal at which to ask: add --yes.")
    typer.confirm(question, abort=True)


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
        "--metrics-address",
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


def given_before(context: click.Context) -> None:
    """Raise ``MisuseError`` for an option before a command of a group that also does something."""
    for _, hint in given(context):
        path = f"{context.command_path} {context.invoked_subcommand}"
        raise MisuseError(f"{hint} stands before a command: `{path} --help` lists its options.")


def group(name: str, text: str, example: str, kind: type[Group] = Group) -> typer.Typer:
    """Return a group of commands, which without one prints its help."""
    return typer.Typer(
        name=name,
        cls=kind,
        help=text,
        epilog=f"Example:  {example}",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
