"""HCCT's experiments as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.kit import (
    Entry,
    Store,
    braces,
    select,
    spread,
    table,
    unfinished,
    with_device,
)
from benchmarks.papers.hcct.experiments import EXPERIMENTS, Experiment, Variant, hcct
from benchmarks.papers.hcct.observe import ENDLESS

CURVE = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 40, 50)
"""Rounds that the tables of the course of the error show."""
LAST = 5
"""Rounds whose mean error is shown as well."""
HEADS = (
    *("", "rounds", "ours", "the paper", "gap", "last five rounds", "best", "seeds"),
    *("over silos: std, min, max", "the paper's", "α", "groups", "right groups", "s"),
)


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    lines = [
        "# HCCT's experiments",
        "",
        "Made by `python -m benchmarks.papers.hcct --data FOLDER`, with the options above each "
        "table. Few seeds, fewer rounds or samples than the paper's are marked there: they take "
        "hours, and no result of one seed is more than a first reading.",
        "",
        "Local test error in % after the last round, mean over silos; mean ± standard deviation "
        "over seeds; *last five rounds*: their mean; *best*: of each silo's best round, which is "
        "what the paper's code logs. Batch 64, learning rate 0.1 · 0.995^(t−1), plain SGD. "
        "*HCCT*: memory 1, exact or best search, parameters compared. *HCCT, as published*: last "
        "round's updates, greedy merging. Groups are those of the last round, silos numbered from "
        "1. Seconds are the silos' own, mean over seeds: of one thread, or of a GPU that other "
        "runs shared.",
        "",
        *_missing(entries),
    ]
    for name in EXPERIMENTS:
        own = select(entries, experiment=name)
        settings = [{key: run[key] for key in ("experiment", "data", "precision")} for run in own]
        different = [setting for i, setting in enumerate(settings) if setting not in settings[:i]]
        for setting in sorted(different, key=lambda setting: -len(select(own, **setting))):
            lines += _section(setting, select(own, **setting))
    return "\n".join(lines)


def _missing(entries: Sequence[Entry]) -> list[str]:
    """What is not finished, experiment by experiment, in its setting with the most runs."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        full = select(entries, experiment=name, rounds=experiment.rounds)
        done = dict.fromkeys(experiment.variants, 0)
        for run in full:
            setting = {key: run[key] for key in ("variant", "data", "precision")}
            if run["variant"] in done:
                done[run["variant"]] = max(done[run["variant"]], len(select(full, **setting)))
        if text := unfinished(done):
            lines.append(f"- {experiment.title}. {text}")
    return [*lines, ""]


def _section(setting: Mapping[str, Any], runs: Sequence[Entry]) -> list[str]:
    experiment = EXPERIMENTS[setting["experiment"]]
    sizes = [size for run in runs for size in run["sizes"]]
    return [
        f"## {experiment.title}",
        "",
        f"{len(experiment.silos)} silos, mean {np.mean(sizes):.0f} training samples "
        f"({min(sizes)}–{max(sizes)}), {experiment.epochs} local epochs, {experiment.rounds} "
        "rounds in the paper" + _departure(setting, experiment) + f". {experiment.notes}",
        "",
        *(f"{command}  " for command in _commands(setting, experiment, runs)),
        "",
        *table(HEADS, _error_rows(experiment, runs)),
        "",
        *_curve_table(experiment, runs),
        *_alpha_table(runs),
    ]


def _commands(
    setting: Mapping[str, Any], experiment: Experiment, runs: Sequence[Entry]
) -> list[str]:
    """What to type for these runs."""
    commands = []
    for rounds in sorted({run["rounds"] for run in runs}, reverse=True):
        made = select(runs, rounds=rounds)
        extra = {run["variant"].removeprefix("HCCT, α = ") for run in made} - set(
            experiment.variants
        )
        seeds = 1 + max(run["seed"] for run in made)
        parts = [f"--parts {setting['experiment']} --seeds {seeds}"]
        if rounds != experiment.rounds:
            parts.append(f"--rounds {rounds}")
        if "split-samples" in _differing(setting, experiment):
            parts.append(f"--samples {setting['data']['split-samples']}")
        if setting["precision"] != "float32":
            parts.append(f"--precision {setting['precision']}")
        if extra:
            parts.append(f"--alphas {','.join(sorted(extra))}")
        command = " ".join(["python -m benchmarks.papers.hcct --data FOLDER", *parts])
        commands.append(with_device(command, made))
    return commands


def _differing(setting: Mapping[str, Any], experiment: Experiment) -> set[str]:
    """Options of the data that are not the experiment's."""
    ours, theirs = setting["data"], experiment.data
    return {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}


def _departure(setting: Mapping[str, Any], experiment: Experiment) -> str:
    parts = []
    data, differing = setting["data"], _differing(setting, experiment)
    if "split-samples" in differing:
        parts.append(f"**{data['split-samples']} training samples in all**")
    if setting["precision"] != "float32":
        parts.append(f"**{setting['precision']}**")
    return f" ({', '.join(parts)})" if parts else ""


def _by_variant(experiment: Experiment, runs: Sequence[Entry]) -> dict[tuple[str, int], list[Any]]:
    """(variant, rounds) → its runs, in the order of the paper's table."""
    names = [*experiment.variants, *(run["variant"] for run in runs)]
    rounds = sorted({run["rounds"] for run in runs}, reverse=True)
    found = {(n, count): select(runs, variant=n, rounds=count) for n in names for count in rounds}
    return {key: made for key, made in found.items() if made}


def _error_rows(experiment: Experiment, runs: Sequence[Entry]) -> Iterable[list[str]]:
    for (name, rounds), made in _by_variant(experiment, runs).items():
        variant = experiment.variants.get(name, Variant(hcct(0.0)))
        errors = np.array([run["errors"] for run in made])
        ours = errors.mean(axis=1)
        over = [errors.std(axis=1).mean(), errors.min(axis=1).mean(), errors.max(axis=1).mean()]
        best = [np.mean(run["best"]) for run in made if "best" in run]
        yield [
            name,
            str(rounds),
            spread(ours),
            "" if variant.paper is None else _published(variant.paper),
            "" if variant.paper is None else f"{ours.mean() - variant.paper[0]:+.2f}",
            spread(np.mean([error for _, error in run["curve"][-LAST:]]) for run in made),
            spread(best, missing=""),
            ", ".join(str(run["seed"]) for run in made),
            _triple(over),
            "" if variant.spread is None else _triple(variant.spread),
            *_grouping_cells(experiment, variant, made),
            f"{np.mean([run['silo seconds'] for run in made]):.0f}",
        ]


def _published(paper: Sequence[float]) -> str:
    mean, deviation = paper
    return f"{mean:.2f} ± {deviation:.2f}" if deviation else f"{mean:.2f}"


def _grouping_cells(experiment: Experiment, variant: Variant, made: Sequence[Entry]) -> list[str]:
    """α, the groups of the last round, and in how many seeds they are the right ones."""
    if variant.keys.get("strategy") != "hcct":
        return ["", "", ""]
    truth = [[i + 1 for i in group] for group in experiment.truth]
    last = [run["groups"] for run in made]
    shown = sorted({_groups_text(groups) for groups in last})
    alphas = sorted({_alpha_text(run.get("chosen alpha") or run["alpha"]) for run in made})
    return [
        ", ".join(alphas),
        shown[0] if len(shown) == 1 else f"{', '.join(str(len(g)) for g in last)} groups",
        f"{sum(groups == truth for groups in last)} of {len(made)}",
    ]


def _groups_text(groups: Sequence[Sequence[int]]) -> str:
    if all(len(group) == 1 for group in groups):
        return "all alone"
    if len(groups) == 1:
        return "all together"
    alone = sum(len(group) == 1 for group in groups)
    several = braces(group for group in groups if len(group) > 1)
    return several + (f", {alone} alone" if alone else "")


def _triple(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _curve_table(experiment: Experiment, runs: Sequence[Entry]) -> list[str]:
    """Error after some rounds: runs of other lengths can be compared where they overlap."""
    curves: dict[str, dict[int, list[float]]] = {}
    for (name, _), made in _by_variant(experiment, runs).items():
        for run in made:
            for number, error in run["curve"]:
                curves.setdefault(name, {}).setdefault(number, []).append(error)
    rounds = [r for r in CURVE if r <= max(run["rounds"] for run in runs)]
    rows = (
        [name, *(f"{np.mean(curve[r]):.1f}" if r in curve else "" for r in rounds)]
        for name, curve in curves.items()
    )
    return [
        "Mean error after so many rounds (a round's learning rate does not depend on how many "
        "follow). HCCT's before the last round is that of the models that the next round's groups "
        "start from.",
        "",
        *table(("", *map(str, rounds)), rows),
        "",
    ]


def _alpha_table(runs: Sequence[Entry]) -> list[str]:
    """What α would do with the training updates: alone, and in the course of HCCT."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        for key, views in run.get("observed", {}).items():
            for view, seen in views.items():
                found.setdefault((f"alone, {view}", key), []).append(seen)
        for key, seen in run.get("during", {}).items():
            name = f"{run['variant']}, α = {_alpha_text(run['alpha'])}"
            found.setdefault((name, key), []).append(seen)
    if not found:
        return []
    rows = (
        [name, key, "; ".join(map(_persistent_text, seen)), "; ".join(map(_right_text, seen))]
        for (name, key), seen in sorted(found.items(), key=lambda row: (row[0][0], int(row[0][1])))
    )
    return [
        "α on the training updates, seed by seed: what persists (`choose_alpha`: α, the length of "
        "its stretch as a ratio, its groups), and where the right groups are the answer.",
        "",
        *table(("updates of", "after round", "α that persists", "α of the right groups"), rows),
        "",
    ]


def _persistent_text(seen: Mapping[str, Any]) -> str:
    ratio = f"× {_number(seen['ratio'])}"
    if seen["alpha"] is None:
        return f"none ({ratio})"
    groups = _groups_text([[i + 1 for i in group] for group in seen["groups"]])
    return f"{seen['alpha']:.3g} ({ratio}: {groups})"


def _right_text(seen: Mapping[str, Any]) -> str:
    parts = [f"{_number(low)}–{_number(high)}" for low, high in seen["right"]]
    return " and ".join(parts) or "never"


def _alpha_text(alpha: float | str) -> str:
    return alpha if isinstance(alpha, str) else f"{alpha:.3g}"


def _number(value: float) -> str:
    return "∞" if value >= ENDLESS else f"{value:.3g}"


STORE = Store(
    "hcct", document, keys=("experiment", "variant", "seed", "rounds", "data", "precision")
)
