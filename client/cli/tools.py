"""What people at a silo do with what it keeps: ``coterie silo ledger`` and ``predict``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.client.home.folder import Home, add_home, folder_of
from coterie.system.terminal import wide
from coterie.tasks.base import Option


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the two commands to those of ``coterie silo``."""
    formatting = argparse.RawDescriptionHelpFormatter

    ledger = commands.add_parser(
        "ledger",
        help="what left this silo",
        description="Show what left this silo: per run and kind of message how many, how many "
        "bytes of arrays, and which arrays and metrics.",
        epilog="example:  coterie silo ledger --home hospital-b --last 5",
        formatter_class=formatting,
    )
    add_home(ledger)
    ledger.add_argument("--run", default="", help="only this run")
    ledger.add_argument("--last", type=int, default=0, metavar="N", help="show the last N in full")
    ledger.add_argument("--json", action="store_true", help="the entries as they are, one a line")
    ledger.set_defaults(work=_ledger)

    predict = commands.add_parser(
        "predict",
        help="ask a model that this silo kept",
        description="Ask a model that this silo kept after a run, and write its answers as CSV. "
        "Without --input it answers for the silo's own test data and says how often it is wrong.",
        epilog="example:  coterie silo predict --home hospital-b --input new.npz --output out.csv",
        formatter_class=formatting,
    )
    add_home(predict)
    predict.add_argument(
        "--model",
        default="",
        metavar="RUN|FILE",
        help="e.g. personalised/RUN [default: the newest]",
    )
    predict.add_argument(
        "--input", type=Path, help="a file or folder of samples that the task reads"
    )
    predict.add_argument("--output", type=Path, help="a CSV file [default: standard output]")
    predict.add_argument("--task", default="", help="the task, if it is called otherwise today")
    predict.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the task, as for `coterie silo`",
    )
    predict.set_defaults(work=_predict)


def _ledger(given: argparse.Namespace) -> int:
    from coterie.client.home.settings import SettingsError
    from coterie.client.resident.ledger import ledger_of, read, totals

    home = folder_of(given.home)
    if not ledger_of(home).exists():
        raise SettingsError(
            f"there is no ledger in {home}. A silo keeps one in its folder (--home) once "
            "something left it."
        )
    if given.json:
        for entry in read(home, run=given.run):
            print(json.dumps(entry))
        return 0
    console = wide(Console())
    table = Table(box=None, padding=(0, 1))
    for column in ("run", "message", "rounds", "replies", "refused", "bytes", "arrays", "values"):
        is_text = column in ("run", "message", "values")
        table.add_column(column, overflow="fold", no_wrap=not is_text)
    found = totals(read(home, run=given.run))
    for (run_name, kind), total in found.items():
        first, last = total.rounds
        table.add_row(
            Text(run_name or "–"),
            kind,
            str(first) if first == last else f"{first}–{last}",
            str(total.messages),
            str(total.refused),
            f"{total.bytes:,}",
            str(len(total.tensors)),
            Text(", ".join(sorted(total.values)) or "–"),
        )
    console.print(table)
    entries, size = sum(t.messages for t in found.values()), sum(t.bytes for t in found.values())
    console.print(
        f"{entries} replies, {size:,} bytes of arrays in all: {ledger_of(home)}",
        markup=False,
        soft_wrap=True,
    )
    if given.last:
        for entry in list(read(home, run=given.run))[-given.last :]:
            console.print_json(json.dumps(entry))
    return 0


def _predict(given: argparse.Namespace) -> int:
    from coterie.client.cli.predict import find_model, predict, write_csv
    from coterie.client.home.card import CardError
    from coterie.client.home.settings import SettingsError, options_of

    folder = folder_of(given.home)
    source = given.task
    options: Mapping[str, Option] = options_of(given.options)
    if (folder / "silo.toml").exists():
        own = Home(folder).settings()
        source, options = source or own.task, {**own.options, **options}
    try:
        file = find_model(folder, given.model)
        answers = predict(file, given.input, source=source, options=options)
    except CardError as error:
        raise SettingsError(str(error)) from None
    if given.output is None:
        write_csv(answers, sys.stdout)
    else:
        with given.output.open("w", encoding="utf-8", newline="") as out:
            write_csv(answers, out)
    said = f"{len(answers.classes)} samples; model {file}, trained {answers.card.trained}"
    if answers.labels is not None:
        wrong = float((answers.classes != answers.labels).mean())
        said += f"; error on this silo's own test data {100 * wrong:.2f} %"
    print(said, *answers.notes, sep="\n", file=sys.stderr)
    return 0
