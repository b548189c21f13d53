"""FedGroup's Table III as Markdown, beside the published figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.kit import (
    Column,
    Entry,
    Store,
    columns,
    page,
    ranking,
    select,
    spread,
    table,
    unfinished,
)
from benchmarks.papers.fedgroup.data import DATASETS

ROUNDS = 300
BATCH, EPOCHS, SAMPLE, ALPHA = 10, 20, 20, 20
"""B, E, K and α of the paper."""
POOLED_EPOCHS, POOLED_BATCH = 20, 100
"""Of training on a group's pooled data."""
CURVE = (1, 5, 10, 20, 50, 100, 150, 200, 250, 300)
"""Rounds whose accuracy is shown."""


@dataclass(frozen=True)
class Method:
    """A column of Table III.

    Attributes:
        strategy: its name; with groups it has the paper's m of them.
        proximal: with the paper's μ.
        paper: data set → accuracy, %.
        groups: FedGroup's options.
    """

    strategy: str
    proximal: bool
    paper: Mapping[str, float]
    groups: Mapping[str, Any] = field(default_factory=dict)


def _paper(*figures: float | None) -> dict[str, float]:
    return {n: f for n, f in zip(DATASETS, figures, strict=True) if f is not None}


_MADC, _RCC, _RAC = {"measure": "madc"}, {"centres": "random"}, {"assign": "random"}
METHODS: dict[str, Method] = {
    "FG-EDC": Method("fedgroup", False, _paper(96.0, 97.9, 91.7, 96.8, 88.4)),
    "FedAvg": Method("fedavg", False, _paper(89.8, 95.3, 78.8, 82.7, 74.7)),
    "FG-MADC": Method("fedgroup", False, _paper(95.6, 97.9, 91.2, 94.6, 92.1), _MADC),
    "FGP-EDC": Method("fedgroup", True, _paper(96.1, 97.7, 91.7, 95.4, 87.4)),
    "RCC": Method("fedgroup", False, _paper(92.6, 96.5, 88.8, 91.5, 92.9), _RCC),
    "RAC": Method("fedgroup", False, _paper(88.8, 94.3, 74.7, 78.4, None), _RAC),
    "FedProx": Method("fedavg", True, _paper(90.7, 94.6, 77.9, 81.0, 81.5)),
    "FGP-MADC": Method("fedgroup", True, _paper(95.3, 97.7, 90.7, 93.6, 88.5), _MADC),
    "IFCA": Method("ifca", False, _paper(95.3, 97.8, 87.9, 95.5, 95.5)),
    "FeSEM": Method("fesem", False, _paper(89.1, 93.9, 65.6, 69.9, 92.1)),
}
"""In the order in which they are run."""
FIRST = "mnist-mclr"
MORE = {
    "FG-EDC, all pre-train": Method("fedgroup", False, {}, {"cold_start_silos": 1000}),
    "FG-EDC, m = 5": Method("fedgroup", False, {}, {"num_groups": 5, "cold_start_silos": 100}),
    "FG-EDC, m = 10": Method("fedgroup", False, {}, {"num_groups": 10, "cold_start_silos": 200}),
}
"""Other groups than the paper's, on the first row alone: see ``groups``."""
METHODS |= MORE
TARGETS = {("mnist-mclr", "FG-EDC"): 96.0, ("mnist-mlp", "FG-EDC"): 97.9}


def best(run: Entry, rounds: int = ROUNDS) -> float:
    """The paper's score: the accuracy of the best of these rounds."""
    return max(float(accuracy) for number, accuracy in run["best so far"] if number <= rounds)


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "# FedGroup's Table III",
        "Made by `python -m benchmarks.papers.fedgroup --data FOLDER`. Weighted test accuracy in "
        "%: hits over all silos / all test samples, mean ± standard deviation over seeds. "
        f"B = {BATCH}, E = {EPOCHS}, K = {SAMPLE} silos a round, α = {ALPHA}, the paper's η, μ, m; "
        "every cold start is one epoch and the round goes on with the other 19. FG: FedGroup, FGP: "
        "with FedProx's term. RCC, RAC: random centres, random assignment of cold silos (EDC). "
        "*Pooled*: one model per group trained on the pooled data of its silos, "
        f"{POOLED_EPOCHS} epochs of batch {POOLED_BATCH}: what these groups allow (not of letters: "
        "their η is too small for it to converge). *Tested*: share "
        "of the test samples whose silos have a group after the last round. In-process Grid, one "
        "thread; seconds are of shared cores.",
        f"Fewer than {ROUNDS} rounds are fewer than the paper's, and fewer than three seeds are "
        "for want of hours: ten methods and three seeds take about 25 minutes of one core "
        "(femnist-mclr), 60 (synthetic-mclr), 90 (mnist-mlp) and 180 (femnist-mlp). Orders are of "
        "the rounds that all methods of a row have. "
        "Sent140-LSTM, the paper's last row, needs tweets that are not among the project's data.",
        [
            f"- {row}. {text}"
            for row in DATASETS
            if (text := unfinished(_full(select(entries, row=row))))
        ],
        *(
            block
            for row in DATASETS
            if (own := select(entries, row=row))
            for block in _section(row, own)
        ),
    )


def longest(entries: Sequence[Entry]) -> list[Entry]:
    """Without runs that were made again with more rounds."""
    what = ("row", "method", "seed", "pretrain_epochs")
    most: dict[tuple[Any, ...], int] = {}
    for entry in entries:
        key = tuple(entry[k] for k in what)
        most[key] = max(entry["rounds"], most.get(key, 0))
    return [entry for entry in entries if entry["rounds"] == most[tuple(entry[k] for k in what)]]


def _full(runs: Sequence[Entry]) -> dict[str, int]:
    """Method of the paper → how many seeds have all its rounds."""
    made = select(runs, rounds=ROUNDS, pretrain_epochs=1)
    return {name: len(select(made, method=name)) for name in METHODS if name not in MORE}


def _section(row: str, runs: Sequence[Entry]) -> list[Any]:
    data, common = DATASETS[row], min(run["rounds"] for run in runs)
    ordered = [run for name in METHODS for run in select(runs, method=name)]
    rounds = [r for r in CURVE if r <= max(run["rounds"] for run in runs)]
    alike = dict.fromkeys((_name(run), run["rounds"]) for run in ordered)
    made = [[r for r in ordered if (_name(r), r["rounds"]) == key] for key in alike]
    curves = ([_name(own[0]), _seeds(own), *(_best_text(own, r) for r in rounds)] for own in made)
    return [
        f"## {row}",
        f"{data.silos} silos, η = {data.lr:g}, m = {data.num_groups}. {data.notes}".rstrip(),
        [f"`{command}`  " for command in _commands(row, runs)],
        "The paper's score, the best of all rounds, which is a choice by the test data:",
        table(SCORED, (_scored(own, [best(run) for run in own]) for own in made)),
        _order(row, runs, common),
        "Without that choice: mean of the last ten rounds.",
        table(SCORED, (_scored(own, [run["last ten"] for run in own]) for own in made)),
        "Seed by seed:",
        columns(ordered, RUN),
        "Best so far, after so many rounds, mean over seeds:",
        table(("", "seeds", *map(str, rounds)), curves),
    ]


def _scored(runs: Sequence[Entry], scores: Sequence[float]) -> list[str]:
    """A method's row: ours over its seeds, the paper's, and the gap."""
    paper = METHODS[runs[0]["method"]].paper.get(runs[0]["row"])
    beside = ["", ""] if paper is None else [f"{paper:.1f}", f"{np.mean(scores) - paper:+.2f}"]
    pooled = spread(run["pooled"] for run in runs)
    return [_name(runs[0]), str(runs[0]["rounds"]), spread(scores), *beside, pooled, _seeds(runs)]


def _seeds(runs: Sequence[Entry]) -> str:
    return ", ".join(str(run["seed"]) for run in runs)


def _commands(row: str, runs: Sequence[Entry]) -> list[str]:
    """What to type for these runs."""
    commands = []
    for rounds, epochs in sorted({(r["rounds"], r["pretrain_epochs"]) for r in runs}, reverse=True):
        made = select(runs, rounds=rounds, pretrain_epochs=epochs)
        methods = ";".join(name for name in METHODS if select(made, method=name))
        seeds = 1 + max(run["seed"] for run in made)
        parts = f'--parts {row} --only "{methods}" --seeds {seeds} --rounds {rounds}'
        more = "" if epochs == 1 else f" --pretrain-epochs {epochs}"
        commands.append(f"python -m benchmarks.papers.fedgroup --data FOLDER {parts}{more}")
    return commands


def _target(run: Entry) -> str:
    target = TARGETS.get((run["row"], run["method"]))
    if target is None:
        return ""
    return f"≥ {target}: {'met' if best(run) >= target else 'missed'}"


def _best_text(runs: Sequence[Entry], rounds: int) -> str:
    values = [best(run, rounds) for run in runs if rounds <= run["rounds"]]
    return f"{np.mean(values):.1f}" if values else ""


def _name(run: Entry) -> str:
    epochs: int = run["pretrain_epochs"]
    method: str = run["method"]
    return method + ("" if epochs == 1 else f", pre-training {epochs or EPOCHS} epochs")


def _order(row: str, runs: Sequence[Entry], common: int) -> list[str]:
    """Both orders of the methods, best first."""
    made: dict[str, list[float]] = {}
    for run in runs:
        made.setdefault(run["method"], []).append(best(run, common))
    named = {name: float(np.mean(scores)) for name, scores in made.items()}
    published = {name: METHODS[name].paper[row] for name in named if row in METHODS[name].paper}
    return [
        f"Order of methods, ours: {ranking(named, 1)}.",
        f"In the paper: {ranking(published, 1)}.",
    ]


SCORED = ("", "rounds", "ours", "the paper", "gap", "pooled", "seeds")
RUN: dict[str, Column] = {
    "": _name,
    "seed": "{seed}",
    "rounds": "{rounds}",
    "best": lambda run: f"{best(run):.2f}",
    "last ten": "{last ten:.2f}",
    "pooled": "{pooled:.2f}",
    "silos in groups": lambda run: ", ".join(map(str, run["groups"])),
    "tested": lambda run: f"{100 * run['tested']:.0f} %",
    "separation": lambda run: "" if (s := run["separation"]) is None else f"{s:.2f}",
    "s": "{seconds:.0f}",
    "target": _target,
}
"""Columns: methods over seeds, and every run."""
STORE = Store("fedgroup", document, keys=("row", "method", "seed", "rounds", "pretrain_epochs"))
