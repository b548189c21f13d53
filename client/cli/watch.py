"""``coterie silo watch-model``: look at the model in use with new samples.

Inputs are compared with a reference that ``coterie silo use`` keeps beside the model; the metric is
compared with the one in the model's card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite, nan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.client.cli.options import HomeOption, SetOption, option
from coterie.system.commandline import JsonOption, print_json
from coterie.system.processes import utc_now

if TYPE_CHECKING:
    from coterie.client.cli.predict import Kept
    from coterie.client.home.watching import Interval, Look
    from coterie.client.work.card import Card
    from coterie.client.work.data import Part
    from coterie.features.watching.drift import Shift
    from coterie.tasks.base import Column, Option, Persons

app = typer.Typer()
SHOWN = 10
"""Most columns that a line names."""


@app.command(
    "watch-model", epilog="Example:  coterie silo watch-model --home hospital-b --labelled new.csv"
)
def watch_model(
    home: HomeOption = None,
    labelled: Annotated[
        Path | None,
        option("PATH", "New samples with labels. [default: watch_labelled in silo.toml]"),
    ] = None,
    inputs: Annotated[
        Path | None,
        option(
            "PATH",
            "New samples without labels. [default: watch_inputs in silo.toml, else those with "
            "labels]",
        ),
    ] = None,
    options: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the model in use with new samples.

    With labels, its metrics are compared with those recorded when it was taken into use. The inputs
    are compared column by column with the training samples of that time. Exit status: 0 if all is
    well, 1 for a warning. The result is kept in the silo's folder, for its report and metrics.
    """
    from coterie.client.home import watching
    from coterie.client.home.files import folder_of

    folder = folder_of(home)
    look = watch(folder, labelled, inputs, options)
    watching.keep(folder, look)
    if as_json:
        shown = asdict(look)
        del shown["rows"], shown["answered"]
        print_json(shown)
    else:
        print(*lines(look), sep="\n")
    raise typer.Exit(1 if look.warnings else 0)


def watch(
    folder: Path, labelled: Path | None, inputs: Path | None, options: list[str] | None
) -> Look:
    """Look at the model in use with new samples.

    Raises:
        SettingsError: no model is in use, or no samples are named.
        TaskError: the samples cannot be read, or have other columns.
    """
    from coterie.client.cli.kept import which
    from coterie.client.cli.predict import load_kept
    from coterie.client.home import in_use
    from coterie.client.home.folder import Home
    from coterie.client.home.settings import SettingsError
    from coterie.client.home.watching import Look, plain_marks
    from coterie.client.work.answered import marks_of_columns, marks_of_samples
    from coterie.tasks.options import place_of

    file = in_use.file_in_use(folder)
    if file is None:
        raise SettingsError(f"no model is in use in {folder}. Choose one with `coterie silo use`.")
    if labelled is None and inputs is None and (folder / "silo.toml").exists():
        own = Home(folder).process
        labelled, inputs = (
            folder / place_of(text) if text else None
            for text in (own.watch_labelled, own.watch_inputs)
        )
    if labelled is None and inputs is None:
        raise SettingsError(
            "there are no new samples to watch the model with: give --labelled or --inputs, or "
            "set watch_labelled or watch_inputs in silo.toml."
        )
    asked = which(folder, str(file), "", options)
    kept = load_kept(file, source=asked.task)
    part = None if labelled is None else _labelled(kept, asked.options, labelled, asked.workers)
    columns = _new_columns(kept, asked.options, part, labelled, inputs)
    persons = _persons(kept, asked.options, part, inputs)
    found = _shifts(file, columns, persons)
    measured: dict[str, Any] = {} if part is None else _measured(kept, part)
    warnings = [*_drift_warning(found), *_worse_warning(kept.card, measured)]
    return Look(
        at=utc_now(),
        model=in_use.history(folder)[-1].model,
        sha256=kept.card.sha256,
        samples=len(columns[0].values) if columns else 0,
        columns=tuple(map(asdict, found)),
        warnings=tuple(warnings),
        rows=plain_marks(marks_of_columns(columns, persons)) if columns else (),
        answered=() if part is None else plain_marks(marks_of_samples(part)),
        **measured or {"labelled": 0},
    )


# ---------------------------------------------------------------- the reference


def keep_reference(kept: Kept, file: Path, options: Mapping[str, Option], samples: str) -> str:
    """Keep the reference of a model that is taken into use, beside its ``file``.

    It describes the silo's training samples, or its ``samples`` without labels. Return a sentence
    for people.
    """
    import torch

    from coterie.client.work.columns import inputs_of
    from coterie.client.work.data import to_device
    from coterie.client.work.session import hash_of
    from coterie.features.watching.drift import plain_references, reference_of
    from coterie.system.files import write_atomically
    from coterie.wire import counted

    note, whose = "", None
    if samples:
        columns = _columns_of_file(kept, Path(samples), options)
        whose = kept.task.persons_in(Path(samples), options)
    else:
        data = kept.task.load(options)
        part = to_device(data, torch.device("cpu")).train
        columns, whose = list(inputs_of(kept.task, options, part)), part.persons
        if kept.card.data_hash not in ("", hash_of(data)):
            note = "; they are not those that the model was trained on"
    plain = plain_references([reference_of(column, whose) for column in columns])
    write_atomically(_reference_of(file), json.dumps(plain).encode(), private=True)
    size = counted(len(columns[0].values) if columns else 0, "sample")
    return f"to watch it: {counted(len(columns), 'column')} of {size}{note}"


def _reference_of(file: Path) -> Path:
    return file.with_suffix(".reference.json")


def _shifts(file: Path, columns: Sequence[Column], persons: Persons | None) -> list[Shift]:
    from coterie.client.home.settings import SettingsError
    from coterie.features.watching.drift import references_of, shifts

    place = _reference_of(file)
    try:
        references = references_of(json.loads(place.read_text(encoding="utf-8")))
        return shifts(references, columns, persons)
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsError(
            f"the samples cannot be compared with {place}: {error}. Take the model into use "
            "again, with `coterie silo use`."
        ) from None


# ---------------------------------------------------------------- new samples


def _labelled(kept: Kept, options: Mapping[str, Option], place: Path, workers: int) -> Part:
    """Return all samples of a file or folder with labels, as test samples."""
    import torch

    from coterie.client.work.data import to_device
    from coterie.tasks.base import TaskError
    from coterie.tasks.own.declared import DeclaredTask

    if not isinstance(kept.task, DeclaredTask):
        raise TaskError(
            f"task {kept.task.name!r} is not declared in a file, so that it reads no other samples "
            "with labels. Give samples without labels: --inputs."
        )
    there = str(place)
    data = kept.task.load({**options, "data": there, "test-data": there})
    return to_device(data, torch.device("cpu"), workers=workers).test


def _new_columns(
    kept: Kept,
    options: Mapping[str, Option],
    part: Part | None,
    labelled: Path | None,
    inputs: Path | None,
) -> list[Column]:
    from coterie.client.work.columns import columns_of

    if inputs is not None:
        return _columns_of_file(kept, inputs, options)
    assert part is not None and labelled is not None
    return list(kept.task.columns(options, labelled) or columns_of(part))


def _persons(
    kept: Kept, options: Mapping[str, Option], part: Part | None, inputs: Path | None
) -> Persons | None:
    """Return whose the compared samples are."""
    if inputs is not None:
        return kept.task.persons_in(inputs, options)
    return None if part is None else part.persons


def _columns_of_file(kept: Kept, file: Path, options: Mapping[str, Option]) -> list[Column]:
    import torch

    from coterie.client.work.columns import columns_of
    from coterie.client.work.data import Held, map_nest
    from coterie.tasks.base import TaskError

    if not file.exists():
        raise TaskError(f"there is no file or folder {file} of new samples.")
    if own := kept.task.columns(options, file):
        return list(own)
    x = map_nest(torch.as_tensor, kept.task.inputs(file, options).x)
    return list(columns_of(Held(x, ())))


# ---------------------------------------------------------------- the metric


def _measured(kept: Kept, part: Part) -> dict[str, Any]:
    """Return the fields of ``Look`` that the labelled samples determine."""
    from coterie.client.cli.predict import asked
    from coterie.client.work.measure import figures_of

    card, calibration = kept.card, kept.card.calibration
    thresholds = () if calibration is None else calibration.thresholds
    _, evidence, _ = asked(kept, part)
    found = figures_of(kept.task.problem, evidence, thresholds=thresholds, persons=part.persons)
    figures = {name: (one.value, one.low, one.high) for name, one in found.items()}
    before = dict(card.figures if calibration is None else calibration.figures)
    samples = card.test_examples if calibration is None else calibration.measured
    both = [name for name in (card.metric, *figures) if name in figures and name in before]
    metric = both[0] if both else ""
    worse = (
        is_worse(metric, (*before[metric], samples), (*figures[metric], len(part)))
        if metric
        else None
    )
    return {
        "labelled": len(part),
        "metric": metric or next(iter(figures), ""),
        "figures": figures,
        "before": before,
        "worse": worse,
    }


def is_worse(
    metric: str, before: tuple[float, float, float, int], now: tuple[float, float, float, int]
) -> bool | None:
    """Return whether a metric is worse: the 95% interval of its difference is above 0.

    The interval follows from those of both values (MOVER: Zou and Donner, "Construction of
    confidence limits about effect measures", Statistics in Medicine 2008). Of an error it takes at
    least Wilson's interval, because a bootstrap of few samples without an error has none.

    Args:
        before, now: value, ends of its interval, and samples.

    Returns:
        None if an interval is unknown.
    """
    from coterie.wire import KNOWN_METRICS

    known = KNOWN_METRICS[metric]
    ends = []
    for value, low, high, samples in (before, now):
        three = sorted(map(known.shortfall, (low, high)))
        if metric == "error":
            wide = _wilson(value, samples)
            three = [min(three[0], wide[0]), max(three[1], wide[1])] if isfinite(low) else wide
        ends.append((known.shortfall(value), *three))
    (old, _, old_high), (new, new_low, _) = ends
    # The lower end of new − old.
    low = new - old - sqrt((new - new_low) ** 2 + (old_high - old) ** 2)
    return low > 0 if isfinite(low) else None


def _wilson(share: float, samples: int) -> list[float]:
    from scipy.stats import binomtest

    return list(binomtest(round(share * samples), samples).proportion_ci(method="wilson"))


# ---------------------------------------------------------------- texts


def _drift_warning(found: Sequence[Shift]) -> list[str]:
    from coterie.wire import some

    drifted = sorted((one for one in found if one.drifted), key=lambda one: -one.psi)
    named = [f"{one.name} (PSI {one.psi:.2f})" for one in drifted]
    return [f"inputs have drifted: {some(named, SHOWN)}"] if named else []


def _worse_warning(card: Card, measured: Mapping[str, Any]) -> list[str]:
    if not measured.get("worse"):
        return []
    metric = measured["metric"]
    now, before = (_text(card, metric, measured[key][metric]) for key in ("figures", "before"))
    return [f"the model has become worse: {now} on the new samples, {before} before"]


def _text(card: Card, metric: str, figure: Interval) -> str:
    from coterie.client.work.card import figure_texts

    title, value, interval = figure_texts(card, metric, figure)
    return f"{title} {value} ({interval})"


def lines(look: Look) -> list[str]:
    """Return a look as lines for people: verdicts first, then the figures."""
    from coterie.wire import KNOWN_METRICS

    found = [f"warning: {one}" for one in look.warnings] or ["no warning"]
    found.append(f"model {look.model}, {look.samples} new samples, {look.labelled} with labels")
    if look.labelled and look.worse is None:
        found.append(
            "whether the model is worse cannot be said: no metric with an interval is known of "
            "both times"
        )
    for name, now in (look.figures or {}).items():
        known, before = KNOWN_METRICS[name], (look.before or {}).get(name, (nan,) * 3)
        value, low, high, then = map(known.text, (*now, before[0]))
        found.append(f"  {known.title:<20} {value}  (95%: {low} to {high}); before {then}")
    if not look.columns:
        found.append(
            "inputs are not compared: no reference was kept when the model was taken into use"
        )
    for one in sorted(look.columns, key=lambda one: -one["psi"])[:SHOWN]:
        found.append(
            f"  {one['name']:<20} PSI {one['psi']:.2f}, by chance {one['by_chance']:.2f}"
            + "; drifted" * one["drifted"]
        )
    if len(look.columns) > SHOWN:
        found.append(f"  and {len(look.columns) - SHOWN} more columns with a smaller PSI")
    return [*found, *few_lines(look)]


def few_lines(look: Look) -> list[str]:
    """Return a sentence if there are too few samples to find a large drift; else nothing."""
    from coterie.features.watching.drift import Shift

    few = [one for one in look.columns if Shift(**one).few]
    if not few:
        return []
    needed = [one["needed"] for one in few]
    how = (
        f"at least {max(needed)} are needed"
        if all(needed)
        else "the reference has too few samples, however many new ones there are"
    )
    return [f"too few samples to find a large drift of {len(few)} of the columns: {how}"]
