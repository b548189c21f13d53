"""HCCT's usual α with silos of other sizes and another optimiser: does it find the hidden groups?

    python -m benchmarks.papers.hcct.scaled [--seeds 5] [--only ROWS]

Nine silos of scikit-learn's digits in the demo's three hidden kinds, on the in-process Grid. With
100 and 400 samples each, silos of one kind share no sample; the kinds are the same images, turned
or relabelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Store, page, read, table, train
from benchmarks.papers.hcct.digits import by_setting, node
from coterie.server.machine.local import SiloSpec
from coterie.server.study.demo import KINDS, NUM_TEST, hidden_groups, silos
from coterie.strategies.partition.hcct import alpha_path
from coterie.strategies.rounds.reports import RoundReport

ROUNDS, SETTLED = 8, 4
SIZES = {"40, 70 and 120 samples (the demo)": 0, "100 samples": 100, "400 samples": 400}
OPTIMISERS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 0.1, "lr-decay": 0.995},
    "AdamW": {"optimiser": "adamw", "lr": 0.002},
}
SETTINGS = {f"{size}, {name}": (size, name) for size, name in product(SIZES, OPTIMISERS)}
HEADS = (
    "silos, optimiser",
    "hidden groups at the end",
    f"in rounds ≥ {SETTLED}",
    "α / median samples that gives them",
    "groups with α = 50",
)


def equal_silos(size: int, seed: int) -> list[SiloSpec]:
    """Return three silos of each kind with ``size`` training samples."""
    return [
        SiloSpec(
            f"{kind}-{number + 1}",
            options={
                "train": size,
                "test": NUM_TEST,
                "skip": number * (size + NUM_TEST),
                "split-seed": seed,
                **options,
            },
        )
        for kind, options in KINDS.items()
        for number in range(3)
    ]


def measure(setting: str, seed: int) -> Entry:
    """Whether the groups are the hidden ones, and for which α they would be, round by round."""
    size, optimiser = SETTINGS[setting]
    specs = equal_silos(SIZES[size], seed) if SIZES[size] else silos(seed)
    keys = {"strategy": "hcct", "seed": seed, "rounds": ROUNDS, "local-epochs": 5, "batch-size": 16}
    done = train([node(spec) for spec in specs], {**keys, **OPTIMISERS[optimiser]})
    hidden = hidden_groups([spec.name for spec in specs])
    rounds = [report for report in done.result.rounds if not report.final]
    planned = [sorted(map(sorted, report.details["planned"])) for report in rounds]
    found = [_ranges(report, hidden) for report in rounds]
    return {
        "error": float(np.mean(list(done.errors.values()))),
        "right": [groups == hidden for groups in planned],
        "range": [own["range"] for own in found],
        "groups at 50": found[-1]["groups at 50"],
    }


def _ranges(report: RoundReport, hidden: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return for which α, as a multiple of the median samples, the hidden groups are best."""
    names, sizes = report.details["compared"], report.details["sizes"]
    gram = np.array(report.details["similarity"]) * np.outer(*[report.details["norms"]] * 2)
    typical = float(np.median(sizes))
    found: dict[str, Any] = {"range": None}
    for stretch in alpha_path((gram + gram.T) / 2, sizes, solver="optimal", rtol=0.05):
        if stretch.alpha_low <= 50 < stretch.alpha_high:
            found["groups at 50"] = len(stretch.groups)
        if sorted(sorted(names[row] for row in group) for group in stretch.groups) == hidden:
            found["range"] = [stretch.alpha_low / typical, stretch.alpha_high / typical]
    return found


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rows = []
    for name, runs in by_setting(entries, SETTINGS).items():
        right = [run["right"] for run in runs]
        ranges = [own for run in runs for own in run["range"][SETTLED - 1 :] if own]
        low, high = max(own[0] for own in ranges), min(own[1] for own in ranges)
        at_50 = sorted({run["groups at 50"] for run in runs})
        rows.append(
            [
                name,
                f"{sum(own[-1] for own in right)} of {len(runs)}",
                f"{100 * np.mean([own[SETTLED - 1 :] for own in right]):.0f} %",
                f"{low:.2f} to {high:.2f}",
                ", ".join(map(str, at_50)),
            ]
        )
    return page(
        "# HCCT's usual α",
        "Nine silos of scikit-learn's digits, three hidden groups, α = two thirds of the median "
        f"silo's samples, {ROUNDS} rounds.\n"
        "Made by `python -m benchmarks.papers.hcct.scaled`. The range of α holds for every seed "
        f"and every round from {SETTLED} on.",
        table(HEADS, rows),
    )


STORE = Store("hcct_scaled", document, keys=("setting", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, rows=SETTINGS, seeds=5)
    cells = ({"setting": s, "seed": i} for s, i in product(given.only, range(given.seeds)))
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
