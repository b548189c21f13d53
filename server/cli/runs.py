"""Commands for runs: start, stop, list and watch them, and inspect results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.server.cli import options
from coterie.server.cli.keys import KeysCommand, keys_given, keys_of, require_nothing_else, resumed
from coterie.system.commandline import MisuseError, host_option

app = typer.Typer()


@app.command(
    cls=KeysCommand,
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie run --rounds 20 --min-silos 9\n"
    "  coterie run hcct --alpha 50 --rounds 20 --min-silos 9 --set lr=0.1",
)
def run(
    context: typer.Context,
    strategy: Annotated[
        str | None,
        typer.Argument(
            help="hcct, fedavg, … See docs/how-to/choose-a-strategy.md. Without one it is auto, "
            "which tries the groups that others would form and keeps the best.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Continue a run after its last saved round."),
    ] = None,
    rounds: int | None = None,
    alpha: Annotated[str | None, typer.Option(metavar="NUMBER|auto")] = None,
    num_groups: Annotated[str | None, typer.Option("--groups", metavar="NUMBER|auto")] = None,
    c: Annotated[str | None, typer.Option("-c", metavar="NUMBER|auto")] = None,
    alone: Annotated[str | None, typer.Option(metavar="RUN")] = None,
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
        bool, typer.Option("--detach", help="Return once the run has its silos, or waits for them.")
    ] = False,
    queue: Annotated[
        bool,
        typer.Option(
            "--queue", help="Wait while another run of the same silos goes on; see `coterie runs`."
        ),
    ] = False,
    priority: Annotated[
        int | None,
        typer.Option(help="With --queue: the highest goes first. [default: 0]"),
    ] = None,
    shared_records: Annotated[
        bool,
        typer.Option(
            "--shared-records",
            help="This machine sees the coordinator's run records at the same path (a shared "
            "volume).",
        ),
    ] = False,
) -> None:
    """Submit a run to a SuperLink and follow it. Ctrl-C stops following; the run continues.

    Keys that the task of the silos has are given as --task.NAME VALUE.
    """
    root = options.Given(federation, superlink, root_certificates, runs_dir).place().runs_dir
    folder = None if root is None else str(root.resolve())
    keys = keys_of(settings, keys_given(context) | {"runs_dir": folder}, strategy)
    if resume is not None:
        require_nothing_else(resume, strategy, keys)
        keys |= resumed(resume)
    elif strategy is not None or "strategy" not in keys:
        keys |= {"strategy": strategy or "auto"}
    from coterie.server.cli.submitting import submit_and_follow
    from coterie.server.cli.waiting import Turn

    if priority is not None and not queue:
        raise MisuseError("--priority is for runs that wait: give --queue as well.")
    if keys.get("runs-dir") != folder:  # by --set, or with the folder to resume
        runs_dir = Path(keys["runs-dir"])
    given = options.Given(federation, superlink, root_certificates, runs_dir)
    turn = Turn(given, wanted=queue, priority=priority or 0)
    status = submit_and_follow(keys, given, turn, detach=detach, shared_records=shared_records)
    raise typer.Exit(status)


@app.command(epilog="Example:  coterie stats --task heart --min-silos 4")
def stats(
    task: Annotated[str, typer.Option(help="Task whose silos are asked.")],
    min_silos: Annotated[
        int, typer.Option(min=1, max=100_000, help="Silos to wait for before they are asked.")
    ] = 2,
    wait: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds to wait for them.")
    ] = 120.0,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
) -> None:
    """Ask silos what their data look like before anybody trains.

    Each tells as much as its silo.toml allows: how many training samples have no value, are in
    which interval or category, and of which class. Small numbers are hidden at the silo. The page
    that this writes shows where silos differ, and warns of what is probably wrong.
    """
    from coterie.server.cli.submitting import submit_and_follow
    from coterie.server.cli.waiting import Turn

    given = options.Given(federation, superlink, root_certificates, runs_dir)
    keys = {"strategy": "statistics", "task": task, "min-silos": min_silos, "wait-for-silos": wait}
    raise typer.Exit(submit_and_follow(keys, given, Turn(given), detach=False))


@app.command(epilog="Example:  coterie stop hcct-1234 --federation lung-study")
def stop(
    run: options.RunArgument,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
) -> None:
    """Stop a run at its SuperLink. It can be resumed after its last saved round.

    One that waits in the queue (q7) is taken out of it.
    """
    from coterie.server.cli.commands import stop_run
    from coterie.server.cli.waiting import is_entry, take_away

    given = options.Given(federation, superlink, root_certificates, runs_dir)
    if is_entry(run):
        take_away(run, given)
        return
    raise typer.Exit(stop_run(run, given))


@app.command(epilog="Example:  coterie status --superlink 127.0.0.1:9093")
def status(
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
) -> None:
    """Show a SuperLink's silos and runs, and a federation's queue."""
    from coterie.server.cli.commands import print_status

    print_status(options.Given(federation, superlink, root_certificates))


@app.command(epilog="Example:  coterie runs --runs-dir ./runs")
def runs(runs_dir: options.RunsOption = None, federation: options.FederationOption = None) -> None:
    """List the runs recorded on this machine, and the queue."""
    from coterie.server.cli.commands import print_runs
    from coterie.server.cli.waiting import print_queue
    from coterie.server.site.queue import Queue

    given = options.Given(federation, runs_dir=runs_dir)
    print_runs(given.place().runs_dir)
    made = given.made()
    print_queue([] if made is None else Queue(made.folder).entries())


@app.command(epilog="Example:  coterie watch --web")
def watch(
    run: Annotated[
        str | None,
        typer.Argument(help="Folder, name or id of the run. [default: the newest run]"),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a web page instead of using the terminal.")
    ] = False,
    host: Annotated[str, host_option("With --web: address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=options.MAX_PORT, help="With --web: port to listen on; 0 picks a free one."
        ),
    ] = 8321,
    new_token: Annotated[
        bool,
        typer.Option(
            "--new-token", help="With --web: replace the federation's token; the old one ends."
        ),
    ] = False,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
) -> None:
    """Watch a run that is recorded on this machine.

    In the terminal, or with --web in a browser. Watching changes nothing. The page asks for a
    token, which is in the address that the command prints: a federation's stays the same until it
    is replaced, without a federation each call has its own.
    """
    given = options.Given(federation, runs_dir=runs_dir)
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


@app.command(epilog="Example:  coterie report hcct-1234 --alone independent-1233")
def report(
    run: options.RunArgument,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="html, json, png or svg (one file per picture), tensorboard, mlflow or wandb.",
        ),
    ] = "html",
    alone: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run of the strategy `independent` to compare with."),
    ] = None,
    common: Annotated[
        str | None,
        typer.Option(
            "--global", metavar="RUN", help="Run of the strategy `fedavg` to compare with."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; a folder for pictures. [default: in the run's folder]",
            callback=options.expand,
        ),
    ] = None,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
) -> None:
    """Show who trained with whom in a run, and whether it was worth it.

    Runs to compare with are found automatically if they are recorded in the same place and have
    the same settings.
    """
    from coterie.server.report.command import print_report

    root = options.Given(federation, runs_dir=runs_dir).place().runs_dir
    print_report(run, kind=kind, root=root, alone=alone, common=common, out=out)


@app.command(epilog="Example:  coterie explain hcct-1234 --silo north-2 --round 5")
def explain(
    run: options.RunArgument,
    silo: Annotated[str | None, typer.Option(help="Explain only this silo.")] = None,
    number: Annotated[
        int | None,
        typer.Option("--round", help="Explain the groups after this round. [default: the last]"),
    ] = None,
    runs_dir: options.RunsOption = None,
    federation: options.FederationOption = None,
) -> None:
    """Explain why each silo is in its group, in a run of auto or hcct.

    For auto: the groups that were tried, what each silo measured, and how sure that is. For hcct:
    utilities, cosines, and the range of α in which the silo stays in its group.
    """
    from coterie.server.report.explain import print_explanation

    root = options.Given(federation, runs_dir=runs_dir).place().runs_dir
    print_explanation(run, silo=silo, number=number, root=root)
