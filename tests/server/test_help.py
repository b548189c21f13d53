"""What ``coterie`` says of itself: every command and option, in words, with an example."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version

import click
import pytest
import typer
from typer.testing import CliRunner

import coterie.client.resident.serve
from coterie.client.resident.host import GaveUpError
from coterie.client.resident.lost import LinkError
from coterie.server.cli.main import app, main
from coterie.server.runs.config import all_keys

COTERIE = typer.main.get_command(app)


def commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Path and command of everything in a group, and the group itself."""
    yield path, group
    if isinstance(group, click.Group):
        for name in group.commands:
            command = group.get_command(click.Context(group), name)
            assert command is not None
            yield from commands(command, f"{path} {name}")


ALL = dict(commands(COTERIE, "coterie"))


def helped(path: str) -> str:
    return ALL[path].get_help(ALL[path].context_class(ALL[path], info_name=path))


def test_the_help_of_coterie_lists_every_command_in_one_line() -> None:
    text = helped("coterie")
    listed = {line.strip().partition("  ")[0] for line in text.splitlines()}
    assert {path.removeprefix("coterie ") for path in ALL} - listed == {"coterie"}
    assert "..." not in text.partition("Options:")[2], "a summary is too long for its line"
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert not any(line.startswith(" " * 9) for line in rows), "a summary runs on"


def test_the_version_is_told_with_flowers() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (
        0,
        f"coterie {version('coterie')}, Flower {version('flwr')}\n",
    )


@pytest.mark.parametrize("path", sorted(ALL))
def test_every_command_option_and_argument_says_what_it_is_for(path: str) -> None:
    command, text = ALL[path], "".join(helped(path).split())
    assert command.help and (path == "coterie" or "xample" in (command.epilog or ""))
    assert "\\[" not in text, "marks of another way to show help"
    for parameter in command.params:
        said = getattr(parameter, "help", None)
        assert said and "".join(said.split()) in text, parameter.name


def test_keys_of_a_run_are_explained_by_the_run_s_configuration() -> None:
    text = "".join(helped("coterie run").split())
    for key in ("rounds", "alpha", "num-groups", "c", "alone", "seed", "task", "min-silos"):
        assert "".join(all_keys()[key].help.split()) in text
    assert "Forhcct:α" in text, "whose key it is, for others refuse it"


@pytest.mark.parametrize("error", [GaveUpError("away"), LinkError("refused", retry=False)])
def test_a_silo_without_its_superlink_ends_with_5_and_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(coterie.client.resident.serve, "serve", fail)
    monkeypatch.setattr(sys, "argv", ["coterie", "silo", "--name", "a"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (5, f"coterie silo: {error}\n")


def test_ctrl_c_ends_with_130_and_a_defect_of_ours_is_shown_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, status in ((KeyboardInterrupt(), 130), (ZeroDivisionError("ours"), 1)):

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(coterie.client.resident.serve, "serve", fail)
        done = CliRunner().invoke(app, ["silo", "--name", "a"])
        assert done.exit_code == status
    assert isinstance(done.exception, ZeroDivisionError)


def test_a_command_that_is_misspelt_is_guessed_once() -> None:
    done = CliRunner().invoke(app, ["silo", "strat"])
    assert done.exit_code == 2 and done.stderr.count("Did you mean 'start'?") == 1
