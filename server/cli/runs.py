"""Commands for runs: start, stop, list and watch them, and inspect results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.server.cli import asking, options
from coterie.server.cli.keys import (
    KeysCommand,
    keys_from,
    keys_given,
    keys_of,
    keys_to_go_on,
    named_parent,
)
from coterie.strategies.registry import DEFAULT
from coterie.system.commandline import Group, JsonOption, MisuseError, given_before, host_option

LOOPBACK, PAGE_PORT = "127.0.0.1", 8321
app = typer.Typer()
recorded = typer.Typer(
    name="coterie runs",
    cls=Group,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command(
    cls=KeysCommand,
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie run --rounds 20 --min-silos 9\n"
    "  coterie run hcct --alpha 50 --rounds 20 --min-silos 9 --set lr=0.1\n"
    "  coterie run resume hcct-1234\n"
    "  coterie run continue hcct-1234 --rounds 10",
)
def run(
    context: typer.Context,
    strategy: Annotated[
        str | None,
        typer.Argument(
            help="Name of the strategy, for example hcct or fedavg, or module:Class of your own. "
            "[default: auto, which tries "
            "the groups that other strategies would form and keeps the best]",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Continue a run after its last saved round; the same as `coterie run resume RUN`.",
        ),
    ] = None,
    more: Annotated[
        str | None,
        typer.Option(
            "--continue",
            metavar="RUN",
            help="Add --rounds to a complete run, with its groups and state; the same as "
            "`coterie run continue RUN`.",
        ),
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN|FILE",
            help="Begin from the groups and models of a complete run, with its keys unless others "
            "are given; or from the model in a .safetensors file.",
        ),
    ] = None,
    rounds: int | None = None,
    alpha: Annotated[str | None, typer.Option(metavar="NUMBER|scaled|auto")] = None,
    num_groups: Annotated[str | None, typer.Option("--groups", metavar="NUMBER|auto")] = None,
    c: Annotated[str | None, typer.Option("--size-weight", metavar="NUMBER|auto")] = None,
    baseline_run: Annotated[str | None, typer.Option(metavar="RUN")] = None,
    seed: int | None = None,
    task: str | None = None,
    min_silos: int | None = None,
    secure: Annotated[bool | None, typer.Option("--secure", show_default=False)] = None,
    settings: options.SetOption = None,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Return once the run has its silos or has ended, after ten seconds at most.",
        ),
    ] = False,
    queue: Annotated[
        bool,
        typer.Option(
            "--queue",
            help="Wait in the queue while another run with the same silos is active; see `coterie "
            "runs`.",
        ),
    ] = False,
    priority: Annotated[
        int | None,
        typer.Option(
            help="With --queue: priority of the run. The highest starts first. [default: 0]"
        ),
    ] = None,
    shared_records: Annotated[
        bool,
        typer.Option(
            "--shared-records",
            help="The coordinator's run records are at the same path on this machine (a shared "
            "volume).",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --detach: print one JSON document with the run's id."),
    ] = False,
) -> None:
    """Submit a run to a SuperLink and follow it. Ctrl-C stops following; the run continues.

    Keys of the silos' task are given as --task.NAME VALUE.
    """
    if as_json and not detach:
        raise MisuseError("--json prints the id of a run that is not followed: give --detach.")
    root = options.Given(federation, superlink, root_certificates, runs_dir).place().runs_dir
    folder = None if root is None else str(root.resolve())
    keys = keys_of(settings, keys_given(context) | {"runs_dir": folder}, strategy)
    if resume is not None or more is not None:
        keys = keys_to_go_on(resume, more, strategy, keys)
    elif parent is not None and (inherited := keys_from(parent, root)):
        keys = inherited | keys | ({} if strategy is None else {"strategy": strategy})
    elif strategy is not None or "strategy" not in keys:
        keys |= {"strategy": strategy or DEFAULT}
    if parent is not None:
        keys |= {"parent": named_parent(parent)}
    from coterie.server.cli.submitting import submit_and_follow
    from coterie.server.cli.waiting import Turn

    if priority is not None and not queue:
        raise MisuseError("--priority needs --queue.")
    if keys.get("runs-dir") != folder:  # by --set, or with the folder to resume
        runs_dir = Path(keys["runs-dir"])
    given = options.Given(federation, superlink, root_certificates, runs_dir)
    turn = Turn(given, wanted=queue, priority=priority or 0)
    raise typer.Exit(
        submit_and_follow(
            keys, given, turn, detach=detach, shared_records=shared_records, as_json=as_json
        )
    )


app.add_typer(asking.app)


@app.command(epilog="Example:  coterie status --superlink 127.0.0.1:9093")
def status(
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the SuperLink's silos and runs, and the queue."""
    from coterie.server.cli.commands import print_status

    print_status(options.Given(federation, superlink, root_certificates), as_json=as_json)


@recorded.callback(epilog="Example:  coterie runs --runs-dir ./runs")
def runs(
    context: typer.Context,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show each run below the one that it began from.")
    ] = False,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the recorded runs and the queue.

    The commands below show, watch, stop or report on one run.
    """
    if context.invoked_subcommand is not None:
        given_before(context)
        return
    from coterie.server.cli.commands import print_runs
    from coterie.server.site.queue import Queue

    given = options.Given(federation, runs_dir=runs_dir)
    made = given.made()
    queue = [] if made is None else Queue(made.folder).entries()
    print_runs(given.place().runs_dir, queue, tree=tree, as_json=as_json)


@recorded.command(epilog="Example:  coterie runs show hcct-1234")
def show(
    run: options.RunArgument,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show strategy, status, rounds and mean error of a run."""
    from coterie.server.cli.commands import print_run

    print_run(run, options.Given(federation, runs_dir=runs_dir).place().runs_dir, as_json=as_json)


@recorded.command(epilog="Example:  coterie runs watch --web")
def watch(
    run: Annotated[
        str | None, typer.Argument(help="Folder, name or id of the run. [default: the newest run]")
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a web page instead of using the terminal.")
    ] = False,
    host: Annotated[str, host_option("With --web: address to listen on.")] = LOOPBACK,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=options.MAX_PORT, help="With --web: port to listen on. 0: a free port."
        ),
    ] = PAGE_PORT,
    new_token: Annotated[
        bool,
        typer.Option(
            "--new-token",
            help="With --web: replace the federation's token. The old token stops working.",
        ),
    ] = False,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
) -> None:
    """Watch a run that is recorded on this machine.

    The run is shown in the terminal, or with --web in a browser. Watching changes nothing. The page
    requires a token, which is part of the address that the command prints. In a federation the
    token stays the same until it is replaced; otherwise each call creates a new one.
    """
    given = options.Given(federation, runs_dir=runs_dir)
    if not web and (host != LOOPBACK or port != PAGE_PORT or new_token):
        raise MisuseError("--host, --port and --new-token are for the page: give --web as well.")
    if web:
        from coterie.server.report.web import serve
        from coterie.server.site.federation import find
        from coterie.server.site.people import web_token

        made = find(federation)
        token = "" if made is None else web_token(made, new=new_token)
        serve(run, root=given.place().runs_dir, host=host, port=port, token=token)
    else:
        from coterie.server.cli.commands import watch_run

        raise typer.Exit(watch_run(run, given))


@recorded.command(epilog="Example:  coterie runs stop hcct-1234 --federation lung-study")
def stop(
    run: options.RunArgument,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
) -> None:
    """Stop a run. It can be resumed after its last saved round.

    A run that waits in the queue (for example q7) is removed from it.
    """
    from coterie.server.cli.commands import stop_run
    from coterie.server.cli.waiting import is_entry, take_away

    given = options.Given(federation, superlink, root_certificates, runs_dir)
    if is_entry(run):
        take_away(run, given)
        return
    raise typer.Exit(stop_run(run, given))


@recorded.command(
    epilog="Example:  coterie runs report hcct-1234 --baseline-local independent-1233"
)
def report(
    run: options.RunArgument,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format: html, json, png or svg (one file per picture), tensorboard, mlflow or "
            "wandb.",
        ),
    ] = "html",
    alone: Annotated[
        str | None,
        typer.Option(
            "--baseline-local",
            metavar="RUN",
            help="Run of local training to compare with: `independent`, or trees alone.",
        ),
    ] = None,
    common: Annotated[
        str | None,
        typer.Option(
            "--baseline-global",
            metavar="RUN",
            help="Run of one model to compare with: `fedavg`, or trees of all silos.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; for pictures, a folder. [default: in the run's folder]",
            callback=options.expand,
        ),
    ] = None,
    dossier: Annotated[
        bool,
        typer.Option(
            "--dossier",
            help="Write technical documentation instead: the facts under the headings of the AI "
            "Act and of an impact assessment, and blanks.",
        ),
    ] = False,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
) -> None:
    """Show who trained with whom, and whether it was worth it.

    Runs to compare with are found automatically if they are recorded in the same folder and have
    the same settings.
    """
    from coterie.server.report.command import print_report, write_dossier

    root = options.Given(federation, runs_dir=runs_dir).place().runs_dir
    if dossier:
        if kind != "html" or alone or common:
            raise MisuseError("--dossier goes with no --format and no baseline.")
        print(write_dossier(run, root=root, out=out))
        return
    print_report(run, kind=kind, root=root, alone=alone, common=common, out=out)


@recorded.command(epilog="Example:  coterie runs explain hcct-1234 --silo north-2 --round 5")
def explain(
    run: options.RunArgument,
    silo: Annotated[str | None, typer.Option(help="Silo to explain. [default: all silos]")] = None,
    number: Annotated[
        int | None,
        typer.Option("--round", help="Round whose groups to explain. [default: the last]"),
    ] = None,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why each silo is in its group.

    For the `auto` strategy: the groups that were tried, each silo's measurements and their
    uncertainty. For the `hcct` strategy: utilities, cosines, and the range of α in which the silo
    stays in its group. For `fedcollab`: error bounds and distances. For `fedgroup`: cosines.
    """
    from coterie.server.report.explain import print_explanation

    root = options.Given(federation, runs_dir=runs_dir).place().runs_dir
    print_explanation(run, silo=silo, number=number, root=root, as_json=as_json)
