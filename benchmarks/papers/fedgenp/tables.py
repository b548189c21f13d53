"""FedGenP's tables as Markdown, gains seed by seed, beside the published figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.engine import generators
from benchmarks.kit import Entry, Store, select, spread, table, typed
from benchmarks.papers.fedgenp.columns import COLUMNS, Column

GENERATORS = " + generators"
PARTS = ("global", "per")
INTRODUCTION = (
    "Accuracy in %, mean ± deviation over seeds, of the last five rounds' mean where they were "
    "evaluated. All methods of a table are compared after the same round, the last that all of "
    "them reached. 20 mini-batches of 32 a round unless said; MNIST and EMNIST: lr 0.01, the "
    "network of FedGen's published code (conv 6, conv 16, each with BatchNorm, 784 → 32 → "
    "classes), whose numbers FedGenP's table repeats; the smaller columns: lr 0.05, an MLP of "
    "128 units. *Per*: each silo's own model after its training, on its own test data; "
    "FedEnsemble's is FedAvg's, whose training it shares. *Gain*: over FedAvg, or over the same"
    " groups without generators: mean ± deviation of the differences seed by seed, which say "
    "more than the deviations of the means, as a seed is another cut of the data. *Latents*: "
    "share that the other heads, and the receiver's own, label as meant. a_t = 10·0.98^(t−1), "
    "the released code's weights.",
    "",
    "*Cut and measured as released*, that is, as in the code released with the paper: the silos "
    "of its scripts, cut once for all seeds; 300 rounds, in which the learning rate falls by 1 % a "
    "round, so that they add up to 95 rounds of the other columns. BatchNorm's running statistics "
    "stay at the silos. Each silo tests the global model with its own, on a twentieth of the test "
    "images that have its labels. The figure is the mean of the five best rounds among every tenth "
    "and the last hundred. *Last five*: the mean of the last five rounds, without that choice.",
    "",
    "Made by `python -m benchmarks.papers.fedgenp --data FOLDER`, with what stands above each "
    "table. *Gap*: ours less the paper's. MNIST's columns end after 100 rounds, where the paper's "
    "Table 4 has 300; those measured as released have them. *Seeds*: of how many a row is. Columns "
    "of fewer than three, and what is listed at the end, take from some minutes to an hour a seed "
    "and are not finished; for letters with all data and for CelebA the project has no data.",
)


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown, and the measurement of the server's stage."""
    lines, missing = ["# FedGenP beside its baselines", "", *INTRODUCTION, ""], []
    for name, column in COLUMNS.items():
        runs = select(entries, column=name)
        if not runs:
            missing.append(f"- {column.title}")
            continue
        rounds = max(run["rounds"] for run in runs)
        heads = ["method", "global", "Per", "gain: global", "gain: Per", "latents: others, own"]
        heads += ["last five: global, Per"] if column.released else []
        heads += ["seeds", "paper: global, Per", "gap"] if column.paper else ["seeds"]
        shown = select(runs, rounds=rounds)
        command = typed("fedgenp", name, shown, rounds=column.rounds)
        lines += [f"## {column.title}: after {rounds} rounds", "", command, ""]
        lines += [*table(heads, _rows(column, shown)), ""]
    if missing:
        lines += ["## Not finished", "", *missing, ""]
    return "\n".join([*lines, generators.STORE.text().strip(), ""])


def _rows(column: Column, runs: Sequence[Entry]) -> Iterable[list[str]]:
    for arm in column.arms:
        found = sorted(select(runs, arm=arm), key=lambda run: run["seed"])
        if found:
            ours = tuple(np.mean([_mean(run, part) for run in found]) for part in PARTS)
            last = [", ".join(spread(np.mean(r[p]) for r in found if r[p]) for p in PARTS)]
            seeds = [*(last if column.released else []), str(len(found))]
            yield [*_cells(arm, found, runs), *seeds, *_paper(column, arm, ours)]
        errors = [r["ensemble"] for r in found if r["ensemble"] is not None]
        if errors:
            name = f"FedEnsemble (after {found[0]['rounds']})"
            published = _paper(column, "FedEnsemble", (np.mean(errors), ours[1]))
            per = spread(_mean(run, "per") for run in found)
            lacking = "––––" if column.released else "–––"
            yield [name, spread(errors), per, *lacking, str(len(errors)), *published]


def _cells(arm: str, found: Sequence[Entry], runs: Sequence[Entry]) -> list[str]:
    last = [run["latents"] for run in found if run["latents"]]
    others = arm.removesuffix(GENERATORS) if GENERATORS in arm else "FedAvg"
    base = {run["seed"]: run for run in select(runs, arm=others)}
    both = [(run, base[run["seed"]]) for run in found if run["seed"] in base and arm != "FedAvg"]
    return [
        arm,
        *(spread(_mean(run, part) for run in found) for part in PARTS),
        *(spread((_mean(a, part) - _mean(b, part) for a, b in both), sign="+") for part in PARTS),
        ", ".join(f"{share:.0f}" for share in np.mean(last, axis=0)) if last else "–",
    ]


def _mean(run: Entry, part: str) -> float:
    """Of the last rounds, or of the best as released; NaN if none was evaluated."""
    kept = run.get("best", run)[part]
    return float(np.mean(kept)) if kept else float("nan")


def _paper(column: Column, arm: str, ours: Sequence[Any]) -> list[str]:
    """The paper's accuracies and how far ours are from them: global, and each silo's own."""
    if not column.paper:
        return []
    figures = column.paper.get(arm.removesuffix(", a_t"))
    if figures is None:
        return ["–", "–"]
    gaps = [own - other for own, other in zip(ours, figures, strict=True)]
    shown = (f"{figures[0]:.2f}, {figures[1]:.2f}", f"{gaps[0]:+.2f}, {gaps[1]:+.2f}")
    return [text.replace("+nan", "–").replace("nan", "–") for text in shown]


STORE = Store("fedgenp", document, keys=("column", "arm", "seed", "rounds"))
