"""Keys of a run on a command line: as options and as ``--set KEY=VALUE``."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click
from typer.core import TyperCommand

from coterie.system import former_names
from coterie.system.commandline import MisuseError


class KeysCommand(TyperCommand):
    """A command whose options without a help text are keys of a run, which have the text.

    The keys are loaded only for this command's help, because that is slow. ``--task.NAME VALUE``,
    which only the task at the silos understands, becomes ``--set task.NAME=VALUE``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        found, rest = list[str](), iter(args)
        for argument in rest:
            if not argument.startswith("--task."):
                found.append(argument)
                continue
            key, equals, value = argument.removeprefix("--").partition("=")
            value = value if equals else next(rest, "")
            if not value:
                raise MisuseError(f"{argument} needs a value: {argument} VALUE.")
            found += ["--set", f"{key}={value}"]
        return super().parse_args(ctx, found)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from coterie.server.runs.config import all_keys, owners
        from coterie.strategies.rounds.options import dashed

        for option in self.params:
            key = all_keys().get(dashed(option.name or ""))
            if key is not None and getattr(option, "help", "") is None:
                whose = f"For {', '.join(owners()[key.name])}: " if key.name in owners() else ""
                option.help = whose + key.help  # type: ignore[attr-defined]
        super().format_options(ctx, formatter)


def keys_given(context: click.Context) -> dict[str, Any]:
    """Return the options of a ``KeysCommand`` that are keys, by name; None if not given."""
    names = [one.name or "" for one in context.command.params if getattr(one, "help", "") is None]
    return {name: context.params[name] for name in names}


def keys_of(
    settings: Sequence[str] | None,
    options: Mapping[str, Any] | None = None,
    strategy: str | None = None,
) -> dict[str, Any]:
    """Return keys and values as ``RunConfig.read`` takes them.

    Args:
        settings: ``KEY=VALUE`` each; they override options.
        options: keys that are options of the command, by name; None: not given.
        strategy: the run's, if the command names one.

    Raises:
        MisuseError: a setting has another form.
    """
    from coterie.server.runs.config import key_named
    from coterie.strategies.rounds.options import dashed

    def is_text(name: str) -> bool:
        key = key_named(name, strategy or "")
        return key is not None and isinstance(key.default, str) and not key.takes_numbers

    given = {dashed(name): value for name, value in (options or {}).items() if value is not None}
    keys = {
        key: _value(value) if isinstance(value, str) and not is_text(key) else value
        for key, value in given.items()
    }
    for setting in settings or ():
        given_key, equals, value = setting.partition("=")
        if not equals or not given_key:
            raise MisuseError(f"--set takes KEY=VALUE. Got {setting!r}.")
        (key,) = former_names.of_today({given_key: value}, former_names.RUN_KEYS)
        read = _value(value)
        # A text stays as it was typed, even if it looks like a number: the id of a run.
        keys[key] = value if not isinstance(read, str) and is_text(key) else read
    return _with_folder(keys)


def _value(text: str) -> Any:
    """Parse a value as Flower does: numbers and booleans in TOML, anything else is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _with_folder(keys: dict[str, Any]) -> dict[str, Any]:
    """Make ``baseline-run`` absolute if it is a folder here, because the coordinator's differs.

    Anything else is a name or an id for the coordinator to look up.
    """
    from coterie.server.paths import place

    folder = place(str(keys.get("baseline-run", "")))
    if "baseline-run" in keys and (folder / "run.json").exists():
        return keys | {"baseline-run": str(folder.resolve())}
    return keys


def require_nothing_else(run: str, strategy: str | None, keys: Collection[str]) -> None:
    """Check that a resumed run has neither a strategy nor keys.

    Raises ``MisuseError`` if it has some.
    """
    given = [*filter(None, [strategy]), *sorted(set(keys) - {"runs-dir"})]
    if given:
        from coterie.server.runs.record.reading import MORE_ROUNDS

        raise MisuseError(
            f"--resume continues {run} with the strategy and the keys that it had: leave out "
            f"{', '.join(given)}. {MORE_ROUNDS}"
        )


def resumed(run: str) -> dict[str, Any]:
    """Return the keys that resume a run: by its folder if it is here, else by its name.

    Raises ``MisuseError`` if it does not name a run.
    """
    from coterie.server.paths import place

    folder = place(run)
    if run and (folder / "run.json").exists():
        folder = folder.resolve()
        return {"resume": folder.name, "runs-dir": str(folder.parent)}
    if not folder.name:
        raise MisuseError(
            f"--resume takes the folder, the name or the id of a run. Got {run!r}, where no run is "
            "recorded. `coterie runs` lists the recorded runs."
        )
    return {"resume": folder.name}
