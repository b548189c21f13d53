"""The ``coterie`` command. Each part is imported when its command runs, so that --help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="coterie",
    help="Cross-silo federated learning that finds out who should train with whom.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="Start with:  coterie demo",
)

MAX_PORT = 65535


def _place(value: Path | None) -> Path | None:
    """A path as a person writes it, with ``~``."""
    from coterie.server.paths import place

    return value if value is None else place(value)


SuperLinkOption = Annotated[
    str | None,
    typer.Option(
        "--superlink",
        metavar="HOST:PORT",
        help="The SuperLink's Control API. [default: the federation's, or 127.0.0.1:9093]",
    ),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option(
        "--root-certificates", help="PEM file of the CA; without it: no TLS.", callback=_place
    ),
]
RunsOption = Annotated[
    Path | None,
    typer.Option("--runs-dir", help="Folder of run records.", file_okay=False, callback=_place),
]
FederationOption = Annotated[
    Path | None,
    typer.Option(
        "--federation",
        metavar="FOLDER",
        help="Folder made by `coterie init`. [default: $COTERIE_FEDERATION, or the current one]",
        file_okay=False,
        callback=_place,
    ),
]


@app.command(epilog="Example:  coterie demo --seed 3 --alpha 50")
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of data, models and training.")] = 0,
    rounds: Annotated[int, typer.Option(min=6, max=500)] = 20,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="HCCT: preference for more data. [default: 50]")
    ] = None,
    strategy: Annotated[str, typer.Option(help="hcct, fedgroup, fedcollab or fedgenp.")] = "hcct",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Folder for everything. [default: runs/demo-<time>]", callback=_place
        ),
    ] = None,
) -> None:
    """Ten silos on this machine find out who should train with whom, in about a minute."""
    from rich.console import Console

    from coterie.server.study.demo import demo as run_demo

    run_demo(Console(), seed=seed, rounds=rounds, alpha=alpha, strategy=strategy, folder=folder)


@app.command(epilog="Example:  coterie init lung-study --address fl.example.org:9092")
def init(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(file_okay=False, callback=_place)] = Path("federation"),
    address: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="Where silos reach this machine; repeatable."),
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Only make the server's certificate anew.")
    ] = False,
    fleet_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_PORT,
            help="To listen on for silos. [default: the first address's, or 9092]",
        ),
    ] = None,
    control_port: Annotated[
        int, typer.Option(min=1, max=MAX_PORT, help="The same for operators.")
    ] = 9093,
    runtime_port: Annotated[
        int, typer.Option(min=1, max=MAX_PORT, help="The same for the ServerApp.")
    ] = 9091,
    operators: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on for operators.")
    ] = "127.0.0.1",
) -> None:
    """Make the coordinator's folder of a federation: CA, certificate, roster, configuration."""
    from coterie.server.site.operator import print_init
    from coterie.server.site.operator import renew as renew_certificate

    if renew:
        for name, hint in _given(context):
            if name not in ("folder", "renew"):
                raise typer.BadParameter(
                    "--renew makes a certificate for the addresses in "
                    f"{folder / 'coterie.toml'}, and changes nothing else. Change addresses and "
                    "ports there, and leave this option out.",
                    param_hint=hint,
                )
        renew_certificate(folder)
        return
    if not address:
        raise typer.BadParameter(
            "say where silos reach this machine: --address HOST[:PORT], a name or an IP address."
        )
    print_init(
        folder,
        address,
        fleet_port=fleet_port,
        control_port=control_port,
        runtime_port=runtime_port,
        operators=operators,
    )


@app.command(epilog="Example:  coterie enrol --federation lung-study coterie-request.…")
def enrol(
    request: Annotated[list[str], typer.Argument(help="The line that the silo sent.")],
    federation: FederationOption = None,
) -> None:
    """Let a silo in: bind its name to its key, and print the join bundle to send back."""
    from coterie.server.site.federation import load
    from coterie.server.site.operator import take_request

    take_request(load(federation), "".join(request))


@app.command(epilog="Example:  coterie roster --federation lung-study")
def roster(federation: FederationOption = None) -> None:
    """List the enrolled silos, and which of them are connected."""
    from coterie.server.site.federation import load
    from coterie.server.site.operator import print_roster

    print_roster(load(federation))


@app.command(epilog="Example:  coterie remove hospital-b --federation lung-study")
def remove(
    name: Annotated[str, typer.Argument(help="Of the silo.")], federation: FederationOption = None
) -> None:
    """Shut a silo out. Its key is never let in again; runs go on without it."""
    from coterie.server.site.federation import load
    from coterie.server.site.operator import print_remove

    print_remove(load(federation), name)


NOT_WITH_FEDERATION = {
    "host": "[listen] silos of its coterie.toml says where to listen for silos",
    "fleet_port": "[listen] silos of its coterie.toml says where to listen for silos",
    "control_port": "[listen] operators of its coterie.toml says where to listen for operators",
    "runtime_port": "[listen] serverapp of its coterie.toml says where to listen for the ServerApp",
    "operators": "[listen] operators of its coterie.toml says where to listen for operators",
    "database": "[state] database of its coterie.toml says whether superlink.db in it is used",
    "executor": "its SuperLink and what starts ServerApps always run together",
    "runs_dir": "its runs are recorded in its folder runs/",
}
"""Options of ``coterie superlink`` that mean nothing to a federation, and what does instead."""


@app.command(epilog="Example:  coterie superlink --federation lung-study")
def superlink(
    context: typer.Context,
    federation: FederationOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    fleet_port: Annotated[int, typer.Option(min=1, max=MAX_PORT, help="For silos.")] = 9092,
    control_port: Annotated[int, typer.Option(min=1, max=MAX_PORT, help="For operators.")] = 9093,
    runtime_port: Annotated[
        int, typer.Option(min=1, max=MAX_PORT, help="For the ServerApp.")
    ] = 9091,
    operators: Annotated[
        str, typer.Option(help="Listen here for operators and the ServerApp. [default: --host]")
    ] = "",
    database: Annotated[
        Path | None,
        typer.Option(
            help="Keep the SuperLink's state in this file, on a local disk.",
            dir_okay=False,
            callback=_place,
        ),
    ] = None,
    executor: Annotated[
        bool,
        typer.Option(help="Start ServerApps itself; without, `coterie executor` does."),
    ] = True,
    runs_dir: RunsOption = None,
) -> None:
    """Run the coordinating SuperLink in the foreground.

    With a federation: TLS, enrolled silos only; its coterie.toml says all else, and the other
    options are refused. Without one: no TLS, every silo is let in, for one machine or a trusted
    network.
    """
    from coterie.server.site.federation import find

    made = find(federation)
    if made is not None:
        from coterie.server.site.coordinator import serve

        for name, hint in _given(context):
            if name in NOT_WITH_FEDERATION:
                raise typer.BadParameter(
                    f"it has no effect on the federation in {made.folder}: "
                    f"{NOT_WITH_FEDERATION[name]}. Leave the option out.",
                    param_hint=hint,
                )
        raise typer.Exit(serve(made, _say))
    from coterie.server.machine.superlink import Ports, command, environment, require_free
    from coterie.server.runs.record import default_home

    ports = Ports(runtime=runtime_port, fleet=fleet_port, control=control_port)
    require_free(host, ports, operators=operators)
    line = command(host, ports, operators=operators, database=database, executor=executor)
    own = environment(default_home())
    if runs_dir is not None:
        own["COTERIE_RUNS"] = str(runs_dir.resolve())
    typer.echo(
        f"SuperLink: silos connect to {host}:{fleet_port}, "
        f"operators to {operators or host}:{control_port}"
    )
    typer.echo(
        "This one is without TLS and lets every silo in: for one machine or a trusted network."
    )
    sys.stdout.flush()
    os.execve(line[0], line, own)


def _given(context: typer.Context) -> Iterator[tuple[str, str]]:
    """Name of every parameter that was not left out, and how it is written."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source and source.name != "DEFAULT":
            yield option.name or "", "/".join([*option.opts, *option.secondary_opts])


def _say(text: str) -> None:
    print(text, flush=True)


@app.command(epilog="Example:  coterie executor --superlink superlink:9091 --runs-dir /runs")
def executor(
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The SuperLink's runtime API.")
    ] = "127.0.0.1:9091",
    runs_dir: RunsOption = None,
) -> None:
    """Start ServerApps for a SuperLink that runs with --no-executor. Runs survive its restart."""
    from coterie.server.machine.superlink import environment, executor_command
    from coterie.server.runs.record import default_home

    line = executor_command(superlink)
    own = environment(default_home())
    if runs_dir is not None:
        own["COTERIE_RUNS"] = str(runs_dir.resolve())
    sys.stdout.flush()
    os.execve(line[0], line, own)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def silo(context: typer.Context) -> None:
    """Serve a federation from this machine with this machine's data."""
    # The silo is a program of its own: the coordinator's code is not loaded at a silo.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "coterie.client", *context.args])


@app.command(
    epilog="Example:  coterie run hcct --alpha 50 --rounds 20 --min-silos 9 --set lr=0.1",
)
def run(
    strategy: Annotated[
        str | None, typer.Argument(help="hcct, fedavg, … See docs/how-to/choose-a-strategy.md.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with a run after its last committed round."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    alpha: Annotated[
        str | None, typer.Option(metavar="NUMBER|auto", help="HCCT: hunger for data.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(metavar="NUMBER|auto", help="FedGroup: number of groups.")
    ] = None,
    c: Annotated[
        str | None, typer.Option("-c", metavar="NUMBER|auto", help="FedCollab: hunger for data.")
    ] = None,
    alone: Annotated[
        str | None, typer.Option(metavar="RUN", help="Independent run to compare with (IPR, RSD).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same models.")] = None,
    task: Annotated[str | None, typer.Option(help="Task that every silo must serve.")] = None,
    min_silos: Annotated[int | None, typer.Option(help="Wait for so many.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any key of docs/reference/configuration.md."
        ),
    ] = None,
    federation: FederationOption = None,
    superlink: SuperLinkOption = None,
    root_certificates: CertificateOption = None,
    runs_dir: RunsOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the run.")] = False,
    shared_records: Annotated[
        bool,
        typer.Option(
            "--shared-records",
            help="The coordinator's run records lie at the same place here (a shared volume).",
        ),
    ] = False,
) -> None:
    """Submit a run to a SuperLink and follow it. Ctrl-C ends the following, not the run."""
    typed_certificates, typed_runs = root_certificates, runs_dir
    address, root_certificates, runs_dir = _whom(federation, superlink, root_certificates, runs_dir)
    named = {
        "rounds": rounds,
        "alpha": alpha if alpha is None else _value(alpha),
        "num-groups": groups if groups is None else _value(groups),
        "c": c if c is None else _value(c),
        "alone": alone,
        "seed": seed,
        "task": task,
        "min-silos": min_silos,
        "runs-dir": None if runs_dir is None else str(runs_dir.resolve()),
    }
    given: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
    given = _with_folders(given | _pairs(settings or []))
    if (strategy is None) == (resume is None):
        raise typer.BadParameter("give a strategy, or --resume RUN.")
    if resume is not None and set(given) - {"runs-dir"}:
        raise typer.BadParameter("a resumed run has the keys that it had; give no others.")
    if resume is None:
        given["strategy"] = strategy
    else:
        given |= _resumed(resume)
    from coterie.server.cli.commands import Given, submit_and_follow

    if given.get("runs-dir") != named["runs-dir"]:  # by --set, or with the folder to resume
        typed_runs = Path(given["runs-dir"])
    raise typer.Exit(
        submit_and_follow(
            given,
            address,
            root_certificates,
            detach=detach,
            shared_records=shared_records,
            options=Given(federation, superlink, typed_certificates, typed_runs),
        )
    )


@app.command(epilog="Example:  coterie stop hcct-1234 --federation lung-study")
def stop(
    run: Annotated[str, typer.Argument(help="A run's folder, name or id.")],
    federation: FederationOption = None,
    superlink: SuperLinkOption = None,
    root_certificates: CertificateOption = None,
    runs_dir: RunsOption = None,
) -> None:
    """End a run at its SuperLink. It can be resumed after its last committed round."""
    from coterie.server.cli.commands import Given, stop_run

    options = Given(federation, superlink, root_certificates, runs_dir)
    address, root_certificates, root = _whom(federation, superlink, root_certificates, runs_dir)
    raise typer.Exit(stop_run(run, address, root_certificates, root, options))


@app.command(epilog="Example:  coterie simulate hundred.toml --processes 2")
def simulate(
    file: Annotated[
        Path, typer.Argument(help="Simulation file: docs/how-to/simulate.md.", callback=_place)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the run, before the file's."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(min=0, help="Real processes that share the silos, over gRPC; 0: none."),
    ] = 0,
    runs_dir: RunsOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="With --processes: folder of logs and of the silos' models.",
            callback=_place,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the run's record instead, and nothing else.")
    ] = False,
) -> None:
    """Run a whole federation on this machine as a file describes it. Same seed, same models."""
    if folder is not None and not processes:
        raise typer.BadParameter(
            "it is the folder of the processes' logs and models, and --processes is 0: give "
            "--processes too, or --runs-dir for the record.",
            param_hint="--dir",
        )
    from rich.console import Console

    from coterie.server.study.simulate import simulate as run_simulation

    record = run_simulation(
        Console(quiet=json),
        file,
        changes=_with_folders(_pairs(settings or [])),
        processes=processes,
        runs_dir=runs_dir,
        folder=folder,
    )
    if json:
        print((record / "run.json").read_text(encoding="utf-8"))


@app.command(epilog="Example:  coterie status --superlink 127.0.0.1:9093")
def status(
    federation: FederationOption = None,
    superlink: SuperLinkOption = None,
    root_certificates: CertificateOption = None,
) -> None:
    """Say whether a SuperLink answers, how many silos are connected, and which runs it knows."""
    from coterie.server.cli.commands import print_status

    address, root_certificates, _ = _whom(federation, superlink, root_certificates, None)
    print_status(address, root_certificates)


@app.command(epilog="Example:  coterie runs --runs-dir ./runs")
def runs(runs_dir: RunsOption = None, federation: FederationOption = None) -> None:
    """List the runs recorded on this machine."""
    from coterie.server.cli.commands import print_runs

    print_runs(_whom(federation, None, None, runs_dir)[2])


@app.command(epilog="Example:  coterie explain hcct-1234 --silo north-2 --round 5")
def explain(
    run: Annotated[str, typer.Argument(help="A run's folder, name or id.")],
    silo: Annotated[str | None, typer.Option(help="Only this silo.")] = None,
    round: Annotated[int | None, typer.Option(help="After this round. [default: the last]")] = None,
    runs_dir: RunsOption = None,
    federation: FederationOption = None,
) -> None:
    """Say why each silo is in its group: utilities, cosines, and the α in which it would stay."""
    from coterie.server.report.explain import print_explanation

    root = _whom(federation, None, None, runs_dir)[2]
    print_explanation(run, silo=silo, round=round, root=root)


def _whom(
    federation: Path | None,
    superlink: str | None,
    root_certificates: Path | None,
    runs_dir: Path | None,
) -> tuple[str, Path | None, Path | None]:
    """Address, CA and folder of records: as given, else the federation's, else this machine's."""
    from coterie.server.site.federation import find

    if federation is not None and superlink is not None:
        raise typer.BadParameter(
            f"they name two SuperLinks: that of the federation in {federation}, and the one at "
            f"{superlink}. Leave one of them out.",
            param_hint="--federation and --superlink",
        )
    made = find(federation) if superlink is None else None
    if made is None:
        return superlink or "127.0.0.1:9093", root_certificates, runs_dir
    return made.control_address, root_certificates or made.ca, runs_dir or made.runs


@app.command(epilog="Example:  coterie compare benchmarks/compare/concept.toml --dir runs/concept")
def compare(
    file: Annotated[
        Path,
        typer.Argument(
            help="TOML: silos, seeds, strategies. docs/how-to/compare.md", callback=_place
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder of the data.", file_okay=False, callback=_place),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Folder for records and table; continued if it exists.",
            callback=_place,
        ),
    ] = None,
    federation: Annotated[
        bool, typer.Option("--federation", help="Silos as processes that talk gRPC.")
    ] = False,
) -> None:
    """Run several strategies over the same silos and seeds, and say which is better."""
    from rich.console import Console

    from coterie.server.study.compare import compare as run_compare

    run_compare(Console(), file, data=data, folder=folder, federation=federation)


@app.command(epilog="Example:  coterie report hcct-1234 --alone independent-1233")
def report(
    run: Annotated[str, typer.Argument(help="A run's folder, name or id.")],
    format: Annotated[
        str,
        typer.Option(help="html, json, png or svg (one file per picture), tensorboard, or mlflow."),
    ] = "html",
    alone: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A run of `independent` to compare with."),
    ] = None,
    common: Annotated[
        str | None,
        typer.Option("--global", metavar="RUN", help="A run of `fedavg` to compare with."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File, or folder of pictures. [default: in the run's folder]", callback=_place
        ),
    ] = None,
    runs_dir: RunsOption = None,
    federation: FederationOption = None,
) -> None:
    """Show a run: who trained with whom, since when, and whether it was worth it.

    Runs to compare with are found by themselves where they lie beside it with the same settings.
    """
    from coterie.server.report.command import print_report

    root = _whom(federation, None, None, runs_dir)[2]
    print_report(run, kind=format, root=root, alone=alone, common=common, out=out)


@app.command(epilog="Example:  coterie watch --web")
def watch(
    run: Annotated[
        str | None, typer.Argument(help="A run's folder, name or id. [default: the newest]")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page instead.")] = False,
    host: Annotated[str, typer.Option(help="With --web: address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=MAX_PORT, help="With --web; 0 takes any.")] = 8321,
    runs_dir: RunsOption = None,
    federation: FederationOption = None,
) -> None:
    """Watch a run that is recorded on this machine, in the terminal or in a browser. Read-only."""
    root = _whom(federation, None, None, runs_dir)[2]
    if web:
        from coterie.server.report.web import serve

        serve(run, root=root, host=host, port=port)
    else:
        from coterie.server.cli.commands import watch_run

        raise typer.Exit(watch_run(run, root))


def _resumed(run: str) -> dict[str, Any]:
    """The keys that resume a run: by its folder where it is one here, else by its name."""
    from coterie.server.paths import place

    folder = place(run)
    if run and (folder / "run.json").exists():
        folder = folder.resolve()
        return {"resume": folder.name, "runs-dir": str(folder.parent)}
    if not folder.name:
        raise typer.BadParameter(
            f"--resume takes a run's folder, its name or its id. Got {run!r}, where no run is "
            "recorded. `coterie runs` lists those that are."
        )
    return {"resume": folder.name}


def _with_folders(keys: dict[str, Any]) -> dict[str, Any]:
    """``alone`` as an absolute path where it is a run's folder here: the coordinator's is another.

    What is no folder here is a name or an id, which the coordinator looks up.
    """
    from coterie.server.paths import place

    folder = place(str(keys.get("alone", "")))
    if "alone" in keys and (folder / "run.json").exists():
        return keys | {"alone": str(folder.resolve())}
    return keys


def _pairs(settings: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` as Flower reads it: numbers and booleans in TOML, anything else is text.

    What a text is wanted for stays as it was typed, though it looks like a number: a run's id.
    """
    from coterie.server.runs.config import defaults

    texts = {key for key, default in defaults().items() if isinstance(default, str)}
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--set takes KEY=VALUE. Got {setting!r}.")
        read = _value(value)
        found[key] = value if key in texts and not isinstance(read, str) else read
    return found


def _value(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def main() -> None:
    """Run the command; errors that a person can mend are one line and an exit status."""
    from coterie.strategies.errors import EXIT_CONFIG, FederationError

    try:
        app()
    except FederationError as error:
        print(f"coterie: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"coterie: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
