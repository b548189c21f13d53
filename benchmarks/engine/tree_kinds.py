"""Silos of two hidden kinds whose model is boosted trees: who finds the kinds, and what is held.

    python -m benchmarks.engine.tree_kinds [--seeds 10]

Six silos with 300 rows each, in turn of two kinds. Either labels mean the opposite, or another
column decides the labels. Each seed is one run of ``auto``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Store, nodes, page, read, select, table, train
from coterie.tasks import SiloData, Task, trees
from coterie.tasks.base import Option

SILOS, ROWS, TEST_ROWS, COLUMNS = 6, 300, 200, 8
DIFFERENCES: Mapping[str, str] = {
    "labels": "labels mean the opposite",
    "columns": "other columns decide",
}
WITNESSES: Mapping[str, str] = {
    "HCCT": "HCCT's path",
    "clusters": "FedGroup's clusterings",
    "FedCollab": "FedCollab's structure",
}
"""How a candidate's source begins → its title."""
HELD = "what `auto` held"
RUN: Mapping[str, Any] = {"strategy": "auto", "rounds": 8}


class Kinds(Task):
    """A silo of one of two kinds. Options: ``difference``, ``seed``, ``silo``."""

    name = "kinds"
    num_classes = 2

    def model(self) -> Any:
        """Return 40 trees of depth 3."""
        return trees.named("trees-40x3", shape=(COLUMNS,), problem=self.problem)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Draw one silo's rows."""
        number, seed = int(options["silo"]), int(options["seed"])
        draw, kind = np.random.default_rng([seed, number]), number % 2
        x = draw.normal(size=(ROWS + TEST_ROWS, COLUMNS)).astype(np.float32)
        first = 3 * kind if options["difference"] == "columns" else 0
        score = np.abs(x[:, first]) - 0.8 + x[:, first + 1] * (x[:, first + 2] > 0)
        if options["difference"] == "labels" and kind:
            score = -score
        y = (draw.random(len(x)) < 1 / (1 + np.exp(-3 * score))).astype(np.int64)
        return SiloData(x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:], 2)


def measure(*, difference: str, seed: int) -> dict[str, Any]:
    """Return which witnesses propose exactly the kinds, what is held, and the losses."""
    names = [f"silo-{number}" for number in range(SILOS)]
    given: dict[str, Option] = {"difference": difference, "seed": seed}
    silos = nodes(f"{__name__}:Kinds", names, given, sums="trees")
    rounds = train(silos, {**RUN, "seed": seed}).result.rounds
    (verdict,) = [r.details["verdict"] for r in rounds if "verdict" in r.details]
    kinds = sorted([names[kind::2] for kind in range(2)])
    sources = [
        part for c in verdict["candidates"] if sorted(c["groups"]) == kinds
        for part in c["source"].split("; ")
    ]  # fmt: skip
    return {
        "found": {t: any(s.startswith(b) for s in sources) for b, t in WITNESSES.items()},
        "held": verdict["candidates"][verdict["winner"]]["source"],
        "right": sorted(map(list, rounds[-1].groups)) == kinds,
        "loss": round(float(np.mean([e[0] for e in rounds[-1].evaluation.values()])), 4),
    }


def document(entries: Sequence[Entry]) -> str:
    """Return the page."""
    lines = []
    for name, title in DIFFERENCES.items():
        own = select(entries, difference=name)
        found = [[e["found"][w] for e in own if w in e["found"]] for w in WITNESSES.values()]
        split = sum("split by silo" in e["held"] for e in own)
        held = f"{sum(e['right'] for e in own)} of {len(own)}"
        lines.append([title, *(f"{sum(one)} of {len(one)}" for one in found), held, str(split)])
    return page(
        "# Two hidden kinds of silos, boosted trees",
        "Made by `python -m benchmarks.engine.tree_kinds`. Six silos with 300 rows each, in turn "
        "of two kinds; 40 trees of depth 3. In how many seeds exactly the kinds were proposed, "
        "and held.",
        table(["kinds", *WITNESSES.values(), HELD, "held: one group split by silo"], lines),
    )


STORE = Store("tree_kinds", document, keys=("difference", "seed"))


def main() -> None:
    """Measure what is missing, and print the page."""
    given = read(STORE, __doc__, seeds=10)
    every = product(range(given.seeds), DIFFERENCES)
    given.store.fill(({"difference": d, "seed": s} for s, d in every), measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
