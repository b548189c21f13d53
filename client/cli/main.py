"""The commands of a silo, ``coterie silo …``. None of them imports the server's code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.client.cli import approve, folder, kept, versions, watch
from coterie.client.cli.options import (
    PATIENCE_S,
    AppOption,
    ModOption,
    PatienceOption,
    SetOption,
    VerboseOption,
    option,
)
from coterie.system.commandline import (
    EXIT_CONFIG,
    EXIT_LINK,
    Group,
    LogFormatOption,
    MetricsOption,
    MisuseError,
    address_option,
    given,
    group,
)

if TYPE_CHECKING:
    from coterie.tasks.base import Option

WITH_FOLDER = ("home", "app", "mod", "patience", "metrics", "log_format", "verbose")
"""Options of ``coterie silo serve`` that go with a silo's folder."""


class _Silo(Group):
    def exit_status(self, error: Exception) -> int | None:
        from coterie.client.home.settings import SettingsError
        from coterie.tasks.base import TaskError
        from coterie.wire.enrolment import EnrolmentError

        if isinstance(error, SettingsError | TaskError | EnrolmentError):
            return EXIT_CONFIG
        from coterie.engine.port import LinkError

        return EXIT_LINK if isinstance(error, LinkError) else super().exit_status(error)


app = group(
    *("coterie silo", "Take part in a federation with this machine's data."),
    *("coterie silo init --name hospital-b", _Silo),
)
serving = typer.Typer()


@serving.command(
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie silo serve --home hospital-b\n"
    "  coterie silo serve --name north --task my_task:Task --set data=/data/north\n"
    "  coterie silo serve --simulation hundred.toml --partitions 0-49\n"
    "  coterie silo serve --app my_package.client:app --partitions 0-9/10"
)
def serve(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Option(help="Name of the silo, unique in the federation.")
    ] = None,
    partitions: Annotated[
        str, option("FIRST-LAST/TOTAL", "Silos of a simulation to serve, all in this process.")
    ] = "",
    simulation: Annotated[
        Path | None, option("FILE", "Simulation file (TOML): task, options and number of silos.")
    ] = None,
    task: Annotated[
        str,
        typer.Option(help="Task: the name of a built-in task, a .toml file, or module:attribute."),
    ] = "digits",
    options: SetOption = None,
    app: AppOption = "",
    mod: ModOption = None,
    superlink: Annotated[
        str, address_option("Address of the SuperLink's Fleet API.", 9092)
    ] = "127.0.0.1:9092",
    root_certificates: Annotated[
        Path | None,
        option("FILE", "CA certificate (PEM). Without it, the connection does not use TLS."),
    ] = None,
    unlabelled: Annotated[
        str,
        option(
            "FILE",
            "File or folder of the silo's samples, which have no labels yet, in a form that "
            "`coterie silo predict` reads. The silo receives a model to predict with, and trains "
            "nothing.",
        ),
    ] = "",
    alpha: Annotated[
        float | None,
        typer.Option(
            help="For the `hcct` strategy: this silo's own preference for more data. [default: "
            "the run's]"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device on which to train: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads. 0: PyTorch's choice.")] = 1,
    home: Annotated[
        str,
        option(
            "FOLDER",
            "The silo's folder. [default: $COTERIE_SILO, or the current folder]. With --name: the "
            "folder in which it keeps its files; without it, the silo keeps nothing.",
        ),
    ] = "",
    share_label_counts: Annotated[
        bool,
        typer.Option(
            "--share-label-counts",
            help="Let the coordinator learn how many training samples of each label this silo "
            "has. Every silo learns the share of each label over all silos. Only FedGen needs "
            "this.",
        ),
    ] = False,
    share_column_sums: Annotated[
        bool,
        typer.Option(
            "--share-column-sums",
            help="Let the coordinator learn the count, mean and standard deviation of each "
            "numeric column and real-valued target. Every silo learns them over all silos that "
            'allow it. Tasks with scale = "federation" need this.',
        ),
    ] = False,
    share_statistics: Annotated[
        bool,
        typer.Option(
            "--share-statistics",
            help="Let the coordinator learn how many training samples of inputs and targets lie "
            "in each interval or category. Counts from 1 to 9 are hidden. `coterie stats` asks "
            "for this.",
        ),
    ] = False,
    share_sums: Annotated[
        bool,
        typer.Option(
            "--share-sums",
            help="Let the coordinator learn exact sums over all training rows, by which models are "
            "fitted: `coterie regress`, strategy trees.",
        ),
    ] = False,
    patience: PatienceOption = PATIENCE_S,
    metrics: MetricsOption = "",
    log_format: LogFormatOption = "",
    verbose: VerboseOption = False,
) -> None:
    """Serve a federation with this machine's data.

    The command ends with Ctrl-C or SIGTERM. The silo's settings and key are in its folder, --home,
    made by init and join. With --app, a Flower ClientApp that is installed on this machine
    answers messages, instead of the task in silo.toml.

    With --name, --partitions or --simulation, the options take the place of a folder's settings.
    Use this on one machine, or on a network that you trust.
    """
    if mod and not app:
        raise MisuseError("--mod requires --app.")
    from coterie.client.resident.serve import serve as serve_silos

    serving = partial(
        serve_silos, mods=mod or [], verbose=verbose, metrics=metrics, log_format=log_format
    )
    if name is None and not partitions and simulation is None:
        _require_no_settings(context)
        from coterie.client.home.files import folder_of

        serving(app or None, folder_of(Path(home) if home else None), patience_s=patience)
        return
    from coterie import wire
    from coterie.client.home.policy import STATISTICS, Policy
    from coterie.client.home.settings import SiloSettings, options_of

    several = bool(partitions or simulation)
    _check_together(name, app, simulation, several=several, unlabelled=unlabelled)
    data: Mapping[str, Option] = options_of(options or [])
    if app:
        from coterie.client.resident.foreign import typed

        data = typed(data)
    settings = SiloSettings(
        name="silo" if name is None else name,
        task=task,
        options=data,
        alpha=alpha,
        device=device,
        threads=threads,
        home=home,
        unlabelled=unlabelled,
        policy=Policy(
            label_counts=share_label_counts,
            column_sums=share_column_sums,
            statistics=STATISTICS[:2] if share_statistics else (),
            sums=wire.SUMMED if share_sums else (),
        ),
    )
    from coterie.client.resident.virtual import settings_of
    from coterie.engine.port import Connection

    connection = Connection(superlink, root_certificates, patience_s=patience)
    silos = (
        settings_of(settings, partitions, simulation, for_app=bool(app)) if several else [settings]
    )
    serving(app or None, silos, connection)


def _require_no_settings(context: typer.Context) -> None:
    """Refuse options that a silo's folder sets; raise ``MisuseError``."""
    for parameter, hint in given(context):
        if parameter not in WITH_FOLDER:
            raise MisuseError(
                f"{hint} replaces a setting of a silo's folder: give --name, --partitions or "
                "--simulation as well, or set it in silo.toml."
            )


def _check_together(
    name: str | None, app: str, simulation: Path | None, *, several: bool, unlabelled: str
) -> None:
    """Refuse options that do not go together; raise ``SettingsError``."""
    from coterie.client.home.settings import SettingsError

    if several and name is not None:
        raise SettingsError(
            "--name applies to one silo; silos of a simulation are named silo-<number>."
        )
    if app and simulation:
        raise SettingsError(
            "--simulation cannot be combined with --app. To serve an app as several silos, use "
            "--partitions FIRST-LAST/TOTAL: each gets its partition-id and num-partitions."
        )
    if unlabelled and (several or app):
        raise SettingsError(
            "--unlabelled applies to one silo that serves its task: leave out --partitions, "
            "--simulation and --app."
        )


for _part in (folder.app, serving, approve.app, kept.app, versions.app, watch.app):
    app.add_typer(_part)
