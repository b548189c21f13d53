"""Keys of a run on a command line: as options and as ``--set KEY=VALUE``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import click
from typer.core import TyperCommand

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
        shown = copy(self)  # ``keys_given`` knows keys by the lack of a text
        shown.params = [_explained(option) for option in self.params]
        super(KeysCommand, shown).format_options(ctx, formatter)


def _explained(option: click.Parameter) -> click.Parameter:
    """Return an option that is a key with the key's help text; any other as it is."""
    from coterie.server.runs.config import all_keys, owners
    from coterie.strategies.rounds.options import dashed

    key = all_keys().get(dashed(option.name or ""))
    if key is None or getattr(option, "help", "") is not None:
        return option
    found = copy(option)
    whose = f"For {', '.join(owners()[key.name])}: " if key.name in owners() else ""
    found.help = whose + key.help  # type: ignore[attr-defined]
    return found


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
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise MisuseError(f"--set takes KEY=VALUE. Got {setting!r}.")
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


def keys_to_go_on(
    resume: str | None, more: str | None, strategy: str | None, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys that resume one run, or add rounds to another, complete one.

    Raises ``MisuseError`` if no run is named or two are, if ``more`` lacks the number of rounds, or
    if there is a strategy or another key.
    """
    option, run = ("--resume", resume) if more is None else ("--continue", more)
    if more is not None and resume is not None:
        raise MisuseError("--resume is for an interrupted run, --continue for a complete one.")
    own = {"runs-dir"} if more is None else {"runs-dir", "rounds"}
    given = [*filter(None, [strategy]), *sorted(set(keys) - own)]
    if given:
        from coterie.server.runs.record.reading import MORE_ROUNDS

        raise MisuseError(
            f"{option} continues {run} with the strategy and the keys that it had: leave out "
            f"{', '.join(given)}. {MORE_ROUNDS}"
        )
    if more is not None and "rounds" not in keys:
        raise MisuseError("--continue adds rounds to a complete run: give --rounds.")
    added = {} if more is None else {"more-rounds": keys["rounds"]}
    kept = {key: value for key, value in keys.items() if key != "rounds"}
    return {**kept, **added, **_named(str(run), option)}


def _named(run: str, option: str) -> dict[str, Any]:
    """Return the keys that name a run: by its folder if it is here, else by its name.

    Raises ``MisuseError`` if it does not name a run.
    """
    from coterie.server.paths import place

    folder = place(run)
    if run and (folder / "run.json").exists():
        folder = folder.resolve()
        return {"resume": folder.name, "runs-dir": str(folder.parent)}
    if not folder.name:
        raise MisuseError(
            f"{option} takes the folder, the name or the id of a run. Got {run!r}, where no run is "
            "recorded. `coterie runs` lists the recorded runs."
        )
    return {"resume": folder.name}


OF_ONE_RUN = ("parent", "resume", "more-rounds", "rounds", "label", "runs-dir")
"""Keys that a run from another does not inherit."""


def keys_from(parent: str, root: Path | None) -> dict[str, Any]:
    """Return the keys that a run from another inherits.

    Empty if it is from a file, or if that run is recorded at the coordinator alone.
    """
    from coterie.server.runs.going_on import recorded_config
    from coterie.server.runs.record import reading
    from coterie.strategies.errors import FederationError

    if parent.endswith(".safetensors"):
        return {}
    try:
        run = reading.read_whole(reading.find_run(parent, root))
    except FederationError:
        return {}
    plain = recorded_config(run).plain()
    return {key: value for key, value in plain.items() if key not in OF_ONE_RUN}


def keys_to_evaluate(
    models: str, task: str | None, root: Path | None, *, strategy: str = "evaluation"
) -> dict[str, Any]:
    """Return the keys of a run about the models of a run or a file.

    Raises ``MisuseError`` if the task is neither given nor known from the run.
    """
    inherited = {
        key: value
        for key, value in keys_from(models, root).items()
        if key in ("task", "primary-metric") or key.startswith("task.")
    }
    keys = inherited | ({} if task is None else {"task": task})
    if "task" not in keys:
        lacks = "" if strategy == "contribution" else "--task is missing: "
        raise MisuseError(f"{lacks}{models!r} does not name a complete run that is recorded here.")
    return {"strategy": strategy, "parent": named_parent(models), **keys}


def keys_to_regress(groups: str | None, task: str | None, root: Path | None) -> dict[str, Any]:
    """Return the keys of a regression in the groups of a run, or of all silos of a task.

    Raises ``MisuseError`` if the task is neither given nor known from the run.
    """
    if groups is not None:
        return keys_to_evaluate(groups, task, root, strategy="regression")
    if task is None:
        raise MisuseError("--task is missing: name the silos' task, or a run with --groups.")
    return {"strategy": "regression", "task": task}


def named_parent(parent: str) -> str:
    """Return what names a run or file for the coordinator: a path that exists here, in full."""
    from coterie.server.paths import place

    path = place(parent)
    return str(path.resolve()) if path.is_file() or (path / "run.json").exists() else parent
