"""What ``coterie`` says of itself: every command and option, as text, with an example."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version

import click
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import coterie.client.resident.serve
import coterie.server.cli.commands
from coterie.client.resident.host import GaveUpError
from coterie.engine.port import LinkError
from coterie.server.cli.main import app, main
from coterie.server.runs.config import all_keys
from coterie.strategies.rounds.options import dashed
from coterie.system import terminal

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
    for parameter in (one for one in command.params if not getattr(one, "hidden", False)):
        said = getattr(parameter, "help", None) or all_keys()[dashed(str(parameter.name))].help
        assert said and "".join(said.split()) in text, parameter.name


def test_keys_of_a_run_are_explained_by_the_run_s_configuration() -> None:
    text = "".join(helped("coterie run").split())
    for key in ("rounds", "alpha", "num-groups", "c", "baseline-run", "seed", "task", "min-silos"):
        assert "".join(all_keys()[key].help.split()) in text
    assert "Forhcct:α" in text, "whose key it is, for others refuse it"


@pytest.mark.parametrize("error", [GaveUpError("away"), LinkError("refused", retry=False)])
def test_a_silo_without_its_superlink_ends_with_5_and_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(coterie.client.resident.serve, "serve", fail)
    monkeypatch.setattr(sys, "argv", ["coterie", "silo", "serve", "--name", "a"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (5, f"coterie: {error}\n")


def test_ctrl_c_ends_with_130_and_a_defect_of_ours_is_shown_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, status in ((KeyboardInterrupt(), 130), (ZeroDivisionError("ours"), 1)):

        def fail(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(coterie.client.resident.serve, "serve", fail)
        done = CliRunner().invoke(app, ["silo", "serve", "--name", "a"])
        assert done.exit_code == status
    assert isinstance(done.exception, ZeroDivisionError)


def test_a_command_that_is_misspelt_is_guessed_once() -> None:
    done = CliRunner().invoke(app, ["silo", "srve"])
    assert done.exit_code == 2 and done.stderr.count("Did you mean 'serve'?") == 1


@pytest.mark.parametrize("path", ["members enroll", "enroll", "operator enroll"])
def test_enrol_may_be_spelled_as_elsewhere_without_a_warning(path: str) -> None:
    done = CliRunner().invoke(app, [*path.split(), "-h"])
    assert " enrol [OPTIONS]" in done.stdout and not done.stderr
    assert "'enroll'" in CliRunner().invoke(app, ["silo", "enroll"]).stderr


@pytest.mark.parametrize("line", [["-q", "runs"], ["runs", "show", "-q", "x"], ["demo", "-qx"]])
def test_quiet_may_stand_before_or_after_a_command(line: list[str]) -> None:
    CliRunner().invoke(app, line)
    assert terminal.shown.quiet == (line[-1] != "-qx")


@pytest.mark.parametrize(
    ("variable", "options", "coloured"),
    [
        ("FORCE_COLOR", "", True),
        ("FORCE_COLOR", "--color=never", False),
        ("FORCE_COLOR", "--color auto", True),
        ("NO_COLOR", "--color auto", False),
        ("NO_COLOR", "--color always", True),
    ],
)
@pytest.mark.parametrize("line", ["{} runs show x", "runs show x {}"])
def test_color_may_stand_before_or_after_a_command(
    line: str, variable: str, options: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # the test ends with what was there, whatever the command sets
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        coterie.server.cli.commands, "print_run", lambda *_, **__: Console().print("[red]red")
    )
    assert ("\x1b[31m" in CliRunner().invoke(app, line.format(options).split()).stdout) == coloured


def test_a_color_that_does_not_exist_is_refused() -> None:
    for line in (["--color", "red", "runs"], ["demo", "--color", "red"], ["demo", "--color"]):
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 2 and "never" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_by_the_script_that_is_printed(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "_COTERIE_COMPLETE" in CliRunner().invoke(app, ["completion", shell]).stdout
    for name, value in {
        "_COTERIE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "coterie members e",
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": "coterie members e",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, [], prog_name="coterie")
    assert re.findall(r"^\W*(?:_arguments\W*)?(\w+)", done.stdout, re.M) == ["enrol", "erase"]
