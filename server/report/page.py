"""The page of a run's report. Long lists are thinned; every caption states how."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from coterie import wire
from coterie.pictures.page import Fold, Page, Picture, Table
from coterie.server.paths import with_federation
from coterie.server.report import auto, costs, importance, similarity, training
from coterie.server.report.answer import MOST_NAMED, detail_of, figures_of, interval_of, lead_of
from coterie.server.report.explain import unlabelled_in
from coterie.server.report.gains import Keys, baselines, has, mean_of
from coterie.server.report.story import (
    NO_NUMBER,
    Story,
    decimals,
    duration,
    finite,
    minute,
    signed_points,
)
from coterie.server.runs.config import defaults, foreign_keys
from coterie.server.runs.going_on import parent_of
from coterie.server.runs.record import Run

SCIENCE, COSTS = ("loss", "discrepancy"), ("seconds", "silo-seconds", "bytes")
"""Keys of the folded pictures."""
LINKS = {
    **{"groups": "Groups", "outcomes": "Was it worth it", "curves": "Curves"},
    **dict.fromkeys(("race", "race-of-trees", "matrix", "structure", "science"), "Why"),
}
"""Key of a part → the link to it; of several with the same text, the first is linked."""
NOTES = (
    "Local: the site's own model, trained on its data only. Group: the model of its group. Global: "
    "one model of all sites.",
    "This page shows every site's error by name: share accordingly.",
)


def build_page(story: Story) -> Page:
    """Return the complete page, ready to be rendered."""
    run = story.run
    pictures, gaps = make_pictures(story)
    shown = [one for one in pictures if one.key not in (*SCIENCE, *COSTS)]
    folds = _folds(story, pictures)
    links: dict[str, str] = {}
    for key in [*(one.key for one in shown), *(one.key for one in folds)]:
        if name := LINKS.get(key):
            links.setdefault(name, key)
    return Page(
        title=_title(run),
        subtitle=_subtitle(run),
        lead=lead_of(story),
        detail=detail_of(story),
        figures=figures_of(story),
        missing=[*run.missing, *gaps],
        notes=NOTES if story.gains.together else (),
        links=links | {"Details": "table-1"},
        pictures=shown,
        tables=_tables(story),
        folds=folds,
        commands=_commands(story),
    )


def _title(run: Run) -> str:
    label = str(run.config.get("label") or run.strategy)
    return f"{label} on {run.config.get('task', '?')}" if label else run.name


def _subtitle(run: Run) -> str:
    since = "since then" if run.resumed else "in total"
    private = sum(facts.private for facts in run.silos.values())
    parts = [
        f"run {run.name}",
        f"strategy {run.strategy}" if run.strategy else "",
        f"{wire.counted(len(run.silos), 'silo')} ({'site' if len(run.silos) == 1 else 'sites'})",
        f"{len(run.rounds)} of {run.planned_rounds or '?'} rounds",
        run.status,
        "secure: no update of a silo was seen" if run.config.get("secure") else "",
        f"{private} with differential privacy" if private else "",
        f"ended early: {run.ended_early}" if run.ended_early else "",
        f"started {minute(run.started)}" if run.started else "",
        *(one.words for one in run.resumed),
        f"{duration(run.seconds)} {since}" if math.isfinite(run.seconds) else "",
    ]
    return " · ".join(part for part in parts if part)


def _tables(story: Story) -> dict[str, Table]:
    run, usual = story.run, defaults()
    left_out, unsummed = list[tuple[int, str, str]](), set[tuple[str, str]]()
    for one in run.rounds:
        new = one.grouping.not_summed.items() - unsummed
        unsummed |= new
        few = {n: f"only {grown} trees" for n, grown in one.grouping.unfinished.items()}
        said = [*sorted(new), *one.left_out.items(), *few.items()]
        left_out += [(one.round, name, why) for name, why in said]
    shown = left_out[-200:]
    cut = f" (the last {len(shown)} of {len(left_out)})" if len(shown) < len(left_out) else ""
    return {
        "All sites": _silo_table(story),
        "Metrics after the last round, with 95% intervals": _metric_table(run),
        auto.REASONS: auto.reasons_table(story),
        "Sites whose samples have no labels yet": Table(
            ("silo", "has the model of", "why"),
            [
                (name, ", ".join(one.group) or NO_NUMBER, one.why)
                for name, one in unlabelled_in(run).items()
            ],
        ),
        "Sites that only test": _testing_table(run),
        "Left out": Table(
            ("round", "silo", f"why{cut}"),
            [(str(number), name, why) for number, name, why in shown],
        ),
        "Refused": Table(("silo", "why"), list(run.refused.items())),
        "Configuration": Table(
            ("key", "value"),
            [(k, str(v)) for k, v in sorted(run.config.items()) if usual.get(k) != v],
        ),
    }


def _testing_table(run: Run) -> Table:
    """Return the sites that measured a group's model without training."""
    if run.final is None:
        return Table(("silo",), [])
    figures, lead = run.final.grouping.tested, run.lead
    rows = []
    for name, one in run.final.grouping.testing.items():
        own = figures.get(name, {})
        metric = wire.KNOWN_METRICS[run.metric]
        value = metric.shortfall(own.get(wire.ERROR, math.nan))
        shown = _figure(metric, {metric.name: value, **own})
        count = decimals(own.get(wire.NUM_EXAMPLES, math.nan), 0)
        rows.append((name, ", ".join(one.group) or NO_NUMBER, shown, count, one.why))
    header = ("silo", "has the model of", f"{lead.title}, with 95% interval", "test samples", "why")
    return Table(header, rows, cards=True)


def _folds(story: Story, pictures: Sequence[Picture]) -> list[Fold]:
    run, gains, usual = story.run, story.gains, defaults()
    science, costs = ([p for p in pictures if p.key in keys] for keys in (SCIENCE, COSTS))
    compared = (("local training", gains.alone_run), ("global model", gains.common_run))
    same = [(k, str(v)) for k, v in sorted(run.config.items()) if usual.get(k) == v]
    text, reasons = auto.utilities(story)
    tables = {
        "Runs compared with": Table(("what", "run"), [one for one in compared if one[1]]),
        "Keys at their defaults": Table(("key", "value"), same),
        "Versions": Table(("package", "version"), sorted(run.versions.items())),
    }
    folds = [
        Fold("science", "Details for data scientists", text, science, reasons),
        Fold("costs", "Time and traffic", "", costs),
        _outliers(run),
        Fold("record", "Versions, defaults and compared runs", "", (), tables),
    ]
    return [one for one in folds if one.text or one.pictures or one.tables]


def _outliers(run: Run) -> Fold:
    """Return every silo's updates against the others', and what was done about them."""
    least = 4  # members of a group that are compared with it
    rounds = [(one.round, one.influence) for one in run.rounds]
    size = {n: len(group) for one in run.rounds for group in one.groups for n in group}
    rows = []
    for name in sorted(run.silos):
        clipped = [str(number) for number, one in rounds if name in one.clipped]
        out = [str(number) for number, one in rounds if name in one.apart]
        cosines = [one.cosines[name] for _, one in rounds if name in one.cosines]
        norms = [one.norms[name] for _, one in rounds if name in one.norms]
        blank = "not measured" if size.get(name, 0) >= least else "group too small"
        middle = [decimals(median(own), 2) if own else blank for own in (cosines, norms)]
        rows.append((name, *middle, *(", ".join(own[:20]) or "never" for own in (clipped, out))))
    done = [("Clipped", 3), ("Quarantined", 4)]
    found = [(what, [row[0] for row in rows if row[column] != "never"]) for what, column in done]
    text = happened = " ".join(
        f"{what}: {wire.some(names, MOST_NAMED)}." for what, names in found if names
    )
    if not happened and any(one.cosines or one.norms for _, one in rounds):
        text = "No update was clipped and no site was quarantined."
    elif not happened:
        secure, rows = run.config.get("secure"), []
        why = "secure aggregation hides the updates" if secure else "the record compares no updates"
        text = f"Nothing was checked: {why}."
    header = ("silo", "similarity to group", "update size (× median)", "clipped in round")
    table = Table((*header, "quarantined in round"), rows, cards=True)
    tables = {"Each site's updates": table}
    return Fold("outliers", "Outlier check", text, (), tables, open=bool(happened))


def _silo_table(story: Story) -> Table:
    run, gains, since, now = story.run, story.gains, story.history.since, story.history.now
    lead = run.lead
    joined = {n: one.round for one in reversed(run.rounds) for n in one.joined}
    left = {n: one.round for one in run.rounds for n in one.left}
    own, tested = run.last_personal_errors(), run.test_counts()
    figures, unlabelled = _final_figures(run), unlabelled_in(run)
    testing = run.final.grouping.testing if run.final else {}
    rows = []
    for name in story.history.order(run.silos):
        trains = name not in unlabelled and name not in testing
        gone = "left" if trains else NO_NUMBER
        remark = [f"joined in round {joined[name]}"] if joined.get(name, 1) > 1 else []
        remark += [f"left before round {left[name]}"] if name in left and name not in now else []
        remark += ["its samples have no labels yet"] * (name in unlabelled)
        remark += ["only tests"] * (name in testing)
        error, count, ends = gains.together.get(name), tested.get(name, 0), interval_of(run, name)
        counted = run.metric == wire.ERROR and error is not None
        wrong = f", {round((error or 0) * count)} wrong" if counted else ""
        rows.append(
            {
                "silo": name,
                f"gain, {lead.points}": signed_points(gains.gain.get(name, math.nan), lead),
                lead.title: lead.text(error),
                "local": lead.text(gains.alone.get(name)),
                "global": lead.text(gains.common.get(name)),
                "group": now[name][0] or "alone" if name in now else gone,
                "since round": str(since.get(name, NO_NUMBER)),
                "training samples": decimals(run.silos[name].num_examples, 0)
                if trains
                else NO_NUMBER,
                "test samples": f"{count}{wrong}" if count else NO_NUMBER,
                f"95% interval of the {lead.title}": lead.interval(*ends) if ends else "",
                "constant baseline": lead.text(figures.get(name, {}).get(wire.TRIVIAL)),
                "own last training (Per)": lead.text(own.get(name)),
                "remark": ", ".join(remark),
            }
        )
    known = {key for row in rows for key, text in row.items() if text not in ("", NO_NUMBER)}
    header = [key for key in rows[0] if key in known] if rows else []
    cells = [[row[key] for key in header] for row in rows]
    if gains.gain:
        spread = f"{signed_points(gains.mean_gain, lead)} ± {lead.gain(gains.rsd, sign='')}"
        together = mean_of(gains.common.get(name, math.nan) for name in gains.gain)
        means = (gains.mean_error, gains.mean_alone, together)
        mean = [f"mean of {len(gains.gain)} ± SD", spread, *map(lead.text, means)]
        count = header.index("group")
        cells.append([*mean[:count], *[""] * (len(header) - count)])
    return Table(header, cells, cards=True)


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
    by_itself, of_all = baselines(run)
    for keys, known, option, what in (
        (by_itself, story.alone, "--baseline-local", "Local training"),
        (of_all, story.common, "--baseline-global", "Global model"),
    ):
        if run.strategy and not has(run, keys) and known is None:
            then = f"coterie runs report {shlex.quote(run.name)} {option} RUN"
            title = f"{what}, to compare with (then: {with_federation(then, run.folder)})"
            commands[title] = repeat_command(run, keys)
    return commands


def repeat_command(run: Run, other: Keys | None = None) -> str:
    """Return the command that repeats a run, or one with ``other`` keys; defaults are left out."""
    usual = defaults()
    keys = {**run.config, "strategy": run.strategy or usual["strategy"], **(other or {})}
    line = ["coterie", "run", str(keys["strategy"])]
    others = foreign_keys(keys)
    if parent_of(run) and not str(keys["parent"]).endswith(".safetensors"):
        if other:  # another strategy cannot begin there
            keys["parent"] = ""
        elif run.resumed:
            keys["rounds"] = run.planned_rounds - run.resumed[0].after_round
    for key, value in keys.items():
        skipped = key in ("strategy", "runs-dir") or (other and key in ("label", "churn"))
        if not skipped and key not in others and usual.get(key) != value:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            line += ["--set", f"{key}={text}"]
    return with_federation(shlex.join(line), run.folder)


MAKERS: Sequence[Callable[[Story], Picture | str | None]] = (
    training.groups_picture,
    training.outcomes_picture,
    training.curves_picture,
    importance.importance_picture,
    auto.race_picture,
    auto.race_of_trees_picture,
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
        "metric": run.metric,
        "ended-early": run.ended_early or None,
        "seconds": finite(run.seconds),
        "ipr": finite(gains.ipr),
        "rsd": finite(gains.rsd),
        "mean-gain": finite(gains.mean_gain),
        "mean-error": finite(gains.mean_error),
        "local-run": gains.alone_run or None,
        "global-run": gains.common_run or None,
        "silos": {
            name: {
                "num-examples": finite(facts.num_examples),
                "group": (now[name][0] or "alone") if name in now else None,
                "since": since.get(name),
                "value": _value(run, gains.together.get(name)),
                "error": finite(gains.together.get(name)),
                "error-local": finite(gains.alone.get(name)),
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


def _value(run: Run, error: float | None) -> float | None:
    """Return the primary metric's value for an error."""
    return None if finite(error) is None or error is None else run.lead.value(error)
