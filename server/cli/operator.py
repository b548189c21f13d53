"""Commands of the coordinator's operator: create a federation, enrol its silos, serve."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TextIO

import typer

from coterie.server.cli.options import (
    CertificateOption,
    FederationOption,
    Given,
    RunsOption,
    SuperLinkOption,
    expand,
    file_option,
    port,
)
from coterie.system import logs
from coterie.system.commandline import (
    EXIT_LINK,
    JsonOption,
    LogFormatOption,
    MetricsOption,
    MisuseError,
    YesOption,
    address_option,
    confirm,
    given,
    group,
    host_option,
)

MAX_LINE = 100_000
"""Most characters that are shown of a line from a coordinator."""
app = typer.Typer()
federation_app = group(
    *("coterie federation", "Create, check and audit a federation."),
    "coterie federation init lung-study --address fl.example.org",
)
members = group(
    *("coterie members", "List, enrol, remove and erase the silos of a federation."),
    "coterie members list --federation lung-study",
)

ControlPortOption = Annotated[int, port("Port to listen on for operators.")]
RuntimePortOption = Annotated[int, port("Port to listen on for the ServerApp.")]


@federation_app.command(
    epilog="Example:  coterie federation init lung-study --address fl.example.org:9092"
)
def init(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="Folder to create.", file_okay=False, callback=expand)
    ] = Path("federation"),
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Address at which silos reach this machine. Can be repeated.",
        ),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew", help="Only renew the coordinator's certificate in an existing folder."
        ),
    ] = False,
    fleet_port: Annotated[
        int | None,
        port("Port to listen on for silos. [default: the port of the first address, or 9092]"),
    ] = None,
    control_port: ControlPortOption = 9093,
    runtime_port: RuntimePortOption = 9091,
    operators: Annotated[
        str, host_option("Address to listen on for operators.", metavar="HOST")
    ] = "127.0.0.1",
) -> None:
    """Create a federation: CA, certificate, settings."""
    from coterie.server.site.federation import create
    from coterie.server.site.operator import print_init
    from coterie.server.site.operator import renew as renew_certificate

    if renew:
        for name, hint in given(context):
            if name not in ("folder", "renew"):
                raise MisuseError(
                    "--renew only makes a new certificate for the addresses in "
                    f"{folder / 'coterie.toml'}. Change addresses and ports in that file, and "
                    f"leave out {hint}."
                )
        renew_certificate(folder)
        return
    if not address:
        raise MisuseError(
            "say where silos reach this machine: --address HOST[:PORT], a name or an IP address."
        )
    made = create(
        folder,
        address,
        fleet_port=fleet_port,
        control_port=control_port,
        runtime_port=runtime_port,
        operators=operators,
    )
    print_init(made, folder)


@members.command(epilog="Example:  coterie members enrol --federation lung-study coterie-request.…")
def enrol(
    request: Annotated[
        list[str], typer.Argument(help="Enrolment request: the line that the silo sent.")
    ],
    federation: FederationOption = None,
    superlink: SuperLinkOption = None,
    root_certificates: CertificateOption = None,
) -> None:
    """Enrol a silo and print the join bundle to send back.

    Enrolment binds the silo's name to its key. With --superlink, the silo is enrolled at a remote
    coordinator, which requires an operator with the role `enrol`.
    """
    done = Given(federation, superlink, root_certificates).act("enrol", request="".join(request))
    _say_all(done["lines"], sys.stderr)
    _say(done["bundle"])


@members.command("list", epilog="Example:  coterie members list --federation lung-study")
def roster(federation: FederationOption = None, as_json: JsonOption = False) -> None:
    """List the enrolled silos, their tasks and their last contact."""
    from coterie.server.site.federation import load
    from coterie.server.site.operator import print_roster

    print_roster(load(federation), as_json=as_json)


@members.command(epilog="Example:  coterie members remove hospital-b --federation lung-study")
def remove(
    name: Annotated[str, typer.Argument(help="Name of the silo.")],
    federation: FederationOption = None,
    superlink: SuperLinkOption = None,
    root_certificates: CertificateOption = None,
    yes: YesOption = False,
) -> None:
    """Remove a silo from the federation. Its key is never accepted again; runs continue."""
    confirm(f"Remove {name}? Its key is never accepted again.", yes=yes)
    _say_all(Given(federation, superlink, root_certificates).act("remove", name=name)["lines"])


@members.command(
    "erase",
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie members erase hospital-b --federation lung-study\n"
    "  coterie members erase --verify hospital-b-2026-11-23T0931.json --root-certificates ca.pem",
)
def withdraw(
    name: Annotated[str, typer.Argument(help="Name of the silo.")] = "",
    verify: Annotated[
        Path | None,
        file_option(
            "Only verify and show the signed statement of an earlier withdrawal.", "--verify"
        ),
    ] = None,
    federation: FederationOption = None,
    superlink: SuperLinkOption = None,
    root_certificates: CertificateOption = None,
    yes: YesOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be stopped and deleted.")
    ] = False,
) -> None:
    """Remove a silo, delete its models, and sign what was deleted.

    Active runs that include the silo are stopped. Its models, checkpoints that contain its models
    or updates, and its statistics are deleted from the federation's runs, and the messages of ended
    runs from the SuperLink's database. A signed statement lists what was deleted, and which other
    models still contain its averaged updates.
    """
    from coterie.server.site.federation import load

    if (verify is None) == (not name):
        raise MisuseError("name either a silo, or a statement with --verify.")
    if dry_run and (verify is not None or superlink is not None):
        raise MisuseError(
            "--dry-run reads the federation's folder: use it on the coordinator, without --verify."
        )
    if verify is None and not dry_run:
        confirm(f"Erase {name}? Its models are deleted; that cannot be undone.", yes=yes)
    if dry_run:
        from coterie.server.site.withdrawal import planned

        lines = list(planned(load(federation), name))
    elif verify is not None:
        from coterie.server.site.statement import lines_of, verified

        ca = load(federation).ca if root_certificates is None else root_certificates
        lines = list(lines_of(verified(verify.read_bytes(), ca.read_bytes())))
        _say("The statement is as the federation of this CA signed it.")
    elif superlink is None:
        from coterie.server.site.operator import withdraw_silo

        lines = withdraw_silo(load(federation), name, say=_say)
    else:
        with Given(federation, superlink, root_certificates).control() as calls:
            lines = calls.act("withdraw", name=name)["lines"]
    _say_all(lines)


@federation_app.command(
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie federation audit --federation lung-study\n"
    "  coterie federation audit --verify --head 12:5f1c… --federation lung-study"
)
def audit(
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Verify the log's hash chain: report changed, removed, reordered or truncated "
            "lines.",
        ),
    ] = False,
    head: Annotated[
        str,
        typer.Option(
            metavar="HEAD",
            help="With --verify: check that the log still contains this earlier head.",
        ),
    ] = "",
    last: Annotated[
        int, typer.Option(metavar="N", min=0, help="Show only the last N actions. 0: all.")
    ] = 0,
    federation: FederationOption = None,
    as_json: JsonOption = False,
) -> None:
    """List or verify the operators' actions (audit log)."""
    from coterie.server.site.federation import load
    from coterie.server.site.operator import print_audit, print_verification

    made = load(federation)
    if verify:
        raise typer.Exit(print_verification(made, head=head, as_json=as_json))
    if head:
        raise MisuseError("--head needs --verify.")
    print_audit(made, last=last, as_json=as_json)


@federation_app.command(
    epilog="Example:  coterie federation upgrade-check --to 0.2.0 --federation lung-study"
)
def upgrade_check(
    to: Annotated[
        str, typer.Option(metavar="RELEASE", help="Release to check. [default: the installed one]")
    ] = "",
    federation: FederationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether an upgrade is safe.

    The command lists the silos' releases, as known from the last run in which each took part. A
    release is compatible with the release before it and the one after it. The exit status is 0 if
    nothing known prevents the upgrade, and 1 otherwise, also while a run is active.
    """
    from coterie.server.site.federation import load
    from coterie.server.site.operator import print_outlook
    from coterie.server.site.upgrade import look

    outlook = look(load(federation), to)
    print_outlook(outlook, as_json=as_json)
    raise typer.Exit(0 if outlook.is_safe else 1)


NOT_WITH_FEDERATION = {
    "host": "[listen] silos in its coterie.toml sets where to listen for silos",
    "fleet_port": "[listen] silos in its coterie.toml sets where to listen for silos",
    "control_port": "[listen] operators in its coterie.toml sets where to listen for operators",
    "runtime_port": "[listen] serverapp in its coterie.toml sets where to listen for the ServerApp",
    "operators": "[listen] operators in its coterie.toml sets where to listen for operators",
    "database": "[state] database in its coterie.toml sets whether superlink.db in it is used",
    "executor": "its SuperLink always starts ServerApps itself",
    "runs_dir": "its runs are recorded in its folder runs/",
}
"""Options of ``coterie superlink`` without effect in a federation → what replaces them."""


@app.command(epilog="Example:  coterie superlink --federation lung-study")
def superlink(
    context: typer.Context,
    federation: FederationOption = None,
    host: Annotated[str, host_option("Address to listen on.")] = "127.0.0.1",
    fleet_port: Annotated[int, port("Port to listen on for silos.")] = 9092,
    control_port: ControlPortOption = 9093,
    runtime_port: RuntimePortOption = 9091,
    operators: Annotated[
        str,
        host_option(
            "Address to listen on for operators and the ServerApp. [default: --host]",
            metavar="HOST",
        ),
    ] = "",
    database: Annotated[
        Path | None, file_option("File for the SuperLink's state. It must be on a local disk.")
    ] = None,
    executor: Annotated[
        bool,
        typer.Option(help="Start ServerApps. With --no-executor, `coterie executor` starts them."),
    ] = True,
    runs_dir: RunsOption = None,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "",
) -> None:
    """Run the SuperLink for silos and operators.

    It runs in the foreground until Ctrl-C or SIGTERM.

    With a federation, it uses TLS and accepts only enrolled silos. All other settings are in the
    federation's coterie.toml, so the other options are refused, except --metrics-address and
    --log-format.

    Without a federation, it does not use TLS and accepts every silo. Use this on one machine, or on
    a network that you trust.
    """
    from coterie.server.site.federation import find

    made = find(federation)
    if made is not None:
        from coterie.server.site.coordinator import serve
        from coterie.server.site.withdrawal import finish_all

        for name, hint in given(context):
            if name in NOT_WITH_FEDERATION:
                raise MisuseError(
                    f"{hint} has no effect on the federation in {made.folder}: "
                    f"{NOT_WITH_FEDERATION[name]}. Leave the option out."
                )
        made = made.monitored(metrics=metrics, log_format=log_format)
        say = logs.saying("coordinator", made.config.monitoring.log_format)
        finish_all(made, say)
        raise typer.Exit(serve(made, say))
    from coterie.server.machine.superlink import (
        Ports,
        executor_command,
        plain_command,
        require_free,
    )
    from coterie.server.site.database import compact

    if metrics:
        raise MisuseError(
            "--metrics-address serves the numbers of a federation's coordinator: name its folder "
            "with --federation."
        )

    ports = Ports(runtime=runtime_port, fleet=fleet_port, control=control_port)
    require_free(host, ports, operators=operators)
    if database is not None:
        compact(database, _say, most=math.inf)
    silos, control, runtime = ports.at(host, operators)
    _say(
        f"SuperLink: silos connect to {silos}, operators to {control}\n"
        "It uses no TLS and accepts every silo: for one machine or a network that you trust."
    )
    line = plain_command(host, ports, operators=operators, database=database)
    beside = executor_command(runtime) if executor else None
    _become(line, runs_dir, log_format, beside)


@app.command(epilog="Example:  coterie executor --superlink superlink:9091 --runs-dir /runs")
def executor(
    superlink: Annotated[
        str, address_option("Address of the SuperLink's Runtime API.", 9091)
    ] = "127.0.0.1:9091",
    runs_dir: RunsOption = None,
    log_format: LogFormatOption = "",
) -> None:
    """Start a SuperLink's ServerApps (--no-executor).

    Runs survive a restart of that SuperLink.
    """
    from coterie.server.machine.superlink import executor_command

    _become(executor_command(superlink), runs_dir, log_format)


@federation_app.command(
    "check", epilog="Example:  coterie federation check --federation lung-study"
)
def health(
    federation: FederationOption = None,
    superlink: SuperLinkOption = None,
    root_certificates: CertificateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check SuperLink, database, disk and certificates.

    The exit status is 0 if all is well, 1 if there are warnings, 2 if something does not work or
    will soon fail, and 5 if the SuperLink does not answer. Without a federation, only whether the
    SuperLink answers is checked.
    """
    from coterie.server.site import health as checks
    from coterie.server.site.operators import own_identity
    from coterie.system.health import BAD, report

    given = Given(federation, superlink, root_certificates)
    made, place = given.made(), given.place()
    found = list(checks.findings(made) if made else [checks.superlink(*place[:2], own_identity())])
    status = report(found, as_json=as_json)
    away = any(one.what == checks.SUPERLINK and one.level == BAD for one in found)
    raise typer.Exit(EXIT_LINK if away else status)


def _become(
    line: list[str], runs_dir: Path | None, log_format: str, beside: list[str] | None = None
) -> None:
    """Replace this process by a program, and start another one that ends with it."""
    from coterie.server.machine.superlink import environment
    from coterie.server.paths import default_home

    own = environment(default_home()) | {logs.ENVIRONMENT: logs.chosen(log_format)}
    if runs_dir is not None:
        own["COTERIE_RUNS"] = str(runs_dir.resolve())
    sys.stdout.flush()
    if beside is not None:  # this process keeps its number
        parent = ["--parent-pid", str(os.getpid())]
        subprocess.Popen([*beside, *parent], env=own, start_new_session=True)
    os.execve(line[0], line, own)


def _say_all(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines that may come from a coordinator elsewhere."""
    from coterie.wire import plain_text

    for line in lines:
        print(plain_text(line, MAX_LINE), file=file, flush=True)


def _say(text: str) -> None:
    print(text, flush=True)
