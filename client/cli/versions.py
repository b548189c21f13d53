"""Commands for the models that a silo keeps: list them, choose the one in use, and go back."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.client.cli.options import HomeOption
from coterie.system.commandline import JsonOption, print_json
from coterie.system.terminal import print_table, say

if TYPE_CHECKING:
    from coterie.client.work.card import Card

app = typer.Typer()
DIGITS = 12
"""Digits of a fingerprint that are shown."""


@app.command(epilog="Example:  coterie silo models --home hospital-b")
def models(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the models that this silo kept, and the one in use.

    The newest is last. For each model: its run and the run that this began from, round, size of
    the silo's group, the primary metric on the silo's test data with its 95% interval, and the
    fingerprint of the training data.
    """
    from rich.console import Console

    from coterie.client.home.files import folder_of

    folder = folder_of(home)
    rows = list(_rows(folder))
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(Console(), f"no models are kept in {folder}")
        return
    shown = [key for key in rows[0] if key not in ("sha256", "value", "low", "high")]
    header = (key.replace("-", " ") for key in shown)
    print_table(Console(), header, ([row[key] for key in shown] for row in rows))


@app.command(epilog="Example:  coterie silo use hcct-1234 --home hospital-b")
def use(
    model: Annotated[
        str, typer.Argument(help="Model to use: RUN, personalised/RUN, or a file that has a card.")
    ],
    home: HomeOption = None,
) -> None:
    """Choose the model that is in use.

    predict, calibrate and export then use it by default. The silo keeps a copy in in-use/, which no
    later round or run overwrites, and counts of the training samples, with which watch-model
    compares new ones.
    """
    from rich.console import Console

    from coterie.client.cli.predict import find_model
    from coterie.client.home import in_use
    from coterie.client.home.files import folder_of
    from coterie.client.work.card import read_card

    folder = folder_of(home)
    file = find_model(folder, model)
    card = read_card(file)
    name = file.stem if Path(model).is_file() else model.removesuffix(".safetensors")
    chosen = in_use.use(folder, name, file.read_bytes(), card.sha256)
    say(Console(), f"in use: {_named(chosen.model, card)}", highlight=False)
    if (folder / "silo.toml").exists():
        say(Console(), _to_watch(folder, folder / in_use.FOLDER / chosen.file), highlight=False)


def _to_watch(folder: Path, file: Path) -> str:
    """Keep what watch-model needs; return a sentence about it."""
    from coterie.client.cli.kept import which
    from coterie.client.cli.predict import load_kept
    from coterie.client.cli.watch import keep_reference
    from coterie.client.home.settings import SettingsError
    from coterie.tasks.base import TaskError

    try:
        asked = which(folder, str(file), "", None)
        kept = load_kept(file, source=asked.task)
        return keep_reference(kept, file, asked.options, str(asked.samples or ""))
    except (SettingsError, TaskError) as error:
        return f"watch-model cannot compare the inputs of new samples: {error}"


@app.command(epilog="Example:  coterie silo back --home hospital-b")
def back(home: HomeOption = None) -> None:
    """Use the previous model again."""
    from rich.console import Console

    from coterie.client.home import in_use
    from coterie.client.home.files import folder_of
    from coterie.client.work.card import read_card

    folder = folder_of(home)
    chosen = in_use.back(folder)
    card = read_card(folder / in_use.FOLDER / chosen.file)
    say(Console(), f"in use: {_named(chosen.model, card)}", highlight=False)


def _named(model: str, card: Card) -> str:
    value, interval = _figure(card)
    text = f"{model}, {card.metric} {value}{f' ({interval})' if interval else ''}"
    return f"{text} on {card.test_examples} test samples, arrays {card.sha256[:DIGITS]}"


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what is shown of each kept model; also of one in use whose run has a newer model."""
    from coterie.client.home import in_use
    from coterie.client.work.card import PERSONALISED, read_card

    uses = in_use.history(folder)
    now = uses[-1] if uses else None
    files = [*folder.glob("models/*.safetensors"), *folder.glob(f"{PERSONALISED}/*.safetensors")]
    listed = []
    for file in files:
        name = file.stem if file.parent.name == "models" else f"{PERSONALISED}/{file.stem}"
        listed.append((name, read_card(file)))
    known = {card.sha256 for _, card in listed}
    for one in {use.sha256: use for use in uses}.values():
        copy = folder / in_use.FOLDER / one.file
        if one.sha256 not in known and copy.exists():
            listed.append((f"{in_use.FOLDER}/{copy.stem}", read_card(copy)))
    for name, card in sorted(listed, key=lambda pair: (pair[1].kept, pair[0])):
        value, interval = _figure(card)
        raw = card.figures.get(card.metric, (nan, nan, nan))
        yield {
            "model": name,
            "run": card.run,
            "from": card.parent or "–",
            "round": card.round,
            "group": card.group_size,
            "metric": f"{card.metric} {value}{f' ({interval})' if interval else ''}",
            "test-samples": card.test_examples,
            "data": card.data_hash[:DIGITS] or "–",
            "kept": card.kept,
            "in-use-since": now.since if now and now.sha256 == card.sha256 else "–",
            "sha256": card.sha256,
            "value": raw[0],
            "low": raw[1],
            "high": raw[2],
        }


def _figure(card: Card) -> tuple[str, str]:
    """Return the primary metric and its interval as text."""
    from coterie.wire import KNOWN_METRICS

    metric = KNOWN_METRICS[card.metric]
    unit = card.unit if card.metric in ("mae", "rmse") else ""
    value, low, high = card.figures.get(
        card.metric, (metric.shortfall(card.test_error), float("nan"), float("nan"))
    )
    if not isfinite(low + high):
        return metric.text(value, unit), ""
    return metric.text(value, unit), f"{metric.text(low, unit)} to {metric.text(high, unit)}"
