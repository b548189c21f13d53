"""Commands that need no federation: the demo, simulations and comparisons on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.server.cli.keys import KeysCommand, keys_of
from coterie.server.cli.options import RunsOption, SetOption, file_argument, folder_option
from coterie.system.commandline import JsonOption, MisuseError
from coterie.system.terminal import aside

app = typer.Typer()


@app.command(epilog="Example:  coterie demo --seed 3 --alpha 50")
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Random seed of data, models and training.")] = 0,
    rounds: Annotated[int, typer.Option(min=6, max=500, help="Number of rounds.")] = 20,
    alpha: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="For the `hcct` strategy: preference for more data. Larger values form larger "
            "groups. [default: two thirds of the median silo's samples]",
        ),
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="Strategy: auto, hcct, fedgroup, fedcollab or fedgenp.")
    ] = "hcct",
    folder: Annotated[
        Path | None,
        folder_option("Folder for all files of the demo. [default: runs/demo-<time>]", "--workdir"),
    ] = None,
) -> None:
    """Watch ten silos find out who should train with whom.

    The silos run on this machine. The demo takes about a minute.
    """
    from rich.console import Console

    from coterie.server.study.demo import demo as run_demo

    run_demo(Console(), seed=seed, rounds=rounds, alpha=alpha, strategy=strategy, folder=folder)


@app.command(cls=KeysCommand, epilog="Example:  coterie simulate hundred.toml --processes 2")
def simulate(
    file: Annotated[
        Path, file_argument("Simulation file (TOML): task, silos and keys of the run.")
    ],
    settings: SetOption = None,
    processes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of real processes, connected by gRPC, among which the silos are divided. "
            "0: all silos are simulated in this process.",
        ),
    ] = 0,
    runs_dir: RunsOption = None,
    folder: Annotated[
        Path | None,
        folder_option("With --processes: folder for the logs and the silos' models.", "--workdir"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a federation on this machine, as described in a file.

    The same seed gives the same models. Keys given with --set override those in the file. --json
    prints the run's record.
    """
    if folder is not None and not processes:
        raise MisuseError(
            "--workdir is the folder for the processes' logs and models, and --processes is 0. "
            "Give --processes as well, or use --runs-dir to choose where the record goes."
        )
    from rich.console import Console

    from coterie.server.report.final import print_final
    from coterie.server.study.simulate import simulate as run_simulation

    console = Console(quiet=as_json)
    result = run_simulation(
        file,
        processes=processes,
        runs_dir=runs_dir,
        folder=folder,
        progress=aside(console),
        **keys_of(settings),
    )
    print_final(console, result.folder)
    if as_json:
        print((result.folder / "run.json").read_text(encoding="utf-8"))


@app.command(
    epilog="Example:  coterie compare benchmarks/compare/concept.toml --workdir runs/concept"
)
def compare(
    file: Annotated[Path, file_argument("Comparison file (TOML): silos, seeds and strategies.")],
    data: Annotated[Path | None, folder_option("Folder that contains the data.")] = None,
    folder: Annotated[
        Path | None,
        folder_option(
            "Folder for the records and the result table. A comparison already in it is continued.",
            "--workdir",
        ),
    ] = None,
    processes: Annotated[
        bool,
        typer.Option(
            "--separate-processes",
            help="Run the silos as separate processes that communicate over gRPC.",
        ),
    ] = False,
) -> None:
    """Run several strategies on the same silos and seeds, and rank them."""
    from rich.console import Console

    from coterie.server.study.compare import compare as run_compare
    from coterie.server.study.compare import print_comparison
    from coterie.strategies.errors import EXIT_RUN, FederationError

    console = Console()
    result = run_compare(file, data=data, folder=folder, processes=processes, progress=console)
    print_comparison(console, result)
    if result.failed:
        raise FederationError(
            f"{len(result.failed)} of {len(result.rows) + len(result.failed)} strategies could "
            f"not be run: {', '.join(result.failed)}. The table in {result.folder} shows the "
            "others.",
            exit_code=EXIT_RUN,
        )
