"""The papers' baselines on the papers' data, ours beside the papers' figures.

    python -m benchmarks.papers.baselines --data FOLDER [--rounds N]

Every run is stored as soon as it is done; a second call adds what is missing. In-process Grid, one
thread.

fashion   FedCollab's FashionMNIST column: 20 silos, label shift

FedGroup's rows of IFCA and FeSEM are in ``benchmarks.papers.fedgroup``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.kit import (
    UNBOUNDED,
    Entry,
    Store,
    best_so_far,
    braces,
    numbered_groups,
    page,
    ranking,
    read,
    say,
    select,
    spread,
    table,
    train,
    typed,
    unfinished,
)
from benchmarks.papers.fedcollab.experiments import EXPERIMENTS
from coterie.server.runs.record.metrics import ipr, rsd
from coterie.strategies.rounds.result import RunResult

ALONE = "Local"
CURVE = (1, 5, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300)
"""Rounds whose accuracy is shown."""

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """One column or row of a paper.

    Attributes:
        title, notes: for its table.
        rounds: of the paper.
        keys: of every run's configuration.
        methods: name → keys of its own.
        paper: method → its figures in %, as ``columns`` names them; NaN where there is none.
        columns: what the paper gives.
        nodes: (folder, seed) → the silos.
        score: a stored run and the one alone, over so many rounds → the same figures.
        reading: why the order differs from the paper's, where it does.
    """

    title: str
    notes: str
    rounds: int
    keys: Keys
    methods: Mapping[str, Keys]
    paper: Mapping[str, tuple[float, ...]]
    columns: tuple[str, ...]
    nodes: Callable[[str, int], list[Any]]
    score: Callable[[Entry, Entry | None, int], tuple[float, ...]]
    reading: str


def _plain_mean(run: Entry, alone: Entry | None, rounds: int) -> tuple[float, ...]:
    """FedCollab's: mean accuracy over silos after the last of these rounds, IPR, RSD."""
    errors = _errors_after(run, rounds)
    accuracy = 100 * (1 - float(np.mean(list(errors.values()))))
    if alone is None or alone is run:
        return accuracy, np.nan, np.nan
    base = _errors_after(alone, rounds)
    return accuracy, 100 * ipr(errors, base), 100 * rsd(errors, base)


def _errors_after(run: Entry, rounds: int) -> dict[str, float]:
    """Silo → error after the last measured round up to ``rounds``."""
    number = max(int(key) for key in run["errors"] if int(key) <= rounds)
    return {str(i): error for i, error in enumerate(run["errors"][str(number)])}


FASHION = EXPERIMENTS["fashion"]
PARTS: dict[str, Part] = {
    "fashion": Part(
        title="FedCollab's FashionMNIST column (label shift)",
        notes="20 silos: 0–9 have 2,100 training samples, 10–19 have 14; four label groups. MLP "
        "784-200-200-10, lr 0.1, batch 32, one epoch a round. K = 4 for IFCA, FeSEM and KMeans, "
        "the number of label groups; CFL with its defaults.",
        rounds=200,
        keys=FASHION.keys,
        methods={
            "IFCA": {"strategy": "ifca", "num-groups": 4},
            ALONE: {"strategy": "independent"},
            "FedCluster (CFL)": {"strategy": "cfl"},
            "FeSEM": {"strategy": "fesem", "num-groups": 4},
            "KMeans": {"strategy": "kmeans", "num-groups": 4},
            "FedAvg": {"strategy": "fedavg"},
        },
        paper={
            ALONE: (86.05, np.nan, np.nan),
            "FedAvg": (46.64, 46, 41.03),
            "IFCA": (91.49, 95, 5.62),
            "FedCluster (CFL)": (92.07, 95, 6.14),
            "FeSEM": (56.79, 45, 36.12),
            "KMeans": (69.30, 72, 35.87),
        },
        columns=("accuracy", "IPR", "RSD"),
        nodes=lambda folder, seed: FASHION.nodes(folder, seed),
        score=_plain_mean,
        reading="FeSEM and KMeans do far better here than in the paper; why was not tested. Here "
        "k-means++ picks their centres from the local models after round 1. In all runs of CFL, "
        "FeSEM and KMeans and in two of IFCA the ten small silos end as one group, without a large "
        "one; in the third of IFCA as two such groups.",
    ),
}


def measure(folder: str) -> Callable[..., Entry]:
    """What trains a cell of the store."""

    def one(part: str, method: str, seed: int, rounds: int) -> Entry:
        own = PARTS[part]
        silos = own.nodes(folder, seed)
        keys = {**UNBOUNDED, **own.keys, **own.methods[method], "seed": seed, "rounds": rounds}
        done = train(silos, keys, on_round=say(method, every=10))
        found = _measured(done.result, [str(node["name"]) for node in silos])
        return {**found, "seconds": round(done.seconds, 1)}

    return one


def _measured(result: RunResult, names: Sequence[str]) -> dict[str, Any]:
    """Errors and weighted accuracy of the rounds that tables read, groups, bytes."""
    last = result.rounds[-1].round
    errors: dict[str, list[float]] = {}
    weighted: list[tuple[int, float]] = []
    known: dict[str, tuple[float, int]] = {}
    for report in result.rounds:
        number = report.evaluated_round
        known |= {name: (error, count) for name, (_, error, count) in report.evaluation.items()}
        if not report.evaluation or not number:
            continue
        total = sum(count for _, count in known.values())
        wrong = sum(error * count for error, count in known.values())
        weighted.append((number, round(1 - wrong / total, 6)))
        if (number in CURVE or number == last) and len(known) == len(names):
            errors[str(number)] = [round(known[name][0], 5) for name in names]
    groups = numbered_groups(result.groups[last], names)
    shown = {number for number, _ in best_so_far(weighted)} | {*CURVE}
    costs: list[Any] = [c for r in result.rounds for c in (*r.silos.values(), *r.phases.values())]
    return {
        "errors": errors,
        "weighted": [entry for entry in weighted if entry[0] in shown],
        "groups": groups,
        "megabytes": round(sum(c.bytes_sent + c.bytes_received for c in costs) / 1e6, 1),
    }


# --- what is shown --------------------------------------------------------------------------------


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "# Baselines on the papers' data",
        "Made by `python -m benchmarks.papers.baselines --data FOLDER`. Figures in %; mean ± "
        "standard deviation over seeds where there are more than one. Methods are compared over "
        "the rounds that all of a table have; fewer than the paper's are marked, and fewer than "
        "three seeds are for want of hours: a first reading. In-process Grid, one thread; seconds "
        "are of shared cores. FedGroup's rows of IFCA and FeSEM are in `fedgroup.md`.",
        *(
            block
            for name, part in PARTS.items()
            if (own := select(entries, part=name))
            for block in _section(part, own)
        ),
    )


def _section(part: Part, runs: Sequence[Entry]) -> list[Any]:
    common = min(run["rounds"] for run in runs)
    shortened = "" if common >= part.rounds else f" **{common} rounds** (the paper: {part.rounds})."
    scores = {name: _scores(part, name, runs, common) for name in part.methods}
    scores = {name: rows for name, rows in scores.items() if rows}
    heads = [head for column in part.columns for head in (column, "the paper's", "gap")]
    full = {
        name: sum(run["rounds"] >= part.rounds for run in select(runs, method=name))
        for name in part.methods
    }
    cells = (
        _cells(name, rows, select(runs, method=name), part.paper[name])
        for name, rows in scores.items()
    )
    ours = {name: float(np.mean([row[0] for row in rows])) for name, rows in scores.items()}
    rounds = [r for r in CURVE if r <= max(run["rounds"] for run in runs)]
    return [
        f"## {part.title}",
        f"{part.notes}{shortened}",
        unfinished(full),
        typed("baselines", runs[0]["part"], runs, rounds=part.rounds),
        table(("method", "seeds", *heads, "groups, last round", "MB", "s"), cells),
        f"Order of methods, ours: {ranking(ours)}.\n"
        f"In the paper: {ranking({name: part.paper[name][0] for name in scores})}.",
        part.reading,
        "Share of right answers over all silos measured so far, by round, first seed:",
        table(("method", *map(str, rounds)), _curves(part, runs, rounds)),
    ]


def _cells(
    name: str, scores: Sequence[tuple[float, ...]], runs: Sequence[Entry], paper: tuple[float, ...]
) -> list[str]:
    figures = []
    for ours, theirs in zip(zip(*scores, strict=True), paper, strict=True):
        gap = f"{np.mean(ours) - theirs:+.2f}"
        figures += [spread(ours), *(("–", "–") if np.isnan(theirs) else (f"{theirs:g}", gap))]
    cost = (f"{np.mean([run[key] for run in runs]):.0f}" for key in ("megabytes", "seconds"))
    return [name, str(len(runs)), *figures, _groups(runs[0]["groups"]), *cost]


def _scores(part: Part, method: str, runs: Sequence[Entry], rounds: int) -> list[tuple[float, ...]]:
    alone = {run["seed"]: run for run in select(runs, method=ALONE)}
    own = select(runs, method=method)
    return [part.score(run, alone.get(run["seed"]), rounds) for run in own]


def _groups(groups: Sequence[Any]) -> str:
    return f"{len(groups)}" if len(groups) > 10 else braces(groups)


def _curves(part: Part, runs: Sequence[Entry], rounds: Sequence[int]) -> Iterable[list[str]]:
    """Mean accuracy over silos (all together, weighted by their test samples) by round, seed 0."""
    for name in part.methods:
        for run in select(runs, method=name)[:1]:
            by_round = dict(run["weighted"])
            yield [name, *(f"{100 * by_round[r]:.1f}" if r in by_round else "" for r in rounds)]


STORE = Store("baselines", document, keys=("part", "method", "seed"))


def main() -> None:
    """Measure what is missing, print."""
    methods = dict.fromkeys(method for part in PARTS.values() for method in part.methods)
    given = read(STORE, __doc__, data=True, parts=PARTS, rows=methods, seeds=3, rounds=0)
    cells = (
        {"part": p, "method": method, "seed": s, "rounds": given.rounds or PARTS[p].rounds}
        for s, p in product(range(given.seeds), given.parts)
        for method in PARTS[p].methods
        if method in given.only
    )
    given.store.fill(cells, measure(given.data))
    print(given.store.text())


if __name__ == "__main__":
    main()
