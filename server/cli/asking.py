"""Commands that ask silos for something, in a run that keeps no models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coterie.server.cli import options
from coterie.server.cli.keys import keys_to_evaluate, keys_to_regress
from coterie.system.commandline import JsonOption

app = typer.Typer()


@app.command(epilog="Example:  coterie stats --task heart --min-silos 4")
def stats(
    task: Annotated[str, typer.Option(help="Task whose silos are asked for their data summary.")],
    min_silos: options.MinSilosOption = 2,
    wait: options.WaitOption = 120.0,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Summarise the silos' data before training.

    Each silo reports what its silo.toml allows: the number of training samples without a value, in
    each interval or category, and of each class. Small counts are hidden at the silo. The command
    writes a page that shows where silos differ, and warns of probable mistakes.
    """
    given = options.Given(federation, superlink, root_certificates, runs_dir)
    _ask({"strategy": "statistics", "task": task}, given, min_silos, wait, as_json)


def _ask(
    keys: dict[str, Any], given: options.Given, min_silos: int, wait: float, as_json: bool
) -> None:
    """Submit a run that asks the silos something, follow it, and exit with its status."""
    from coterie.server.cli.submitting import submit_and_follow
    from coterie.server.cli.waiting import Turn

    keys = {**keys, "min-silos": min_silos, "wait-for-silos": wait}
    raise typer.Exit(submit_and_follow(keys, given, Turn(given), detach=False, as_json=as_json))


@app.command(epilog="Example:  coterie evaluate hcct-1234 --min-silos 4")
def evaluate(
    models: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FILE",
            help="A complete run, all of whose groups' models are evaluated, or a model in a "
            ".safetensors file at the coordinator.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="Task of the models. [default: the run's]", show_default=False),
    ] = None,
    min_silos: options.MinSilosOption = 2,
    wait: options.WaitOption = 120.0,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate given models at every silo; nothing is trained.

    Every silo measures every model on its test data and reports what its silo.toml allows. The
    command writes a page with all figures, intervals, tests, calibration and allowed subgroups, and
    the reason for every figure that is missing.
    """
    given = options.Given(federation, superlink, root_certificates, runs_dir)
    keys = keys_to_evaluate(models, task, given.place().runs_dir)
    _ask(keys, given, min_silos, wait, as_json)


@app.command(epilog="Example:  coterie regress logistic --task heart --columns age,dose")
def regress(
    model: Annotated[
        str,
        typer.Argument(metavar="linear|logistic|poisson|cox|survival", help="Kind of regression."),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="Task of the silos. [default: that of --groups]", show_default=False),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A complete run, each of whose groups is fitted."),
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Columns, separated by commas. [default: all inputs]")
    ] = "",
    target: Annotated[str, typer.Option(help="Target, if the task has several.")] = "",
    at: Annotated[
        str, typer.Option(metavar="TIMES", help="Times of survival curves, separated by commas.")
    ] = "",
    each_alone: Annotated[
        bool, typer.Option("--each-alone", help="Also fit each silo alone, and compare the silos.")
    ] = False,
    secure: Annotated[
        bool, typer.Option("--secure", help="The coordinator sees only sums over groups of silos.")
    ] = False,
    min_silos: options.MinSilosOption = 2,
    wait: options.WaitOption = 120.0,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit a regression to all silos' rows, with standard errors.

    The coefficients, intervals and p-values are those of all training rows together. Every silo
    sends sums over its rows, if its silo.toml allows it. The command writes a page with a forest
    plot for each coefficient. Kind survival gives Kaplan-Meier estimates at times instead.
    """
    given = options.Given(federation, superlink, root_certificates, runs_dir)
    keys = keys_to_regress(groups, task, given.place().runs_dir)
    keys |= {"model": model, "columns": columns, "target": target, "each-alone": each_alone}
    keys |= {"at": at} if at else {}
    keys |= {"secure": True} if secure else {}
    _ask(keys, given, min_silos, wait, as_json)


@app.command(epilog="Example:  coterie contribution hcct-1234 --rounds 10")
def contribution(
    run: options.RunArgument,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Rounds for which each group is trained again.")
    ] = 10,
    min_silos: options.MinSilosOption = 2,
    wait: options.WaitOption = 120.0,
    federation: options.FederationOption = None,
    superlink: options.SuperLinkOption = None,
    root_certificates: options.CertificateOption = None,
    runs_dir: options.RunsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what each silo contributes to its group in a run.

    Every group is trained again from the start, as a whole and without each of its silos, twice
    each, and the models are compared on the other silos' test data. A silo of a group of m trains
    2 m models in every round. Groups of up to nine silos are also trained without each pair, which
    shows how the figures change if silos leave.
    """
    given = options.Given(federation, superlink, root_certificates, runs_dir)
    keys = keys_to_evaluate(run, None, given.place().runs_dir, strategy="contribution")
    _ask(keys | {"rounds": rounds}, given, min_silos, wait, as_json)
