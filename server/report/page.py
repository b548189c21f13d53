"""The page of a run's report. Long lists are thinned; every caption states how."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from coterie import wire
from coterie.pictures.page import Page, Picture, Table
from coterie.server.report import auto, costs, similarity, training
from coterie.server.report.explain import unlabelled_in
from coterie.server.report.story import (
    NO_NUMBER,
    Story,
    bytes_of,
    decimals,
    duration,
    finite,
    minute,
    signed_points,
)
from coterie.server.runs.config import defaults, foreign_keys
from coterie.server.runs.record import Run


def build_page(story: Story) -> Page:
    """Return the complete page, ready to be rendered."""
    run = story.run
    pictures, gaps = make_pictures(story)
    return Page(
        title=_title(run),
        subtitle=_subtitle(run),
        lead=_lead(story),
        figures=_figures(story),
        missing=[*run.missing, *gaps],
        pictures=pictures,
        tables={name: table for name, table in _tables(story).items() if table.rows},
        commands=_commands(story),
    )


def _title(run: Run) -> str:
    label = str(run.config.get("label") or run.strategy)
    return f"{label} on {run.config.get('task', '?')}" if label else run.name


def _subtitle(run: Run) -> str:
    since = "since then" if run.resumed else "in all"
    private = sum(facts.private for facts in run.silos.values())
    parts = [
        f"run {run.name}",
        f"strategy {run.strategy}" if run.strategy else "",
        wire.counted(len(run.silos), "silo"),
        f"{len(run.rounds)} of {run.planned_rounds or '?'} rounds",
        run.status,
        "secure: no update of a silo was seen" if run.config.get("secure") else "",
        f"{private} with differential privacy" if private else "",
        f"ended early: {run.ended_early}" if run.ended_early else "",
        f"started {minute(run.started)}" if run.started else "",
        *(f"resumed {one.when}" for one in run.resumed),
        f"{duration(run.seconds)} {since}" if math.isfinite(run.seconds) else "",
    ]
    return " · ".join(part for part in parts if part)


def _lead(story: Story) -> str:
    gains, lead = story.gains.gain, story.run.lead
    if gains:
        better = sorted((n for n in gains if gains[n] > 0), key=lambda n: -gains[n])
        worse = sorted((n for n in gains if gains[n] < 0), key=lambda n: gains[n])
        text = (
            f"{len(better)} of {len(gains)} silos have a {lead.better} than alone; the mean gain is"
            f" {signed_points(story.gains.mean_gain, lead)} {lead.points}."
        )
        if better:
            text += f" Most: {better[0]} ({_gained(story, better[0])})."
        if worse:
            named = ", ".join(f"{n} ({_gained(story, n)})" for n in worse[:3])
            more = f" and {len(worse) - 3} more" if len(worse) > 3 else ""
            text += f" Better alone: {named}{more}."
        elif len(better) < len(gains):
            text += " None is worse off."
        return text
    if story.run.strategy == "independent":
        return "Every silo trained for itself: this run is what others are compared with."
    return (
        "There is nothing to compare this run with: no run of the same settings, with as many "
        "samples at every silo, in which every silo trained alone. The command that makes one is "
        "at the end."
    )


def _gained(story: Story, name: str) -> str:
    run, gain = story.run, story.gains.gain[name]
    text, tested = signed_points(gain, run.lead), run.test_counts().get(name, 0)
    if run.metric != wire.ERROR or not tested:
        return text
    return f"{text}: {abs(round(gain * tested))} of {tested} test samples"


def _figures(story: Story) -> dict[str, str]:
    gains, lead = list(story.gains.gain.values()), story.run.lead
    now = story.history.stretches[-1] if story.history.stretches else None
    figures = {}
    if gains:
        better = sum(gain > 0 for gain in gains)
        figures["silos better than alone"] = f"{better} of {len(gains)}"
        figures[f"mean gain over alone, {lead.points}"] = signed_points(story.gains.mean_gain, lead)
        spread = f"standard deviation of the gains, {lead.points}"
        figures[spread] = lead.gain(story.gains.rsd, sign="")
    if story.gains.together:
        of = f", {len(gains)} silos with a baseline" if gains else ""
        figures[f"mean {lead.title}{of}"] = lead.text(story.gains.mean_error)
    if now is not None:
        together = [group for group in now.groups if len(group) > 1]
        figures["groups of several silos"] = str(len(together))
        figures["silos alone"] = str(len(now.groups) - len(together))
    moved = sum(sum(one.num_bytes) for one in story.run.rounds_to_end())
    if moved:
        figures["arrays moved"] = bytes_of(moved)
    return figures


def _tables(story: Story) -> dict[str, Table]:
    run = story.run
    left_out = [(one.round, n, why) for one in run.rounds for n, why in one.left_out.items()]
    shown = left_out[-200:]
    cut = f" (the last {len(shown)} of {len(left_out)})" if len(shown) < len(left_out) else ""
    return {
        "Every silo": _silo_table(story),
        "Metrics after the last round, with 95 % intervals": _metric_table(run),
        "Why each silo is where it is": auto.reasons_table(story),
        "Silos whose samples have no labels yet": Table(
            ("silo", "has the model of", "why"),
            [
                (name, ", ".join(one.group) or NO_NUMBER, one.why)
                for name, one in unlabelled_in(run).items()
            ],
        ),
        "Left out": Table(
            ("round", "silo", f"why{cut}"),
            [(str(number), name, why) for number, name, why in shown],
        ),
        "In line with its group": Table(
            ("silo", "cosine to the others", "norm / median", "clipped in rounds", "moved out"),
            _line_rows(run),
        ),
        "Not let in": Table(("silo", "why"), list(run.refused.items())),
        "Configuration": Table(
            ("key", "value"), [(str(k), str(v)) for k, v in sorted(run.config.items())]
        ),
        "Versions": Table(("package", "version"), sorted(run.versions.items())),
    }


def _line_rows(run: Run) -> list[tuple[str, ...]]:
    influences = [(one.round, one.influence) for one in run.rounds]
    cosines, norms = (
        {name: [own[name] for own in by_round if name in own] for name in sorted(run.silos)}
        for by_round in ([i.cosines for _, i in influences], [i.norms for _, i in influences])
    )
    rows = []
    for name in sorted(run.silos):
        clipped = [str(number) for number, one in influences if name in one.clipped]
        out = [str(number) for number, one in influences if name in one.apart]
        if cosines[name] or norms[name] or clipped or out:
            both = cosines[name], norms[name]
            middle = (decimals(median(own), 2) if own else NO_NUMBER for own in both)
            away = f"rounds {', '.join(out[:20])}" if out else ""
            rows.append((name, *middle, ", ".join(clipped[:20]), away))
    return rows


def _silo_table(story: Story) -> Table:
    gains, since, now = story.gains, story.history.since, story.history.now
    joined = {n: one.round for one in reversed(story.run.rounds) for n in one.joined}
    left = {n: one.round for one in story.run.rounds for n in one.left}
    lead = story.run.lead
    own, tested = story.run.last_personal_errors(), story.run.test_counts()
    figures = _final_figures(story.run)
    trivial = {n: its[wire.TRIVIAL] for n, its in figures.items() if wire.TRIVIAL in its}
    unlabelled = unlabelled_in(story.run)
    rows = []
    for name in story.history.order(story.run.silos):
        gone = NO_NUMBER if name in unlabelled else "left"
        letter = now[name][0] or "alone" if name in now else gone
        errors = (gains.alone.get(name), gains.common.get(name), gains.together.get(name))
        remark = [f"joined in round {joined[name]}"] if joined.get(name, 1) > 1 else []
        remark += [f"left before round {left[name]}"] if name in left and name not in now else []
        remark += ["its samples have no labels yet"] * (name in unlabelled)
        rows.append(
            (
                name,
                decimals(story.run.silos[name].num_examples, 0),
                str(tested.get(name, NO_NUMBER)),
                letter,
                str(since.get(name, NO_NUMBER)),
                *([lead.text(trivial.get(name))] if trivial else []),
                *(lead.text(error) for error in errors[:2]),
                _measured(story.run, name, errors[2], tested.get(name, 0), figures.get(name, {})),
                *([lead.text(own.get(name))] if own else []),
                signed_points(gains.gain[name], lead) if name in gains.gain else NO_NUMBER,
                ", ".join(remark),
            )
        )
    header = (
        "silo",
        "samples",
        "tested on",
        "group",
        "since round",
        *(["always the best single answer"] if trivial else []),
        "alone",
        "one model for all",
        "in its group",
        *(["as it trained it last (Per)"] if own else []),
        "gain, points",
        "remark",
    )
    return Table(header, rows)


def _measured(
    run: Run, name: str, error: float | None, tested: int, figures: Mapping[str, float]
) -> str:
    beside = []
    if run.metric == wire.ERROR and tested and error is not None and math.isfinite(error):
        beside.append(f"{round(error * tested)} of {tested}")
    ends = [figures.get(run.metric + end, math.nan) for end in (wire.LOW, wire.HIGH)]
    if all(map(math.isfinite, ends)):
        beside.append(f"95 %: {run.lead.interval(*ends)}")
    return f"{run.lead.text(error)} ({'; '.join(beside)})" if beside else run.lead.text(error)


def _final_figures(run: Run) -> dict[str, dict[str, float]]:
    """Return silo → its metrics after the last round, without an app's lists."""
    metrics = run.final.metrics if run.final else {}
    return {
        name: {key: value for key, value in own.items() if not isinstance(value, list)}
        for name, own in metrics.items()
    }


def _metric_table(run: Run) -> Table:
    figures = _final_figures(run)
    ends = (wire.LOW, wire.HIGH)
    names = dict.fromkeys(
        name
        for own in figures.values()
        for name in own
        if name != wire.TRIVIAL and not name.endswith(ends)
    )
    known = {name: wire.KNOWN_METRICS.get(name, wire.Metric(name, name)) for name in names}
    rows = [
        (silo, *(_figure(known[name], own) for name in names))
        for silo, own in sorted(figures.items())
        if names
    ]
    return Table(("silo", *(metric.title for metric in known.values())), rows)


def _figure(metric: wire.Metric, own: Mapping[str, float]) -> str:
    value, low, high = (own.get(metric.name + end, math.nan) for end in ("", wire.LOW, wire.HIGH))
    text = metric.text(value)
    if not math.isfinite(low + high):
        return text
    return f"{text} ({metric.text(low)} to {metric.text(high)})"


def _commands(story: Story) -> dict[str, str]:
    run = story.run
    commands = {"This run, with the same silos and the same data": repeat_command(run)}
    for strategy, known, option, what in (
        ("independent", story.alone, "--baseline-local", "Every silo alone"),
        ("fedavg", story.common, "--baseline-global", "One model for all"),
    ):
        if run.strategy and run.strategy != strategy and known is None:
            commands[
                f"{what}, to compare with (then: coterie runs report {shlex.quote(run.name)} "
                f"{option} RUN)"
            ] = repeat_command(run, strategy=strategy)
    return commands


def repeat_command(run: Run, *, strategy: str = "") -> str:
    """Return the command that repeats a run, or runs another strategy; defaults are left out."""
    usual = defaults()
    wanted = strategy or run.strategy or str(usual["strategy"])
    line = ["coterie", "run", wanted]
    others = foreign_keys({**run.config, "strategy": wanted})
    for key, value in run.config.items():
        skipped = key in ("strategy", "runs-dir") or (strategy and key in ("label", "churn"))
        if not skipped and key not in others and usual.get(key) != value:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            line += ["--set", f"{key}={text}"]
    federation = run.folder.resolve().parent.parent
    if (federation / "coterie.toml").exists():
        line += ["--federation", str(federation)]
    return shlex.join(line)


MAKERS: Sequence[Callable[[Story], Picture | str | None]] = (
    training.groups_picture,
    training.outcomes_picture,
    training.curves_picture,
    auto.race_picture,
    similarity.matrix_picture,
    similarity.structure_picture,
    training.loss_picture,
    training.discrepancy_picture,
    costs.seconds_picture,
    costs.silo_seconds_picture,
    costs.bytes_picture,
)
"""Each returns a picture, the reason why there is none, or None if it does not apply to the run."""


def make_pictures(story: Story) -> tuple[list[Picture], list[str]]:
    """Return all pictures that the record allows, and the reasons why others are missing."""
    pictures, gaps = [], []
    for make in MAKERS:
        try:
            made = make(story)
        except Exception as error:  # a record from elsewhere: one bad value costs one picture
            name = make.__name__.removesuffix("_picture").replace("_", " ")
            made = (
                f"no picture of {name}: the record's values do not fit ({type(error).__name__}:"
                f" {error})"
            )
        if isinstance(made, Picture):
            pictures.append(made)
        elif made:
            gaps.append(made)
    return pictures, gaps


def summary(story: Story) -> dict[str, Any]:
    """Return the report's figures as JSON values."""
    run, gains, history = story.run, story.gains, story.history
    since, now = history.since, history.now
    return {
        "run": run.name,
        "status": run.status,
        "missing": list(run.missing),
        "strategy": run.strategy,
        "rounds": len(run.rounds),
        "ended-early": run.ended_early or None,
        "seconds": finite(run.seconds),
        "ipr": finite(gains.ipr),
        "rsd": finite(gains.rsd),
        "mean-gain": finite(gains.mean_gain),
        "mean-error": finite(gains.mean_error),
        "alone-run": gains.alone_run or None,
        "global-run": gains.common_run or None,
        "silos": {
            name: {
                "num-examples": finite(facts.num_examples),
                "group": (now[name][0] or "alone") if name in now else None,
                "since": since.get(name),
                "error": finite(gains.together.get(name)),
                "error-alone": finite(gains.alone.get(name)),
                "error-global": finite(gains.common.get(name)),
                "gain": finite(gains.gain.get(name)),
            }
            for name, facts in run.silos.items()
        },
        "groups": [
            {
                "rounds": [stretch.first, stretch.last],
                "groups": {b.label: list(b.members) for b in history.blocks(stretch) if b.label},
                "alone": [n for b in history.blocks(stretch) if not b.label for n in b.members],
            }
            for stretch in history.stretches
        ],
        "config": dict(run.config),
        "versions": dict(run.versions),
        "command": repeat_command(run),
    }
