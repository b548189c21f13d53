"""Commands for a silo's records: its ledger, the models of its runs, and its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.client.cli.options import HomeOption, SetOption, option
from coterie.system.commandline import JsonOption, MisuseError, print_json
from coterie.system.logs import show_progress

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.client.ledger import Total
    from coterie.tasks.base import Option

app = typer.Typer()
OUTPUT = ("--output", "-o")

ModelOption = Annotated[
    str,
    option(
        "RUN|FILE",
        "Model to use: RUN for the model kept after that run, personalised/RUN for the silo's "
        "personalised one, or a file. [default: the model in use, else the newest]",
    ),
]
TaskOption = Annotated[
    str,
    typer.Option(help="Task to load, if its name or file has changed since the model was trained."),
]
SamplesOption = Annotated[
    Path | None,
    option(
        "PATH",
        "File or folder of samples, in a format that the task reads. [default: the silo's own "
        "test data]",
        "--input",
    ),
]
SensitivityOption = Annotated[
    float | None,
    option(
        "SHARE",
        "Choose the highest threshold with at least this sensitivity, above 0 and at most 1. "
        "[default: the threshold with the greatest sensitivity + specificity]",
    ),
]


@app.command(epilog="Example:  coterie silo ledger --home hospital-b --last 5")
def ledger(
    home: HomeOption = None,
    run: Annotated[str, option("RUN", "Show only this run.")] = "",
    last: Annotated[
        int, option("N", "Also show the last N entries in full. 0: none.", least=0)
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what left this silo, by run and type of message.

    Each line gives the number of replies and refusals, the bytes and number of arrays, and the
    names of the metrics.
    """
    from coterie.client.home.files import folder_of
    from coterie.client.home.settings import SettingsError
    from coterie.client.ledger import ledger_of, read, totals

    folder = folder_of(home)
    if not ledger_of(folder).exists():
        raise SettingsError(
            f"there is no {ledger_of(folder)}: nothing has left this silo yet, or --home names "
            "another folder."
        )
    if as_json:
        print_json(list(read(folder, run=run)))
        return
    _print_totals(totals(read(folder, run=run)), ledger_of(folder))
    if last:
        for entry in list(read(folder, run=run))[-last:]:
            _console().print_json(json.dumps(entry))


def _console() -> Console:
    from rich.console import Console

    from coterie.system.terminal import wide

    return wide(Console())


def _span(rounds: tuple[int, int]) -> str:
    first, last = rounds
    return str(first) if first == last else f"{first}–{last}"


def _print_totals(found: Mapping[tuple[str, str], Total], file: Path) -> None:
    from coterie.system.terminal import WITHOUT_TERMINAL, print_table, width_of, wrapped
    from coterie.wire import TRAIN

    console = _console()
    room = console.width if console.is_terminal else WITHOUT_TERMINAL

    header = ("run", "message", "rounds", "replies", "refused", "bytes", "arrays", "values")
    rows = [
        (
            *(run or "–", kind, _span(total.rounds), total.messages, total.refused),
            *(f"{total.bytes:,}", len(total.tensors)),
            "\n".join(wrapped([", ".join(sorted(total.values)) or "–"], room)),
        )
        for (run, kind), total in found.items()
    ]
    print_table(console, header, rows, folding=("run", "message", "values"))
    for (run, kind), total in found.items():
        for why, rounds in total.apart.items() if kind == TRAIN else ():
            said = f"{run}, rounds {_span(rounds)}: quarantined: {why}"
            console.print(said, markup=False, soft_wrap=True)
        for asked, groups in total.asked.items():
            said = f"{run}, {kind}: {asked}; group: {', '.join(groups)}"
            for line in wrapped([said], width_of(sys.stdout)):
                console.print(line, markup=False, soft_wrap=True)
    replies, size = sum(t.messages for t in found.values()), sum(t.bytes for t in found.values())
    text = f"{replies} replies, {size:,} bytes of arrays in total: {file}"
    console.print(text, markup=False, soft_wrap=True)


@app.command(epilog="Example:  coterie silo predict --home north --input new.npz -o out.csv")
def predict(
    home: HomeOption = None,
    model: ModelOption = "",
    samples: SamplesOption = None,
    output: Annotated[
        Path | None,
        option(
            "FILE", "CSV file to write; for masks, a folder. [default: standard output]", *OUTPUT
        ),
    ] = None,
    task: TaskOption = "",
    options: SetOption = None,
) -> None:
    """Predict with a model that this silo kept after a run.

    The predictions are written as CSV; masks are written as one file per sample, into a folder.
    Without --input, the model predicts the silo's own test data, and its metrics on them are shown
    with 95% intervals. For a silo without labels, it predicts the samples that the silo's settings
    name. The temperature and thresholds of `coterie silo calibrate` are applied.
    """
    from coterie.client.cli.answers import headline, summary, write_csv, write_masks
    from coterie.client.cli.predict import answer, load_kept
    from coterie.system.files import replacing_named
    from coterie.system.terminal import LEGIBLE
    from coterie.tasks.base import TaskError
    from coterie.tasks.problems import Masks
    from coterie.wire import counted

    show_progress()
    asked = which(home, model, task, options)
    kept = load_kept(asked.file, source=asked.task)
    masks = isinstance(kept.task.problem, Masks)
    if masks and output is None:
        raise TaskError(
            f"task {kept.task.name!r} answers with masks, one file per sample. Name a folder "
            "with --output."
        )
    samples = samples or asked.samples  # it has no test data of its own
    answers = answer(kept, samples, options=asked.options, workers=asked.workers)
    if output is None:
        write_csv(answers, sys.stdout)
    elif masks:
        write_masks(answers, output)
    else:
        with (
            replacing_named(output) as file,
            file.open("w", encoding="utf-8", errors=LEGIBLE, newline="") as out,
        ):
            write_csv(answers, out)
    how = "alone" if kept.card.alone else kept.card.trained
    said = [counted(len(answers.values), "sample"), f"model {asked.file}, trained {how}"]
    print("; ".join([*said, *filter(None, [headline(answers)])]), file=sys.stderr)
    print(*summary(answers), sep="\n", file=sys.stderr)


@dataclass(frozen=True)
class Which:
    """A saved model, and how to load it; ``samples``: the silo's, if they have no labels."""

    folder: Path
    file: Path
    task: str
    options: Mapping[str, Option]
    workers: int
    samples: Path | None = None


def which(home: Path | None, model: str, task: str, options: list[str] | None) -> Which:
    """Return a saved model, and its task and options as the silo's settings have them now."""
    from coterie.client.cli.predict import find_model, require_built_in
    from coterie.client.home.files import folder_of
    from coterie.client.home.folder import Home
    from coterie.client.home.settings import options_of
    from coterie.client.home.studies import study_of
    from coterie.client.work.card import read_card
    from coterie.client.work.session import parted
    from coterie.tasks import load_task

    folder, workers, unlabelled = folder_of(home), 0, None
    chosen: Mapping[str, Option] = options_of(options or [])
    if (folder / "silo.toml").exists():
        own = study_of(Home(folder).settings(), read_card(find_model(folder, model)).task)
        task, workers = task or own.task, own.workers
        own = replace(own, options={**own.options, **chosen})
        chosen = parted(load_task(task), own).options
        unlabelled = Path(own.unlabelled) if own.unlabelled else None
    elif not task:
        require_built_in(read_card(find_model(folder, model)))
    return Which(folder, find_model(folder, model), task, chosen, workers, unlabelled)


@app.command(epilog="Example:  coterie silo calibrate --home north --sensitivity 0.9")
def calibrate(
    home: HomeOption = None,
    model: ModelOption = "",
    sensitivity: SensitivityOption = None,
    task: TaskOption = "",
    options: SetOption = None,
) -> None:
    """Fit a kept model's probabilities to this silo's data.

    A temperature makes the probabilities match how often the model is right here. With two classes,
    or with labels, a threshold sets the probability above which the answer is yes (the second
    class). Both are fitted on the run's validation data, otherwise on half of the test data, and
    saved in the model's card. From then on, predict and export use them.
    """
    from coterie.client.cli.answers import figure_lines
    from coterie.client.cli.calibrate import calibrate, keep_calibration
    from coterie.client.cli.predict import load_kept

    if sensitivity is not None and not 0 < sensitivity <= 1:
        raise MisuseError(f"--sensitivity must be above 0 and at most 1. Got {sensitivity:g}.")
    asked = which(home, model, task, options)
    kept = load_kept(asked.file, source=asked.task)
    found = calibrate(kept, options=asked.options, sensitivity=sensitivity, workers=asked.workers)
    keep_calibration(asked.file, kept.card, found.calibration)
    print(f"model {asked.file}", found.calibration.text(), *found.notes, sep="\n")
    print(f"on {found.calibration.measured} other test samples, uncalibrated:")
    print(*figure_lines(kept.card, found.before), "after:", sep="\n")
    print(*figure_lines(kept.card, found.after), sep="\n")


@app.command(epilog="Example:  coterie silo export --home north --model RUN -o model.onnx")
def export(
    to: Annotated[
        Path,
        option(
            "FILE",
            "File to write: model.onnx, model.pt2 for PyTorch, or model.json for XGBoost (trees).",
            *OUTPUT,
        ),
    ],
    home: HomeOption = None,
    model: ModelOption = "",
    task: TaskOption = "",
    options: SetOption = None,
) -> None:
    """Export a kept model for use without coterie.

    The command also writes a card, FILE.json and FILE.md: inputs, outputs, the decision rule, and
    the model's metrics on this silo's test data. The exported file is checked against the model on
    a few samples. ONNX requires `pip install 'coterie[export]'`; XGBoost's JSON is checked if
    xgboost is installed.
    """
    from coterie.client.cli.export import export
    from coterie.client.cli.predict import load_kept
    from coterie.wire import counted

    asked = which(home, model, task, options)
    kept = load_kept(asked.file, source=asked.task)
    written = export(kept, to, options=asked.options)
    print(*written.files, sep="\n")
    samples = (
        "from this silo's test data"
        if written.own
        else "generated, because the silo's data are not available"
    )
    said = (
        f"checked on {counted(written.checked, 'sample')} {samples}: it gives the model's answers "
        f"(largest difference {written.apart:.1g})"
        if written.checked
        else "not checked, because xgboost is not installed"
    )
    print(f"model {asked.file}; {said}", file=sys.stderr)
    calibration = kept.card.calibration
    if calibration is not None:
        print(f"calibrated: {calibration.text()}", file=sys.stderr)


@app.command(epilog="Example:  coterie silo report --home /data/coterie")
def report(
    home: HomeOption = None,
    run: Annotated[str | None, option("RUN", "Run to report on. [default: the last]")] = None,
    out: Annotated[
        Path | None,
        option(*("FILE", "File to write. [default: report.html in the silo's folder]", *OUTPUT)),
    ] = None,
    dossier: Annotated[
        bool,
        typer.Option(
            "--dossier",
            help="Write this site's part of an impact assessment instead, dossier.md: its "
            "facts, and blanks.",
        ),
    ] = False,
) -> None:
    """Report on this silo's own runs.

    The page shows the silo's error, the size of its group and what left the silo. It only uses
    files in the silo's folder. The dossier covers all runs, unless --run names one.
    """
    from coterie.client.cli.report import build_page, read_silo
    from coterie.client.home.files import folder_of
    from coterie.pictures.page import render
    from coterie.system.files import write_named
    from coterie.system.terminal import LEGIBLE

    folder = folder_of(home)
    if dossier:
        from coterie.client.cli.dossier import build_dossier

        target = out or folder / "dossier.md"
        write_named(target, build_dossier(folder, run or "").encode(errors=LEGIBLE))
        print(target)
        return
    target, page = out or folder / "report.html", build_page(read_silo(folder, run), folder)
    print(f"Drawing the report of {folder} …", file=sys.stderr, flush=True)
    write_named(target, render(page).encode(errors=LEGIBLE))
    print(target)
