"""Commands of a silo with a folder: make it, join a federation, check the data, serve."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from coterie.client.cli.options import AppOption, HomeOption, ModOption, option
from coterie.system.commandline import JsonOption, MisuseError, YesOption, confirm, print_json
from coterie.system.logs import show_progress

app = typer.Typer()


@app.command(epilog="Example:  coterie silo init --name north --task study.toml --data /data/north")
def init(
    name: Annotated[
        str,
        typer.Option(help="Name of the silo, unique in the federation, for example hospital-b."),
    ],
    home: Annotated[
        Path | None, option("FOLDER", "Folder to create. [default: the silo's name]")
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="Task to write into silo.toml: a name or a .toml file. [default: digits]"
        ),
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Location of the data, to write into silo.toml.")
    ] = None,
    new_key: Annotated[
        bool,
        typer.Option("--new-key", help="Replace the key. The silo must then be enrolled again."),
    ] = False,
    yes: YesOption = False,
) -> None:
    """Create a silo's folder and print the enrolment request.

    The folder contains the silo's key and a commented silo.toml. The private key never leaves the
    folder.
    """
    from coterie.client.home.folder import create, locked
    from coterie.client.home.settings import SettingsError
    from coterie.tasks import load_task
    from coterie.tasks.options import place_of

    if task and ":" not in task:  # a class may be importable only where the silo will run
        load_task(str(place_of(task)) if task.endswith(".toml") else task)
    if data is not None and not place_of(str(data)).exists():
        raise SettingsError(
            f"there is no {str(data)!r}. Correct --data, or leave it out and set data in "
            "silo.toml later."
        )
    made = create(home or Path(name), name, task=task, data=data)
    if new_key:
        confirm(f"Replace the key of {name}? It must then be enrolled again.", yes=yes)
        with locked(made.folder):
            made.new_key()
    _say(f"Created silo {name} in {made.folder}. Its key fingerprint: {made.fingerprint()}")
    _say("1. Send the operator this line, and compare the fingerprint with them by telephone:")
    print(made.request(), flush=True)
    where = "" if data else "Set the location of your data in silo.toml, and check it"
    at = _option_of(made.folder)
    _say(f"2. {where or 'Check your data'} with `coterie silo check{at}`.")
    _say(
        f"3. Run `coterie silo join{at}` with the operator's answer, then `coterie silo serve{at}`."
    )


@app.command(epilog="Example:  coterie silo join coterie-join.… --home hospital-b")
def join(
    bundle: Annotated[
        list[str], typer.Argument(help="Join bundle: the line that the operator's command printed.")
    ],
    home: HomeOption = None,
) -> None:
    """Join a federation with the bundle that the operator sent.

    The bundle contains the coordinator's address and its CA certificate.
    """
    from coterie.client.home.folder import Home
    from coterie.client.home.settings import SettingsError
    from coterie.system.files import held_by
    from coterie.wire.enrolment import fingerprint_of_certificate

    silo, before = Home(home), ""
    with suppress(SettingsError):  # it has not joined yet
        before, _ = silo.coordinator()
    read = silo.join("".join(bundle))
    _say(f"Silo {read.name} will connect to {read.address}.")
    if before not in ("", read.address):
        _say(
            f"This replaces {before} by {read.address}. If the coordinator is no longer at that "
            "address, ask its operator for a new bundle: this one is from before its move."
        )
    _say(
        f"CA fingerprint: {fingerprint_of_certificate(read.ca)}. Check that the operator sees "
        "the same fingerprint."
    )
    if before and held_by(silo.folder) is not None:
        _say("The silo is running and still uses its previous address. Next: restart it.")
    else:
        _say(f"Next: coterie silo serve{_option_of(silo.folder)}")


@app.command(
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie silo check --home hospital-b\n"
    "  coterie silo check --home hospital-b --app my_package.client:app"
)
def check(
    home: HomeOption = None, app: AppOption = "", mod: ModOption = None, as_json: JsonOption = False
) -> None:
    """Check data and task, and show what would leave the silo.

    The command loads the data, shows counts and schema, and trains one epoch on the device. Nothing
    is sent. With --app, it loads the app and reports which limits of silo.toml apply to it.
    """
    from coterie.client.home.folder import Home
    from coterie.system.keys import remark
    from coterie.system.terminal import width_of, wrapped

    made = Home(home)
    settings = made.settings()
    if made.key_file.exists():
        made.key()  # refused here as by `serve`
    show_progress()
    if app:
        from coterie.client.cli.check_app import check_app

        tasks, lines = [], check_app(settings, app, mod or [])
    elif mod:
        raise MisuseError("--mod requires --app.")
    else:
        from coterie.client.cli.check import check_all, check_as_fields

        tasks = check_as_fields(settings) if as_json else []
        lines = iter(line for one in tasks for line in one["lines"])
        lines = lines if as_json else check_all(settings)
    noted = [f"warning   {text}"] if (text := remark(made.key_file)) else []
    if as_json:
        said = [*noted, *lines]
        warnings = [line[10:] for line in said if line.startswith("warning ")]
        document = {"silo": settings.name, "tasks": tasks, "warnings": warnings, "lines": said}
        print_json(document)
        return
    for line in wrapped(chain(noted, lines), width_of(sys.stdout)):
        print(line)


@app.command(epilog="Example:  coterie silo health --home hospital-b")
def health(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Check a silo: process, last contact, disk, ledger.

    The exit status is 0 if all is well, 1 if there are warnings, and 2 if something does not work
    or will soon fail.
    """
    from coterie.client.home.files import folder_of
    from coterie.client.home.health import findings
    from coterie.system.health import report

    raise typer.Exit(report(findings(folder_of(home).expanduser()), as_json=as_json))


def _option_of(folder: Path) -> str:
    """Return the option that names a silo's folder; empty where commands find it without."""
    from coterie.client.home.files import folder_of

    here = Path.cwd()
    if folder == (here / folder_of(None).expanduser()).resolve():
        return ""
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f" --home {shlex.quote(str(shown))}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
