"""``coterie silo report``: a silo's report on its runs, from files in its folder only.

``journal.jsonl`` gives its curve and the size of its group; ``ledger.jsonl``, if the silo keeps
one, gives what left it. The coordinator is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.client.home.files import LEDGER
from coterie.client.home.local_log import JOURNAL, WRONG, json_lines
from coterie.client.home.policy import number
from coterie.client.home.rounds import file_of
from coterie.client.home.settings import SettingsError
from coterie.client.home.watching import Look, last_look
from coterie.client.ledger import Total, ledger_of, totals
from coterie.features.privacy.budget import BudgetError, read_charges, read_spent


@dataclass(frozen=True)
class SiloRun:
    """One run from the silo's view.

    Attributes:
        errors: round → error, on the silo's test data, of the model that it held after the round.
        losses: round → loss of its own training.
        group_sizes: round → silos that trained together, including this one.
        seconds: round → its own seconds of training.
        num_samples: training samples, as last stated; NaN if unknown.
        tested, wrong: test samples, and those misclassified at the end; NaN if unknown or no count.
        trivial: error of the best constant answer on all test samples; NaN if unknown.
        outbound: message type → what left; None without a ledger.
        metric, unit: the primary metric, of the errors.
        privacy: the silo's spent budget, over all runs, and the number of this run's charged
            trainings; empty without differential privacy.
        last: time of the last entry.
        missing: what cannot be read, for people.
    """

    name: str
    errors: Mapping[int, float]
    losses: Mapping[int, float]
    group_sizes: Mapping[int, float]
    seconds: Mapping[int, float]
    num_samples: float
    outbound: Mapping[str, Total] | None
    last: str
    metric: wire.Metric = wire.KNOWN_METRICS[wire.ERROR]
    unit: str = ""
    privacy: str = ""
    tested: float = math.nan
    wrong: float = math.nan
    trivial: float = math.nan
    missing: tuple[str, ...] = ()


def read_silo(home: Path, run: str | None = None) -> SiloRun:
    """Read one run of a silo, by default its last.

    Raises:
        SettingsError: there is no such run, or nothing that can be read.
    """
    missing: list[str] = []
    lines = _lines(home / JOURNAL, missing)
    ledger = _lines(ledger_of(home), missing) if ledger_of(home).exists() else None
    names = [str(line["run"]) for line in [*lines, *(ledger or [])] if line.get("run")]
    if not names:
        raise SettingsError(
            f"{home} has no journal of a run ({JOURNAL}): the silo has not trained yet, or --home "
            "names another folder."
        )
    name = names[-1] if run is None else run
    if name not in names:
        known = ", ".join(dict.fromkeys(names))
        raise SettingsError(f"the silo took part in no run {name!r}. Its runs: {known}.")
    own = [line for line in lines if line.get("run") == name]
    at = _last([line.get("at") for line in own])
    left = totals(line for line in ledger or () if line.get("run") == name)
    of_rounds = [
        line for line in own if isinstance(line.get("round"), int) and not line.get("purpose")
    ]
    return SiloRun(
        name=name,
        errors=_errors(of_rounds),
        **_lead_of(own),
        losses=_by_round(of_rounds, "train-loss"),
        group_sizes=_by_round(of_rounds, "group-size"),
        seconds=_by_round(of_rounds, "seconds"),
        tested=_last([line.get("num-examples") for line in own if line.get("type") == "evaluate"]),
        wrong=_last([line.get(WRONG) for line in own]),
        trivial=_last([line.get(wire.TRIVIAL) for line in own]),
        num_samples=_last(
            [line.get("num-examples") for line in own if line.get("type") == "train"]
        ),
        outbound=None if ledger is None else {kind: left[_, kind] for _, kind in sorted(left)},
        last="" if math.isnan(at) else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M UTC}",
        privacy=_privacy(home, name, missing),
        missing=tuple(missing),
    )


def _lead_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    said: Mapping[str, Any] = next((one for one in reversed(lines) if one.get("metric")), {})
    metric = wire.KNOWN_METRICS.get(str(said.get("metric")), wire.KNOWN_METRICS[wire.ERROR])
    return {"metric": metric, "unit": str(said.get("unit", ""))}


def _privacy(home: Path, run: str, missing: list[str]) -> str:
    try:
        spent = read_spent(str(home))
        own = sum(charge.run == run for charge in read_charges(str(home)))
    except BudgetError as error:
        missing.append(str(error).rstrip("."))
        return ""
    if spent is None:
        return ""
    return (
        f"This silo has spent {spent.text()} of its privacy budget, in {spent.charges} "
        f"trainings over all runs, {own} of them in this run."
    )


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    try:
        found = list(json_lines(path))
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error.strerror or error}")
        return []
    if damaged := found.count(None):
        missing.append(f"damaged: {wire.counted(damaged, 'line')} of {path.name}")
    return [line for line in found if line is not None]


def _errors(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return errors by round; a model received for round t+1 is the one held after round t."""
    found = {}
    for line in lines:
        received, own = number(line.get("received-error")), number(line.get("error"))
        if math.isfinite(received):
            found[line["round"] - 1] = received
        elif line.get("type") == "evaluate" and math.isfinite(own):
            found[line["round"]] = own
    return dict(sorted(found.items()))


def _by_round(lines: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    trained = [line for line in lines if line.get("type") == "train"]
    found = {line["round"]: number(line.get(key)) for line in trained}
    return {n: value for n, value in sorted(found.items()) if math.isfinite(value)}


def _last(values: Sequence[object]) -> float:
    known = [value for value in map(number, values) if math.isfinite(value)]
    return known[-1] if known else math.nan


def _latest(values: Mapping[int, float]) -> float:
    return values[max(values)]


# ---------------------------------------------------------------- the page


def build_page(run: SiloRun, home: Path) -> Any:
    """Return a ``coterie.pictures.page.Page``; drawing is imported only here."""
    from coterie.pictures.page import Page, Table

    missing, look = list(run.missing), last_look(home)
    if run.outbound is None:
        missing.append(f"what left the silo: it has no {LEDGER}")
    if not run.errors:
        missing.append("a curve: no error on the silo's own test data has been recorded yet")
    if not run.group_sizes:
        missing.append("a group: the coordinator has not reported how many silos train together")
    outbound = run.outbound or {}
    sent = [
        (kind, str(one.messages), f"{one.bytes:,}", ", ".join(one.values))
        for kind, one in outbound.items()
    ]
    arrays = [(kind, *array) for kind, one in outbound.items() for array in one.tensors.items()]
    tables = {
        "The model in use, on new samples": _metric_table(look),
        "Inputs of new samples": _input_table(look),
        "What left the silo": Table(("message", "times", "bytes of arrays", "other numbers"), sent),
        "Arrays that left the silo": Table(("message", "array", "shape"), arrays),
    }
    samples = (
        wire.counted(int(run.num_samples), "training sample")
        if math.isfinite(run.num_samples)
        else ""
    )
    written = f"last written {run.last}" if run.last else ""
    return Page(
        title=f"{home.name}: {run.name}",
        subtitle=" · ".join(filter(None, ("this silo's own data", samples, written))),
        lead=_lead(run),
        figures=_figures(run),
        warnings=() if look is None else look.warnings,
        missing=missing,
        pictures=_pictures(run),
        tables=tables,
        commands={
            "The silo's model, if the run has ended": str(file_of(str(home), "models", run.name))
        },
    )


def _metric_table(look: Look | None) -> Any:
    from coterie.pictures.page import Table

    rows = []
    for name, now in ((look and look.figures) or {}).items():
        metric = wire.KNOWN_METRICS[name]
        before = ((look and look.before) or {}).get(name, (math.nan,) * 3)
        value, low, high = map(metric.text, now)
        rows.append((metric.title, value, f"{low} to {high}", metric.text(before[0])))
    at = "" if look is None else look.at[:10]
    return Table(("metric", at, "95% interval", "when taken into use"), rows)


def _input_table(look: Look | None) -> Any:
    from coterie.pictures.page import Table

    columns = sorted(() if look is None else look.columns, key=lambda one: -one["psi"])
    rows = [
        (one["name"], f"{one['psi']:.2f}", f"{one['by_chance']:.2f}", f"{one['p']:.2g}",
         f"{one['samples']:,}", f"{one['needed']:,}" if one["needed"] else "–",
         "drifted" if one["drifted"] else "")
        for one in columns
    ]  # fmt: skip
    header = ("column", "PSI", "by chance", "p", "new samples", "samples needed", "verdict")
    return Table(header, rows)


def _lead(run: SiloRun) -> str:
    parts = []
    if run.errors:
        first, last = min(run.errors), max(run.errors)
        called = "an error of" if run.metric.name == wire.ERROR else run.metric.title
        parts.append(
            f"After round {last} the model has {called} {_text(run, run.errors[last])} on this "
            f"silo's test data{_counted(run)}; after round {first} it was "
            f"{_text(run, run.errors[first])}."
        )
        if math.isfinite(run.trivial):
            trivial = f"{called} {_text(run, run.trivial)}"
            parts.append(f"The constant baseline has {trivial}.")
    if run.group_sizes:
        size = int(_latest(run.group_sizes))
        others = "alone" if size == 1 else f"with {wire.counted(size - 1, 'other')}"
        parts.append(f"It last trained {others}.")
    if run.privacy:
        parts.append(run.privacy)
    return " ".join(parts) or "Nothing has been recorded for this run yet."


def _text(run: SiloRun, error: float) -> str:
    return run.metric.text(run.metric.shortfall(error), run.unit)


def _counted(run: SiloRun) -> str:
    """Return the number of samples behind a percentage, and of errors among them."""
    if not math.isfinite(run.tested):
        return ""
    wrong = f"{run.wrong:.0f} of " if math.isfinite(run.wrong) else ""
    return f" ({wrong}{wire.counted(int(run.tested), 'sample')})"


def _figures(run: SiloRun) -> dict[str, str]:
    figures = {}
    if run.errors:
        best = "highest" if run.metric.higher else "smallest"
        figures[f"{run.metric.title} now"] = _text(run, _latest(run.errors))
        figures[f"{best} {run.metric.title}"] = _text(run, min(run.errors.values()))
    if run.group_sizes:
        figures["silos in its group"] = f"{_latest(run.group_sizes):.0f}"
    if run.losses:
        figures["rounds trained"] = str(len(run.losses))
    if run.seconds:
        figures["seconds of training"] = f"{sum(run.seconds.values()):.1f}"
    if run.outbound is not None:
        total = sum(one.bytes for one in run.outbound.values())
        figures["arrays sent, MB"] = f"{total / 1e6:.3g}"
    return figures


def _pictures(run: SiloRun) -> list[Any]:
    from coterie.pictures import charts
    from coterie.pictures.page import Picture, Table
    from coterie.pictures.style import LIGHT

    def curve(
        key: str, title: str, caption: str, values: Mapping[int, float], unit: str, scale: float
    ) -> Picture:
        x, y = list(values), [scale * value for value in values.values()]
        lines = [charts.Curve(x, y, LIGHT["g0"], wire.readable(y[-1]))]
        return Picture(
            key,
            title,
            caption,
            lambda layout: charts.curves(
                lines, layout=layout, title=title, unit=unit, whole=unit == "silos"
            ),
            Table(
                ("round", unit),
                [(str(n), wire.readable(v, figures=4)) for n, v in zip(x, y, strict=True)],
            ),
        )

    title = run.metric.title[0].upper() + run.metric.title[1:]
    unit = "%" if run.metric.share else run.unit
    errors = {number: run.metric.shortfall(error) for number, error in run.errors.items()}
    curves = (
        ("errors", title,
         f"{title} of the silo's model after every round, on this silo's test data.",
         errors, ", ".join(filter(None, (run.metric.title, unit))),
         100.0 if run.metric.share else 1.0),
        ("group", "Group size",
         "Number of silos that trained together, including this one; 1 means alone.",
         run.group_sizes, "silos", 1.0),
        ("loss", "Training loss", "Mean training loss of this silo in every round.",
         run.losses, "loss", 1.0),
    )  # fmt: skip
    found = [curve(*one) for one in curves if one[3]]
    rows = [
        charts.Bar(kind, LIGHT["g0"], {"MB": one.bytes / 1e6})
        for kind, one in (run.outbound or {}).items()
        if one.bytes
    ]
    if rows:
        title = "Megabytes that left the silo"
        found.append(
            Picture(
                "outbound",
                title,
                "Arrays sent by this silo, in megabytes (10⁶ bytes), by message type.",
                lambda layout: charts.bars(rows, layout=layout, title=title, unit="MB"),
            )
        )
    return found
