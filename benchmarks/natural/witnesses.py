"""Silos that are known to be alike, and who finds that out: updates, discriminators, the race.

    python -m benchmarks.natural.witnesses --data FOLDER [--seeds 10]

FOLDER holds the sets as ``NAME.npz``. Each seed draws the training rows and plays one run of
``auto`` with linear models. Its candidates are what the witnesses propose after two rounds in which
every silo trains alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Store, nodes, page, read, select, table, train
from benchmarks.natural.data import fold, registered
from benchmarks.natural.federated import RUN
from benchmarks.natural.tables import SETS
from coterie.tasks.base import Option

ALIKE: Mapping[str, Sequence[str]] = {
    "gefcom_load": ("zone02", "zone03", "zone07"),
    "office_caltech10": ("dslr", "webcam"),
}
"""Set → silos that are known to be alike: zones with one and the same series; one office."""
WITNESSES: Mapping[str, str] = {
    "HCCT": "HCCT, over all α",
    "clusters": "FedGroup, over all numbers of groups",
    "FedCollab": "FedCollab's discriminators, c auto",
}
"""How a candidate's source begins → its title."""
HELD = "what `auto` held"
ROUNDS = 20


def measure(*, data: str, dataset: str, seed: int) -> dict[str, Any]:
    """Return witness → silos in its smallest group that has all that are alike; 0: in none."""
    file = Path(data) / f"{dataset}.npz"
    names = list(fold(file, 0, seed).silos)
    given: dict[str, Option] = {"file": str(file), "fold": 0, "seed": seed}
    silos = nodes(registered(file, "linear"), names, given, auxiliary=True)
    keys = {**RUN, "strategy": "auto", "rounds": ROUNDS, "seed": seed}
    rounds = train(silos, keys, evaluate=False).result.rounds
    (verdict,) = [r.details["verdict"] for r in rounds if "verdict" in r.details]
    proposed: dict[str, list[Any]] = {title: [] for title in (*WITNESSES.values(), HELD)}
    for candidate in verdict["candidates"]:
        for source, (start, title) in product(candidate["source"].split("; "), WITNESSES.items()):
            if source.startswith(start):
                proposed[title] += candidate["groups"]
    proposed[HELD] += rounds[-1].groups
    return {"silos": len(names), "sizes": {t: smallest(g, dataset) for t, g in proposed.items()}}


def smallest(groups: Sequence[Sequence[str]], dataset: str) -> int:
    """Return the size of the smallest group that has all silos that are alike; 0 if none has."""
    return min((len(g) for g in groups if set(ALIKE[dataset]) <= set(g)), default=0)


def document(entries: Sequence[Entry]) -> str:
    """Return the page."""
    lines = []
    for dataset, title in product(ALIKE, (*WITNESSES.values(), HELD)):
        own = select(entries, dataset=dataset)
        if not own:
            continue
        sizes = [entry["sizes"][title] for entry in own]
        count, together = own[0]["silos"], [size for size in sizes if size]
        apart = sum(2 * size <= count for size in together)
        exact = sum(size == len(ALIKE[dataset]) for size in sizes)
        mean = f"{np.mean(together):.1f} of {count}" if together else "–"
        lines.append([SETS[dataset], title, *(f"{n} of {len(own)}" for n in (exact, apart)), mean])
    alike = "; ".join(f"{SETS[d]}: {', '.join(names)}" for d, names in ALIKE.items())
    head = ["set", "who proposes groups", "exactly", "within half of the silos", "mean group"]
    return page(
        "# Who finds silos that are alike",
        "Made by `python -m benchmarks.natural.witnesses --data FOLDER`.",
        f"Known to be alike: {alike}. "
        "*Exactly*: seeds in which these and no others are a proposed group. *Mean group*: size "
        "of the smallest proposed group with all of them, where there is one.",
        table(head, lines),
    )


STORE = Store("witnesses", document, keys=("dataset", "seed"))


def main() -> None:
    """Measure what is missing, and print the page."""
    given = read(STORE, __doc__, data=True, parts=ALIKE, seeds=10)
    cells = ({"dataset": d, "seed": s} for d, s in product(given.parts, range(given.seeds)))
    given.store.fill(cells, lambda **cell: measure(data=given.data, **cell))
    print(given.store.text())


if __name__ == "__main__":
    main()
